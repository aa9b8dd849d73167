"""The sentence at the top of a verdict when an average stays where it is and what matters falls."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.gate.wording import definition_of, format_harm, format_tolerance, format_value, name_comparison
from pipeline.settings import Track
from pipeline.verdict_records import Comparison


def explain_flat_perplexity(name: str, comparisons: Sequence[Comparison], params: Track) -> str | None:
    """Say it in words when perplexity stays within its tolerance and a task fails, else None."""
    flat = [c for c in _select(comparisons, params, "perplexity") if c.bucket is None and _is_flat(c)]
    down = [c for c in _select(comparisons, params, "tool_calls", "trajectories") if c.outcome == "fail"]
    if not flat or not down:
        return None
    return _contrast("perplexity flat, task down", name, flat[0], max(down, key=lambda c: (c.bucket is None, c.harm)))


def explain_flat_average(name: str, comparisons: Sequence[Comparison], params: Track) -> str | None:
    """Say it in words when AP over all objects stays within its tolerance and AP of some size fails, else None."""
    found = [c for c in _select(comparisons, params, "detection")
             if definition_of(c.metric).estimator == "average_precision"]  # fmt: skip
    whole = [c for c in found if c.bucket is None and definition_of(c.metric).area == "all"]
    parts = [c for c in found if c not in whole and c.outcome == "fail"]
    pairs = [(flat, part) for flat in whole for part in parts if _is_flat(flat) and _is_part(part, flat)]
    if not pairs or any(c.outcome == "fail" for c in whole):
        return None
    flat, worst = max(pairs, key=lambda pair: pair[1].harm)
    what = worst.bucket or definition_of(worst.metric).area
    return _contrast(f"aggregate flat, {what} objects down", name, flat, worst)


def _is_part(part: Comparison, whole: Comparison) -> bool:
    """Say whether a comparison is of some of the objects or pictures of another, over the same IoU thresholds."""
    ours, theirs = part.metric.partition("/"), whole.metric.partition("/")
    return ours[0] == theirs[0] and definition_of(part.metric).iou == definition_of(whole.metric).iou


def _select(comparisons: Sequence[Comparison], params: Track, *kinds: str) -> list[Comparison]:
    return [c for c in comparisons if params.evals[c.metric.partition("/")[0]].kind in kinds]


def _is_flat(c: Comparison) -> bool:
    return c.tolerance is not None and abs(c.harm) <= c.tolerance


def _contrast(start: str, name: str, flat: Comparison, down: Comparison) -> str:
    moved = format_harm(flat.metric, -definition_of(flat.metric).sign * flat.harm, signed=True)  # as its value does
    allowed = format_tolerance(flat.metric, flat.tolerance or 0.0)
    return (f"{start}: {name} moves {flat.metric} by {moved} (tolerated {allowed}), "
            f"but {name_comparison(down)} falls from {format_value(down.metric, down.reference)} "
            f"to {format_value(down.metric, down.candidate)}")
