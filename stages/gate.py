"""Stage gate: let the release through or stop it. Reads the judgement and checks that it is about what would ship.

DVC does not record a stage that fails, so this one fires again on every run until the cause is
gone. Its only output is the marker of a pass, removed before anything is judged.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.gate.verdicts import (
    VERDICT_PATH,
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
from stages.cli import run_stage

MARKER = Path("build/gate.ok")


def main(argv: list[str]) -> int:
    """Print the verdicts of the release; return 1 when one of them blocks."""
    MARKER.unlink(missing_ok=True)
    params = load_params()
    judgement = read_record(VERDICT_PATH, Judgement)
    check_policy(judgement, params)
    check_outcomes(judgement)
    are_here = check_candidates(judgement, params, Path())
    print(render_gate(judgement))
    if not are_here:
        print("\nbuild/candidates is not here: that these weights would ship was not checked")
    if blocking_verdicts(judgement):
        return 1
    write_marker(MARKER, judgement, verdict_path=VERDICT_PATH)
    return 0


if __name__ == "__main__":
    run_stage("gate", main)
