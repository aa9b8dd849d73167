"""The judgement as lines for a terminal."""

from __future__ import annotations

from pipeline.gate.verdicts import (
    Judgement,
    Policy,
    is_blocking,
    is_open_watched,
    list_gated_evals,
    list_refusals,
    released_verdicts,
)
from pipeline.gate.wording import (
    format_harm,
    format_p,
    format_range,
    format_tolerance,
    format_value,
    name_comparison,
)
from pipeline.records.plain_text import format_line
from pipeline.records.reasons import ReasonKind
from pipeline.records.verdicts import Comparison, Verdict
from pipeline.report import PAGE
from pipeline.report.unproven import list_unproven
from pipeline.settings.base import BUILD


def render_gate(judgement: Judgement, *, are_here: bool = True) -> str:
    """Write what a person at the terminal needs: the verdicts, and where to look.

    Args:
        are_here: the candidates are, and were checked.
    """
    lines = [render_verdicts(judgement)]
    page = BUILD / judgement.policy.product / PAGE
    rows = {
        str(judgement.path.with_name("report.md")): "every comparison, the plots and the worst flips",
        **({str(page): "the same in one file, for a browser"} if page.is_file() else {}),
        "dvc metrics diff": "numbers against the last commit",
        "make ui": "MLflow: predictions side by side",
    }
    width = max(map(len, rows))
    lines += ["", "look closer:", *(f"  {place:<{width}}  {what}" for place, what in rows.items())]
    if not are_here:
        candidates = BUILD / judgement.policy.product / "candidates"
        lines += ["", f"{candidates} is not here: that these weights would ship was not checked"]
    return "\n".join(lines)


def render_verdicts(judgement: Judgement) -> str:
    """Write the released verdicts: a table, and for each that is no pass why."""
    verdicts = released_verdicts(judgement)
    width = max(len("release"), *(len(v.candidate) for v in verdicts))
    lines = [line for sentence in list_unproven(judgement) for line in (sentence, "")]
    lines.append(f"{'release':<{width}}  {'verdict':<12}  gated  fail  inconclusive  refused")
    lines += [_row(verdict, width) for verdict in verdicts]
    for verdict in verdicts:
        if verdict.outcome != "pass":
            lines += _why(verdict, judgement.policy)
    lines += _describe_limits(judgement, verdicts)
    return "\n".join(map(format_line, lines))


def _describe_limits(judgement: Judgement, verdicts: list[Verdict]) -> list[str]:
    """Say what the verdicts do not cover: evals and buckets without a tolerance, endpoints nobody could look into.

    So do gains that somebody said are to be believed.
    """
    gated = list_gated_evals(judgement.policy.tolerances)
    ungated = [name for name in judgement.policy.eval_kinds if name not in gated]
    lines = [f"not gated, as no tolerance is set: {', '.join(ungated)}"] if ungated else []
    lines += [
        f"{verdict.candidate}: {note}"
        for verdict in verdicts
        for note in verdict.reasons
        if note.kind == ReasonKind.LIMIT
    ]
    return ["", *lines] if lines else []


def _row(verdict: Verdict, width: int) -> str:
    outcomes = [c.outcome for c in verdict.comparisons if c.outcome != "reported"]
    num_refused = len(list_refusals(verdict))
    return (
        f"{verdict.candidate:<{width}}  {verdict.outcome.upper():<12}  {len(outcomes):>5}  "
        f"{outcomes.count('fail'):>4}  {outcomes.count('inconclusive'):>12}  {num_refused:>7}"
    )


def _why(verdict: Verdict, policy: Policy) -> list[str]:
    reason = "gate.on_inconclusive is warn" if policy.on_inconclusive == "warn" else "what is open is not critical"
    effect = "blocks the release" if is_blocking(verdict, policy) else f"does not block: {reason}"
    lines = ["", f"{verdict.candidate}: {verdict.outcome}, {effect}"]
    lines += [f"  {reason}" for reason in verdict.reasons if reason.kind == ReasonKind.HEADLINE]
    for label, kind in (
        ("refused", ReasonKind.REFUSED),
        ("fail", ReasonKind.FAILED),
        ("inconclusive", ReasonKind.UNPROVEN),
        ("no gain", ReasonKind.NO_GAIN),
        ("cause", ReasonKind.CAUSE),
    ):
        lines += [f"  {label:<12} {reason.text}" for reason in verdict.reasons if reason.kind == kind]
    shown = [
        c
        for outcome in ("fail", "inconclusive")
        for c in verdict.comparisons
        if c.outcome == outcome and not is_open_watched(c)
    ]
    for comparison in shown:
        lines += describe(comparison)
    return lines


def describe(comparison: Comparison) -> list[str]:
    """Write one comparison in three lines: name, numbers, sentence."""
    c = comparison
    flips = f"b {c.b}, c {c.c} of n {c.n}" if c.b is not None else f"n {c.n}"
    tolerance = format_tolerance(c.metric, c.tolerance) if c.tolerance is not None else "none"
    return [
        f"  {c.outcome:<12} {name_comparison(c)}",
        f"      {format_value(c.metric, c.reference)} -> {format_value(c.metric, c.candidate)}; {flips}; "
        f"harm {format_harm(c.metric, c.harm)} (bounds {format_range(c.metric, c.low, c.high)}), "
        f"tolerance {tolerance}, p {format_p(c.p_holm)} after Holm",
        f"      {c.sentence}",
    ]
