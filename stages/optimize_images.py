"""Turn one image candidate's settings into a pipeline folder and a record: `python -m stages.optimize_images NAME`."""

from __future__ import annotations

from pathlib import Path

from pipeline.image_params import ImageTrack
from pipeline.images.candidate import build_image_candidate
from pipeline.params import check_candidate, get_track, load_params
from pipeline.settings import BUILDS
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Build the candidate named on the command line and say what it became."""
    track = get_track(load_params(), "images", kind=ImageTrack)
    candidate = build_image_candidate(check_candidate(track, argv), track, root=Path(), build=BUILDS["images"])
    steps = ", ".join(step["kind"] for step in candidate.steps) or "no steps"
    print(f"{candidate.name}: {steps}; {candidate.serving.summary}, {candidate.checkpoint.num_bytes / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    run_stage("optimize_images", main)
