"""How much a graded score of others, or a document, can lose, as far as the scores themselves tell.

A tolerance of 3 that was meant as 3 points lets toxicity rise from 0.1 to 0.9, and one of 12 lets any reward between -9
and 0 fall. Nobody says what a score's scale is, so it is taken from what both sides show: scores in [0, 1] and [-1, 1]
can't leave them, those that never cross 0 end there, and of any other a loss beyond the largest score is not believed.
Not covered: rates, of which 1 is all there is, and quantgate's own means, whose units are known.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def find_room(scores: Floats, mean: float, better: Literal["higher", "lower"]) -> float:
    """Return the largest loss that a mean of scores can show.

    Args:
        scores: of both sides, per unit of their weight.
        mean: of the reference.
        better: their direction.
    """
    low, high = float(scores.min()), float(scores.max())
    if (worst := _find_worst(low, high, better)) is None:
        return max(high, 0.0) - min(low, 0.0)
    return abs(mean - worst)


def _find_worst(low: float, high: float, better: Literal["higher", "lower"]) -> float | None:
    """Return the worst that a score can be; None: nobody knows."""
    is_share = low >= -1 and high <= 1
    if better == "higher":
        return 0.0 if low >= 0 else -1.0 if is_share else None
    return 0.0 if high <= 0 > low else 1.0 if is_share else None


def find_document_room(nll: Floats, d: Floats, weights: Floats) -> float:
    """Return how much a document of average length may lose: its whole loss once more, or what the worst one showed.

    With less room the bound of a perplexity misses the few documents that have most of the harm.

    Args:
        nll: the loss of each document in nats, the mean of both sides, so that swapping them changes nothing.
        d: how much they differ in it.
        weights: tokens of each document.

    Returns:
        Nats a token.
    """
    total = float(weights.sum())
    unusual = d - weights * (float(d.sum()) / total)
    return max(abs(float(nll.sum())) / total, float(np.abs(unusual).max()) / float(weights.mean()))
