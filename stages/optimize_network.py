"""Turn one network candidate's settings into a record: `python -m stages.optimize_network detector NAME`."""

from __future__ import annotations

from pathlib import Path

from pipeline.network_params import NetworkTrack
from pipeline.networks.candidate import build_network_candidate
from pipeline.params import check_candidate, get_track, load_params
from pipeline.settings import BUILDS
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Build the candidate named on the command line, behind its track, and say what it became."""
    track = get_track(load_params(), "".join(argv[:1]), kind=NetworkTrack)
    name = check_candidate(track, argv[1:])
    candidate = build_network_candidate(name, track, root=Path(), build=BUILDS[track.name])
    steps = ", ".join(step["kind"] for step in candidate.steps) or "no steps"
    print(f"{name}: {steps}; {candidate.serving.summary}, {len(candidate.fallbacks)} fallbacks")
    return 0


if __name__ == "__main__":
    run_stage("optimize_network", main)
