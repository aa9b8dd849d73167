"""How many more cases would prove what was not proven, at the flips, spread and clusters seen.

An even chance, not a promise: it assumes that new cases behave as the old ones did, and they do worse as often.
"""

from __future__ import annotations

import math

from pipeline.gate.clusters import Spread
from pipeline.gate.statistics import Bounds, is_bounded

_MOST = 1_000.0  # times as many cases: more is no outlook


def cases_to_prove(
    b: float, c: float, n: int, count: float, spread: Spread | None, tolerance: float, *, confidence: float
) -> int | None:
    """Return how many more cases would bring the upper bound of a rate's harm to the tolerance.

    Args:
        b: pairs with a loss.
        c: pairs with a gain.
        n: all pairs.
        count: effective clusters; n without clusters.
        spread: of b - c by cluster; None without clusters.
        tolerance: of the harm.
        confidence: of the bound.

    Returns:
        The number of additional cases, or None when more than 1,000 times as many would be needed.
    """

    def is_proven(factor: float) -> bool:
        wider = spread and Spread(spread.variance * factor, spread.cubes * factor)
        return is_bounded(tolerance, b * factor, c * factor, n * factor, count * factor, wider, confidence=confidence)

    low, high = 1.0, _MOST
    if not is_proven(high):
        return None
    while (high - low) * n > 0.5:
        middle = (low + high) / 2
        low, high = (low, middle) if is_proven(middle) else (middle, high)
    return math.ceil(n * (high - 1))


def cases_for_spread(bounds: Bounds, tolerance: float, n: int) -> int | None:
    """Return how many more cases would bring an upper bound that shrinks with 1 / sqrt(n) to the tolerance.

    Returns:
        The number, or None when the bound is there, the harm is beyond it, or 1,000 times as many would be needed.
    """
    if bounds.harm >= tolerance or bounds.high <= tolerance:
        return None
    factor = ((bounds.high - bounds.harm) / (tolerance - bounds.harm)) ** 2
    return math.ceil(n * (factor - 1)) if factor <= _MOST else None
