"""Stage gate: let a release through or stop it. Reads the judgement and checks that it is about what would ship.

DVC does not record a stage that fails, so this one fires again on every run until the cause is
gone. Its only output is the marker of a pass, removed before anything is judged.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.gate.loosening import check_loosening
from pipeline.gate.verdicts import (
    Judgement,
    blocking_verdicts,
    check_candidates,
    check_outcomes,
    check_policy,
    render_gate,
    write_marker,
)
from pipeline.params import get_track, load_params
from pipeline.record_files import read_record
from pipeline.settings import BUILDS, REPORTS, Track
from stages.cli import run_stage

MARKER = "gate.ok"


def main(argv: list[str]) -> int:
    """Print the verdicts of the release of the track named on the command line; return 1 when one of them blocks."""
    track = get_track(load_params(), " ".join(argv) or "text", kind=Track)
    build = BUILDS[track.name]
    marker = build / MARKER
    marker.unlink(missing_ok=True)
    verdict_path = REPORTS[track.name] / "verdict.json"
    judgement = read_record(verdict_path, Judgement)
    check_policy(judgement, track)
    check_loosening(judgement.policy, Path())
    check_outcomes(judgement)
    are_here = check_candidates(judgement, track, Path())
    print(render_gate(judgement))
    if not are_here:
        print(f"\n{build / 'candidates'} is not here: that these weights would ship was not checked")
    if blocking_verdicts(judgement):
        return 1
    write_marker(marker, judgement, verdict_path=verdict_path)
    return 0


if __name__ == "__main__":
    run_stage("gate", main)
