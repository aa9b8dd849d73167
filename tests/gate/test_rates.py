"""The arithmetic of counted rates against scipy.stats, and by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from pipeline.gate.rates import detection_power, plan_trials, predictive_quantile, rate_upper_bound


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize(("n", "num_next"), [(40, 40), (500, 200), (60, 500)])
@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.2])
def test_the_predictive_quantile_is_that_of_the_beta_binomial(count: int, n: int, num_next: int, alpha: float) -> None:
    expected = stats.betabinom(num_next, count + 0.5, n - count + 0.5).ppf(1 - alpha)
    assert predictive_quantile(count, n, num_next, alpha=alpha) == expected


@pytest.mark.parametrize(("count", "n"), [(0, 100), (3, 100), (99, 100), (100, 100)])
def test_the_upper_bound_is_clopper_and_pearsons(count: int, n: int) -> None:
    expected = stats.binomtest(count, n, alternative="less").proportion_ci(0.95, method="exact").high
    assert rate_upper_bound(count, n, alpha=0.05) == pytest.approx(expected, abs=1e-12)


def test_the_power_is_the_binomial_tail() -> None:
    assert detection_power(2, 300, 0.015) == pytest.approx(stats.binom(300, 0.015).sf(2))
    assert detection_power(10, 10, 0.5) == 0.0


@pytest.mark.parametrize("rate", [0.012, 0.05, 0.2])
def test_the_planned_number_notices_the_rate_and_a_fifth_less_does_not(rate: float) -> None:
    n = plan_trials(rate, power=0.8, alpha=0.05)
    assert detection_power(predictive_quantile(0, n, n, alpha=0.05), n, rate) >= 0.8
    fewer = int(0.8 * n)
    assert detection_power(predictive_quantile(0, fewer, fewer, alpha=0.05), fewer, rate) < 0.8


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.05])
def test_a_path_no_worse_than_the_floor_is_seldom_called_worse(rate: float) -> None:
    """With a fixed threshold of 1.5 %, a floor of 1 % would fail one canary of 100 prompts in four."""
    rng = np.random.default_rng(0)
    floors, counts = rng.binomial(100, rate, 4000), rng.binomial(100, rate, 4000)
    allowed = {int(f): predictive_quantile(int(f), 100, 100, alpha=0.05) for f in np.unique(floors)}
    assert np.mean([c > allowed[int(f)] for f, c in zip(floors, counts, strict=True)]) <= 0.06
