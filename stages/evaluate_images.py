"""Stage evaluate_images: render and judge every prompt with one candidate."""

from __future__ import annotations

from pathlib import Path

from pipeline.image_params import ImageTrack
from pipeline.image_serving import read_image_candidate
from pipeline.images.evaluate import evaluate_images
from pipeline.params import check_candidate, get_track, load_params
from pipeline.settings import BUILDS
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Evaluate the candidate named on the command line."""
    track = get_track(load_params(), "images", kind=ImageTrack)
    candidate = read_image_candidate(BUILDS["images"], check_candidate(track, argv), track)
    evaluate_images(candidate, track, root=Path(), build=BUILDS["images"])
    return 0


if __name__ == "__main__":
    run_stage("evaluate_images", main)
