"""The cases behind a failure, for the report: those that lost most, and those whose judgement changed."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.gate.compare import Measured
from pipeline.gate.flips import Flip, WorstCase, excerpt, worst_cases, worst_flips
from pipeline.gate.images import tabulate_flips
from pipeline.gate.markdown import render_block, render_table
from pipeline.gate.metrics import MetricDefinition
from pipeline.gate.wording import definition_of, escape_markdown
from pipeline.verdict_records import Comparison, Verdict

_MAX_CASES = 5


def explain_failure(verdict: Verdict, measured: Measured, track: str) -> list[str]:
    """Return the lines of the section; outputs of all tracks but text are no text, and are named only."""
    lines = ["", "### Cases behind it", ""]
    for c in verdict.comparisons:
        if c.outcome == "fail" and c.b is None:
            cases = worst_cases(c, measured.pairs[c.metric.partition("/")[0]], limit=_MAX_CASES)
            lines += [_introduce(c), "", render_table(_tabulate(cases, definition_of(c.metric)))]
    flips = worst_flips(verdict.comparisons, measured.pairs, limit=_MAX_CASES)
    if track == "text":
        lines += [line for flip in flips for line in _show_flip(flip)]
    elif flips:
        rows = tabulate_flips(flips, asked="prompt" if track == "images" else "picture")
        lines += ["Images that became unsound (loss) or sound (gain):", "", render_table(rows)]
    folder = measured.evidence.folder.as_posix() if measured.evidence else f"build/evaluations/{verdict.candidate}"
    return [*lines, f"All cases: `{folder}/`, side by side in MLflow (`make ui`)."]


def _introduce(c: Comparison) -> str:
    definition, where = definition_of(c.metric), f" [{escape_markdown(c.bucket)}]" if c.bucket else ""
    if definition.estimator == "average_precision":
        return f"Images that lost most of {escape_markdown(c.metric)}{where}, objects found{_explain_iou(definition)}:"
    per = f" per {definition.weight}" if definition.weight else ""
    return f"Cases that lost most, {definition.score}{per}{where}:"


def _explain_iou(definition: MetricDefinition) -> str:
    return " on average over the IoU thresholds" if definition.iou is None else f" at IoU {definition.iou:g}"


def _tabulate(cases: Sequence[WorstCase], definition: MetricDefinition) -> list[list[str]]:
    if definition.estimator == "average_precision":
        rows = [["image", "objects", "the reference finds", "the candidate finds"], ["---"] + ["---:"] * 3]
        return rows + [[escape_markdown(case.case_id), f"{case.weight:g}", f"{case.reference:.1f}",
                        f"{case.candidate:.1f}"] for case in cases]  # fmt: skip
    rows = [["case", "reference", "candidate"], ["---", "---:", "---:"]]
    return rows + [[escape_markdown(case.case_id), f"{case.reference / case.weight:.4f}",
                    f"{case.candidate / case.weight:.4f}"] for case in cases]  # fmt: skip


def _show_flip(flip: Flip) -> list[str]:
    where = "the outputs are equal" if flip.character is None else (
        f"first difference in line {(flip.line or 0) + 1}, character {flip.character}")
    buckets = f" [{', '.join(flip.buckets)}]" if flip.buckets else ""
    case = escape_markdown(f"{flip.eval_name} / {flip.case_id}{buckets}")
    return [
        f"<details><summary><b>{flip.kind}</b> {case}: {where}</summary>", "",
        "Prompt:", "", *render_block(excerpt(flip.prompt, None)), "", "Reference:", "",
        *render_block(excerpt(flip.reference, flip.character)), "", "Candidate:", "",
        *render_block(excerpt(flip.candidate, flip.character)), "", "</details>", ""]
