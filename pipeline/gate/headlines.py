"""The sentences of a verdict that say what an average hides (a task, small objects, a bucket that nothing gates), and
which gains were accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.gate.statistics import holm
from pipeline.gate.verdicts import GatedTolerance, is_open_watched
from pipeline.gate.wording import definition_of, format_harm, format_tolerance, format_value, name_comparison
from pipeline.records.reasons import Reason, ReasonKind
from pipeline.records.verdicts import Comparison, Outcome
from pipeline.settings.base import Product, Tolerance


def explain_flat_perplexity(name: str, comparisons: Sequence[Comparison], params: Product) -> str | None:
    """Say it in words when perplexity stays within its tolerance and a task fails, else None."""
    flat = [c for c in _select(comparisons, params, "perplexity") if c.bucket is None and _is_flat(c)]
    down = [c for c in _select(comparisons, params, "tool_calls", "trajectories") if c.outcome == "fail"]
    if not flat or not down:
        return None
    return _contrast("perplexity flat, task down", name, flat[0], max(down, key=lambda c: (c.bucket is None, c.harm)))


def explain_flat_average(name: str, comparisons: Sequence[Comparison], params: Product) -> str | None:
    """Say it in words when AP over all objects stays within its tolerance and AP of some size fails, else None."""
    found = [
        c for c in _select(comparisons, params, "detection") if definition_of(c.metric).estimator == "average_precision"
    ]
    whole = [c for c in found if c.bucket is None and definition_of(c.metric).area == "all"]
    parts = [c for c in found if c not in whole and c.outcome == "fail"]
    pairs = [(flat, part) for flat in whole for part in parts if _is_flat(flat) and _is_part(part, flat)]
    if not pairs or any(c.outcome == "fail" for c in whole):
        return None
    flat, worst = max(pairs, key=lambda pair: pair[1].harm)
    what = worst.bucket or definition_of(worst.metric).area
    return _contrast(f"aggregate flat, {what} objects down", name, flat, worst)


def explain_comparisons(comparisons: Sequence[Comparison], outcome: Outcome) -> list[Reason]:
    """Return a reason for each comparison that decided, and for each gain too large to be believed."""
    kinds = {"fail": ReasonKind.LOST} | ({"inconclusive": ReasonKind.OPEN} if outcome == "inconclusive" else {})
    decided = [
        Reason(kind=kinds[c.outcome], text=f"{name_comparison(c)}: {c.sentence}")
        for c in comparisons
        if c.outcome in kinds and not is_open_watched(c)
    ]
    return decided + [
        Reason(kind=ReasonKind.SUSPICIOUS, text=f"{name_comparison(c)}: {c.sentence}")
        for c in comparisons
        if c.sentence.startswith("suspicious")
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


def _is_part(part: Comparison, whole: Comparison) -> bool:
    """Say whether a comparison is of some of the objects or pictures of another, over the same IoU thresholds."""
    ours, theirs = part.metric.partition("/"), whole.metric.partition("/")
    return ours[0] == theirs[0] and definition_of(part.metric).iou == definition_of(whole.metric).iou


def _select(comparisons: Sequence[Comparison], params: Product, *kinds: str) -> list[Comparison]:
    return [c for c in comparisons if params.evals[c.metric.partition("/")[0]].kind in kinds]


def _is_flat(c: Comparison) -> bool:
    return c.tolerance is not None and abs(c.harm) <= c.tolerance


def _contrast(start: str, name: str, flat: Comparison, down: Comparison) -> str:
    moved = format_harm(flat.metric, -definition_of(flat.metric).sign * flat.harm, signed=True)  # as its value does
    allowed = format_tolerance(flat.metric, flat.tolerance or 0.0)
    return (
        f"{start}: {name} moves {flat.metric} by {moved} (tolerated {allowed}), "
        f"but {name_comparison(down)} falls from {format_value(down.metric, down.reference)} "
        f"to {format_value(down.metric, down.candidate)}"
    )
