"""The interval of a median: against all outcomes of coin tosses, scipy, and what it promises on skewed times."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from pipeline.errors import EvidenceError
from pipeline.records.medians import CONFIDENCE, bound_median, cover_median


def covered(num_values: int, rank: int) -> float:
    """Count over all ways to fall on either side of the median: covered when the rank-th from each end straddle it."""
    hits = sum(rank <= sum(below) <= num_values - rank for below in itertools.product((0, 1), repeat=num_values))
    return hits / 2**num_values


@pytest.mark.parametrize("num_values", range(6, 15))
def test_coverage_is_that_of_all_coin_tosses_and_no_narrower_interval_has_95_percent(num_values: int) -> None:
    rank, coverage = cover_median(num_values)
    assert coverage == pytest.approx(covered(num_values, rank))
    assert coverage == pytest.approx(1 - 2 * stats.binom.cdf(rank - 1, num_values, 0.5))
    assert coverage >= CONFIDENCE > covered(num_values, rank + 1)


def test_six_rounds_span_96_9_percent_and_five_have_no_interval() -> None:
    assert cover_median(6) == (1, 0.96875)
    assert cover_median(9)[0] == 2
    with pytest.raises(EvidenceError, match="expected six rounds or more, which an interval of a median needs, got 5"):
        bound_median([1.0] * 5)


@pytest.mark.parametrize("num_values", [6, 9, 20])
def test_skewed_times_are_covered_as_promised(num_values: int) -> None:
    """Latencies have a long tail: an interval from a standard deviation would not hold what it says."""
    rng, runs = np.random.default_rng(0), 4000
    bounds = [bound_median(values) for values in rng.lognormal(0, 1, (runs, num_values)).tolist()]
    missed = np.mean([not b.low <= 1 <= b.high for b in bounds])
    assert missed <= 1 - cover_median(num_values)[1] + 3 * (0.05 / runs) ** 0.5


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_is_none_has_no_median(value: float) -> None:
    """Two finite times may have a ratio that is not."""
    with pytest.raises(EvidenceError, match="expected finite numbers and ratios"):
        bound_median([1.0] * 6 + [value])


def test_the_order_of_rounds_changes_nothing() -> None:
    values = [3.0, 1.0, 9.0, 4.0, 2.0, 7.0]
    assert bound_median(values) == bound_median(sorted(values))
    assert (bound_median(values).low, bound_median(values).median, bound_median(values).high) == (1.0, 3.5, 9.0)
