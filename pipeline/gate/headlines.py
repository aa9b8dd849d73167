"""The sentences of a verdict on its comparisons: which decided, what is not gated, and which gains were accepted.

What an average hides (a task, small objects) is the kind's matter; how that is said stands here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.gate.statistics import holm
from pipeline.gate.verdicts import GatedTolerance, is_open_watched
from pipeline.gate.wording import definition_of, format_harm, format_tolerance, format_value, name_comparison
from pipeline.records.reasons import Reason, ReasonKind
from pipeline.records.verdicts import Comparison, Outcome
from pipeline.settings.base import Product, Tolerance


def explain_comparisons(comparisons: Sequence[Comparison], outcome: Outcome) -> list[Reason]:
    """Return a reason for each comparison that decided, and for each other gain too large to be believed."""
    kinds = {"fail": ReasonKind.LOST} | ({"inconclusive": ReasonKind.OPEN} if outcome == "inconclusive" else {})
    decided = [c for c in comparisons if c.outcome in kinds and not is_open_watched(c)]
    suspicious = [c for c in comparisons if c.sentence.startswith("suspicious") and c not in decided]
    return [
        Reason(kind=kind, text=f"{name_comparison(c)}: {c.sentence}")
        for kind, c in [(kinds[c.outcome], c) for c in decided] + [(ReasonKind.SUSPICIOUS, c) for c in suspicious]
    ]


def list_limits(
    comparisons: Sequence[Comparison], tolerances: Mapping[str, GatedTolerance | Tolerance], alpha: float
) -> list[Reason]:
    """Return what a verdict takes somebody's word for, and what it does not cover."""
    texts = _list_accepted_gains(comparisons, tolerances) + _explain_ungated(comparisons, alpha)
    return [Reason(kind=ReasonKind.LIMIT, text=text) for text in texts]


def _explain_ungated(comparisons: Sequence[Comparison], alpha: float) -> list[str]:
    """Name buckets without a tolerance that lost more than their metric may lose overall, and that by no chance.

    Where the metric fails overall they are no news. Holm's family is the metric's buckets without a tolerance.
    """
    notes = []
    for whole in comparisons:
        if whole.bucket is not None or whole.tolerance is None or whole.outcome == "fail":
            continue
        parts = [c for c in comparisons if c.metric == whole.metric and c.bucket is not None and c.tolerance is None]
        chances = holm([1.0 if c.p is None else c.p for c in parts])
        lost = [c for c, p in zip(parts, chances, strict=True) if p <= alpha and c.harm > whole.tolerance]
        if lost:
            worst = max(lost, key=lambda c: c.harm)
            others = f"; {len(lost) - 1} more like it" if len(lost) > 1 else ""
            notes.append(
                f"not gated: {name_comparison(worst)}: lost "
                f"{format_harm(worst.metric, worst.harm)}, and {whole.metric} may lose "
                f"{format_tolerance(whole.metric, whole.tolerance)} overall{others}: a bucket that matters "
                "needs a tolerance of its own"
            )
    return notes


def _list_accepted_gains(
    comparisons: Sequence[Comparison], tolerances: Mapping[str, GatedTolerance | Tolerance]
) -> list[str]:
    """Return a reason for each gain beyond its tolerance that is accepted, with why it is."""
    gains = [
        (c, c.tolerance, tolerances[c.metric].accept_gain)
        for c in comparisons
        if c.tolerance is not None and c.harm < -c.tolerance
    ]
    return [
        f"gain accepted: {name_comparison(c)}: better by {format_harm(c.metric, -c.harm)}, more than the tolerance "
        f"of {format_tolerance(c.metric, limit)}: {why}"
        for c, limit, why in gains
        if why is not None
    ]


def select_evals(comparisons: Sequence[Comparison], product: Product, *kinds: str) -> list[Comparison]:
    """Return the comparisons of some kinds of evals."""
    return [c for c in comparisons if product.evals[c.metric.partition("/")[0]].kind in kinds]


def is_flat(c: Comparison) -> bool:
    """Say whether a metric moved within its tolerance, up or down."""
    return c.tolerance is not None and abs(c.harm) <= c.tolerance


def contrast(start: str, name: str, flat: Comparison, down: Comparison) -> str:
    """Say that one metric of a candidate stays where it was, and another falls."""
    moved = format_harm(flat.metric, -definition_of(flat.metric).sign * flat.harm, signed=True)  # as its value does
    allowed = format_tolerance(flat.metric, flat.tolerance or 0.0)
    return (
        f"{start}: {name} moves {flat.metric} by {moved} (tolerated {allowed}), "
        f"but {name_comparison(down)} falls from {format_value(down.metric, down.reference)} "
        f"to {format_value(down.metric, down.candidate)}"
    )
