"""Stage evaluate_network: run every picture through one candidate of a network track and judge what comes out."""

from __future__ import annotations

from pathlib import Path

from pipeline.network_params import NetworkTrack
from pipeline.network_serving import read_network_candidate
from pipeline.networks.evaluate import evaluate_network
from pipeline.params import check_candidate, get_track, load_params
from pipeline.settings import BUILDS
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Evaluate the candidate named on the command line, behind its track."""
    track = get_track(load_params(), "".join(argv[:1]), kind=NetworkTrack)
    name = check_candidate(track, argv[1:])
    build = BUILDS[track.name]
    evaluate_network(read_network_candidate(build, name, track), track, root=Path(), build=build)
    return 0


if __name__ == "__main__":
    run_stage("evaluate_network", main)
