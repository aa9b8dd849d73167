"""Stage evaluate_images: render and judge every prompt with one candidate."""

from __future__ import annotations

from pathlib import Path

from pipeline.image_serving import read_image_candidate
from pipeline.images.evaluate import evaluate_images
from pipeline.params import load_params, pick_images
from pipeline.settings import BUILDS
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Evaluate the candidate named on the command line."""
    track = pick_images(load_params(), argv)
    candidate = read_image_candidate(BUILDS["images"], argv[0], track)
    evaluate_images(candidate, track, root=Path(), build=BUILDS["images"])
    return 0


if __name__ == "__main__":
    run_stage("evaluate_images", main)
