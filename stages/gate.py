"""Stage gate: let the release through or stop it. Reads the judgement and checks that it is about what would ship.

DVC does not record a stage that fails, so this one fires again on every run until the cause is
gone. Its only output is the marker of a pass, removed before anything is judged.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.gate.verdicts import (
    Judgement,
    blocking_verdicts,
    check_candidates,
    check_outcomes,
    check_policy,
    render_gate,
    write_marker,
)
from pipeline.params import load_params
from pipeline.records import read_record
from pipeline.settings import BUILDS, REPORTS, Track
from stages.cli import run_stage

MARKER = "gate.ok"


def main(argv: list[str]) -> int:
    """Gate the text track."""
    return gate(load_params(), "text")


def gate(track: Track, name: str) -> int:
    """Print the verdicts of a track's release; return 1 when one of them blocks."""
    marker = BUILDS[name] / MARKER
    marker.unlink(missing_ok=True)
    verdict_path = REPORTS[name] / "verdict.json"
    judgement = read_record(verdict_path, Judgement)
    check_policy(judgement, track)
    check_outcomes(judgement)
    are_here = check_candidates(judgement, track, Path())
    print(render_gate(judgement))
    if not are_here:
        print(f"\n{BUILDS[name] / 'candidates'} is not here: that these weights would ship was not checked")
    if blocking_verdicts(judgement):
        return 1
    write_marker(marker, judgement, verdict_path=verdict_path)
    return 0


if __name__ == "__main__":
    run_stage("gate", main)
