"""The median of a few timings, with an interval that assumes nothing about how times are distributed.

It is that of order statistics: of n values the k-th smallest to the k-th largest, with the largest k that still
covers the median with 95 %. Not covered: anything about the tail of the times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from pipeline.errors import EvidenceError
from pipeline.records.record_files import Record

CONFIDENCE = 0.95
MIN_ROUNDS = 6  # the fewest whose span is such an interval
GAIN_BELOW = 0.95  # a ratio of times whose interval lies below is a gain: less is not worth a change


class MedianInterval(Record):
    """The median of one number over the rounds, with a distribution-free interval."""

    median: float
    low: float
    high: float

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"expected low <= median <= high, got {self.low}, {self.median}, {self.high}")
        return self


def bound_median(values: Sequence[float]) -> MedianInterval:
    """Return the median of the rounds and its interval by order statistics.

    Raises:
        EvidenceError: too few rounds for an interval, or a value is not finite.
    """
    if not all(map(math.isfinite, values)):
        raise EvidenceError(f"benchmark: expected finite numbers and ratios, got {list(values)}; run `dvc repro`")
    rank, _ = cover_median(len(values))
    ordered = sorted(values)
    return MedianInterval(median=statistics.median(ordered), low=ordered[rank - 1], high=ordered[-rank])


def cover_median(num_values: int) -> tuple[int, float]:
    """Return the largest k whose k-th smallest to k-th largest value cover the median with 95 %, and how often they do.

    The median is below the k-th smallest when fewer than k of n values are below it, and each of them is with
    probability 1/2: 1 - 2 P(Binomial(n, 1/2) < k) is covered.

    Raises:
        EvidenceError: fewer than six values.
    """
    missed, best = 0.0, None
    for rank in range(1, num_values // 2 + 1):
        missed += math.comb(num_values, rank - 1) / 2**num_values
        if 1 - 2 * missed < CONFIDENCE:
            break
        best = rank, 1 - 2 * missed
    if best is None:
        raise EvidenceError(
            f"benchmark: expected six rounds or more, which an interval of a median needs, got {num_values}"
        )
    return best
