"""The sentence of a verdict on a detector whose average precision hides that it loses objects of some size."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.gate.headlines import contrast, is_flat, select_evals
from pipeline.gate.wording import definition_of
from pipeline.records.verdicts import Comparison
from pipeline.settings.base import Product


def explain_flat_average(name: str, comparisons: Sequence[Comparison], product: Product) -> str | None:
    """Say it in words when AP over all objects stays within its tolerance and AP of some size fails, else None."""
    precisions = [
        c
        for c in select_evals(comparisons, product, "detection")
        if definition_of(c.metric).estimator == "average_precision"
    ]
    whole = [c for c in precisions if c.bucket is None and definition_of(c.metric).area == "all"]
    parts = [c for c in precisions if c not in whole and c.outcome == "fail"]
    pairs = [(flat, part) for flat in whole for part in parts if is_flat(flat) and _is_part(part, flat)]
    if not pairs or any(c.outcome == "fail" for c in whole):
        return None
    flat, worst = max(pairs, key=lambda pair: pair[1].harm)
    what = worst.bucket or definition_of(worst.metric).area
    return contrast(f"aggregate flat, {what} objects down", name, flat, worst)


def _is_part(part: Comparison, whole: Comparison) -> bool:
    """Say whether a comparison is of some of the objects or pictures of another, over the same IoU thresholds."""
    ours, theirs = part.metric.partition("/"), whole.metric.partition("/")
    return ours[0] == theirs[0] and definition_of(part.metric).iou == definition_of(whole.metric).iou
