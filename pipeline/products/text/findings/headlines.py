"""The sentence of a verdict on a language model whose perplexity hides that it fails its tasks."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.gate.headlines import contrast, is_flat, select_evals
from pipeline.products.text.settings import TextProduct
from pipeline.records.verdicts import Comparison


def explain_flat_perplexity(name: str, comparisons: Sequence[Comparison], product: TextProduct) -> str | None:
    """Say it in words when perplexity stays within its tolerance and a task fails, else None."""
    flat = [c for c in select_evals(comparisons, product, "perplexity") if c.bucket is None and is_flat(c)]
    down = [c for c in select_evals(comparisons, product, "tool_calls", "trajectories") if c.outcome == "fail"]
    if not flat or not down:
        return None
    return contrast("perplexity flat, task down", name, flat[0], max(down, key=lambda c: (c.bucket is None, c.harm)))
