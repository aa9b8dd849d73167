"""How many more cases would prove what was not proven, at the flips, spread and clusters seen.

An even chance, not a promise: it assumes that new cases behave as the old ones did, and they do worse as often. A plan
(`plan.py`) answers another question: how many cases in all let a candidate without a loss pass four times in five.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pipeline.gate.clusters import Spread
from pipeline.gate.statistics import is_bounded

_MOST = 1_000.0  # times as many cases: more is no outlook
_MOST_ADVISED = 10  # times as many more: nobody makes them for a loss that may turn out to be too large
_CLOSE = 2 / 3  # of the tolerance: noise falls with the root of n, so such a loss asks for nine times what none would


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

    return _find_more(is_proven, n)


def cases_to_bound(bound: Callable[[float], float], tolerance: float, n: int) -> int | None:
    """Return how many more cases would bring an upper bound to the tolerance.

    Args:
        bound: of the harm with so many times as many cases like those seen.
        tolerance: of the harm.
        n: all cases.

    Returns:
        The number of additional cases, or None when more than 1,000 times as many would be needed.
    """
    return _find_more(lambda factor: bound(factor) <= tolerance, n)


def is_too_close(more: int | None, n: int, *, harm: float, tolerance: float) -> bool:
    """Say whether more cases are no advice, as the loss seen is what asks for so many of them.

    Where little of the tolerance is lost, it is the suite that is small, and more cases are what helps.

    Args:
        more: cases that would prove the tolerance; None where no affordable number would.
        n: all cases.
        harm: as seen.
        tolerance: of the harm.
    """
    return harm > _CLOSE * tolerance and (more is None or more > _MOST_ADVISED * n)


def _find_more(is_proven: Callable[[float], bool], n: int) -> int | None:
    low, high = 1.0, _MOST
    if not is_proven(high):
        return None
    while (high - low) * n > 0.5:
        middle = (low + high) / 2
        low, high = (low, middle) if is_proven(middle) else (middle, high)
    return math.ceil(n * (high - 1))
