"""The cases behind a failure or an open verdict, for the report: those that lost most, and those that flipped."""

from __future__ import annotations

from pipeline.gate.audits import Measured
from pipeline.gate.wording import escape_markdown
from pipeline.records.verdicts import Verdict
from pipeline.report.explain import explain_verdict
from pipeline.report.explanation_records import LostCases
from pipeline.report.markdown import render_table, show_flip

_MAX_FLIPS = 5


def explain_failure(verdict: Verdict, measured: Measured, kind: str) -> list[str]:
    """Return the lines of the section; outputs of all products but text are no text, and are named only."""
    explained = explain_verdict(verdict, measured, kind)
    lines = ["", "### Cases behind it", ""]
    for lost in explained.lost:
        lines += [f"{escape_markdown(lost.title)}:", "", _tabulate(lost)]
    flips = explained.flips[:_MAX_FLIPS]
    if kind == "text":
        lines += [line for flip in flips for line in show_flip(flip)]
    elif flips:
        rows = [[flip.kind, escape_markdown(flip.case_id), escape_markdown(flip.prompt.text)] for flip in flips]
        header = [["", "image", "prompt" if kind == "images" else "picture"], ["---"] * 3]
        lines += ["Images that became unsound (loss) or sound (gain):", "", render_table([*header, *rows])]
    return [*lines, f"All cases: `{explained.folder}/`, side by side in MLflow (`make ui`)."]


def _tabulate(lost: LostCases) -> str:
    rows = [list(lost.columns), ["---"] + ["---:"] * (len(lost.columns) - 1)]
    return render_table(rows + [[escape_markdown(cell) for cell in row] for row in lost.rows])
