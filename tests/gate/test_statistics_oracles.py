"""The gate's bounds, tests and draws against scipy and statsmodels, on random grids.

statsmodels has no score interval of a paired difference, so Tango's bounds are compared with a direct solution that
shares nothing with the closed form: the nuisance parameter is the root of the likelihood's slope, the bound the root of
the score statistic.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import optimize, stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from pipeline.gate.resampling import draw_weights
from pipeline.gate.statistics import holm, sign_flip_p, sign_flip_tail, tango_bounds


def maximise_likelihood(delta: float, b: float, c: float, n: float) -> float:
    """Return the gain rate of largest likelihood among tables whose loss rate is larger by delta."""

    def slope(p: float) -> float:
        return (b / (p + delta) if b else 0.0) + (c / p if c else 0.0) - 2 * (n - b - c) / (1 - 2 * p - delta)

    low, high = max(0.0, -delta), (1 - delta) / 2
    inside = 1e-12 * (high - low) + 1e-15
    if slope(low + inside) <= 0:
        return low
    return optimize.brentq(slope, low + inside, high - inside, xtol=1e-17) if slope(high - inside) < 0 else high


def score_excess(delta: float, b: float, c: float, n: float, z: float) -> float:
    variance = n * (2 * maximise_likelihood(delta, b, c, n) + delta * (1 - delta))
    return (b - c - n * delta) + z * math.sqrt(variance)


def upper_bound(b: float, c: float, n: float, confidence: float) -> float:
    """Return the largest delta that the score test does not reject."""
    z = stats.norm.ppf(confidence)
    return optimize.brentq(score_excess, (b - c) / n + 1e-12, 1 - 1e-9, args=(b, c, n, z), xtol=1e-14)


def draw_table(rng: np.random.Generator) -> tuple[float, float, float]:
    n = int(rng.choice([20, 60, 133, 340, 1319, 2000]))
    flips = rng.choice([0.01, 0.06, 0.3])
    b, c, _ = rng.multinomial(n, np.append(rng.dirichlet([1, 1]) * flips, 1 - flips))
    scale = rng.choice([1.0, 0.37])  # counts after a cluster adjustment are no whole numbers
    return float(b * scale), float(c * scale), float(n * scale)


@pytest.mark.parametrize(
    ("b", "c", "n", "confidence", "low", "high"),
    [
        # R 4.6.1, PropCIs 0.3-0: scoreci.mp(c, b, n, 2 * confidence - 1), which stops bisecting at 1.2e-7
        (7, 0, 14, 0.975, 0.1770337820, 0.7320079207),
        (0, 0, 14, 0.975, -0.2153108120, 0.2153107524),
        (1, 0, 14, 0.975, -0.1592615843, 0.3146870775),
        (14, 0, 14, 0.975, 0.5693783760, 1.0),
        (2, 9, 20, 0.975, -0.6016315699, -0.0274143428),
        (10, 3, 50, 0.95, 0.0233805275, 0.2607449162),
        (25, 12, 200, 0.975, 0.0056355047, 0.1269410995),
        (6, 2, 42, 0.95, -0.0177788110, 0.2162396652),
        (1, 1, 2, 0.95, -0.7582674026, 0.7582673430),
        (3, 2, 14, 0.95, -0.2050938947, 0.3384871355),
    ],
)
def test_tango_gives_the_bounds_of_r(b: int, c: int, n: int, confidence: float, low: float, high: float) -> None:
    assert tango_bounds(b, c, n, confidence=confidence) == pytest.approx((low, high), abs=3e-7)


@pytest.mark.parametrize("seed", range(40))
def test_tango_is_the_root_of_the_score_equation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    (b, c, n), confidence = draw_table(rng), float(rng.choice([0.9, 0.95, 0.975, 0.999]))
    low, high = tango_bounds(b, c, n, confidence=confidence)
    assert high == pytest.approx(upper_bound(b, c, n, confidence), abs=1e-6)
    assert low == pytest.approx(-upper_bound(c, b, n, confidence), abs=1e-6)


@pytest.mark.parametrize(
    "p_values",
    [
        [0.01, 0.01, 0.04, 1.0, 1.0],
        [1.0],
        [0.0, 0.5],
        [0.05] * 20,
        (np.random.default_rng(0).random(60) ** 4).tolist(),
    ],
    ids=["ties", "one", "zero", "equal", "many"],
)
def test_holm_is_that_of_statsmodels(p_values: list[float]) -> None:
    rejected, adjusted, *_ = multipletests(p_values, alpha=0.05, method="holm")
    assert holm(p_values) == pytest.approx(adjusted.tolist(), rel=1e-12)
    assert [p <= 0.05 for p in holm(p_values)] == rejected.tolist()


@pytest.mark.parametrize(("b", "c"), [(3, 3), (12, 2), (0, 5), (150, 121), (2_000, 1_900)])
def test_sign_flip_without_clusters_is_mcnemars_exact_test(b: int, c: int) -> None:
    """statsmodels' test is two-sided; the side of the loss has half of it, and half of the chance of a tie."""
    d = np.repeat([1.0, -1.0, 0.0], [b, c, 100])
    tie = stats.binom.pmf(b, b + c, 0.5) if b == c else 0.0
    both = mcnemar([[100, b], [c, 0]], exact=True).pvalue
    one_sided = (both + tie) / 2 if b >= c else 1 - both / 2 + stats.binom.pmf(b, b + c, 0.5)
    assert sign_flip_p(d, np.arange(len(d))) == pytest.approx(one_sided, rel=1e-9)


def permute_signs(sums: NDArray[Any]) -> float:
    """Return scipy's exact p-value of the sum when each is as likely with either sign."""
    return stats.permutation_test(
        (sums,), np.sum, permutation_type="samples", alternative="greater", n_resamples=np.inf, batch=2**14
    ).pvalue


@pytest.mark.parametrize("is_whole", [True, False], ids=["rates", "likelihoods"])
@pytest.mark.parametrize("num_clusters", [4, 9, 13])
def test_sign_flip_of_clusters_is_scipys_exact_permutation_test(num_clusters: int, is_whole: bool) -> None:
    rng = np.random.default_rng(num_clusters)
    clusters = np.repeat(np.arange(num_clusters), rng.integers(1, 6, num_clusters))
    d = rng.choice([-1.0, 0.0, 1.0], len(clusters), p=[0.2, 0.3, 0.5])
    d *= 1.0 if is_whole else rng.random(len(clusters))
    sums = np.bincount(clusters, weights=d)
    assert sign_flip_p(d, clusters) == pytest.approx(permute_signs(sums), rel=1e-9)


@pytest.mark.parametrize("shift", [0.0, 0.15, 0.4])
def test_sampled_signs_agree_with_scipys_exact_permutation_test(shift: float) -> None:
    """15 clusters of real numbers are too many to enumerate here; scipy goes through all 32,768 patterns."""
    sums = np.random.default_rng(3).normal(shift, 0.5, 15)
    exact = permute_signs(sums)
    error = math.sqrt(exact * (1 - exact) / 20_000)
    assert sign_flip_p(sums, np.arange(15)) == pytest.approx(exact, abs=4 * error + 1 / 20_000)


@pytest.mark.parametrize(
    "sums", [np.array([2.0, -1.0, 1.0, 1.0, 3.0, 0.0]), np.array([0.3, -0.1, 0.25, 0.5])], ids=["whole", "real"]
)
def test_the_tail_of_any_total_is_the_share_of_patterns_that_reach_it(sums: NDArray[np.float64]) -> None:
    signs = 1 - 2 * ((np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1)
    totals = signs @ sums
    expected = [(totals >= total - 1e-9).mean() for total in totals]
    assert sign_flip_tail(sums)(totals) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [1, 4], ids=["images", "clusters-of-4"])
def test_the_bootstraps_spread_is_scipys(size: int) -> None:
    """A ratio of sums over clusters of unequal weight, each resampled as a whole on both sides."""
    rng = np.random.default_rng(7)
    clusters = np.repeat(np.arange(60), size)
    weights = rng.integers(1, 20, len(clusters)).astype(float)
    harm = weights * rng.exponential(0.1, len(clusters)) + rng.normal(0, 1, 60)[clusters]
    drawn = draw_weights(clusters, num_resamples=8_000)[1:]
    ours = (drawn @ harm) / (drawn @ weights)
    sides = tuple(np.bincount(clusters, weights=x) for x in (harm, weights))
    oracle = stats.bootstrap(
        sides,
        lambda x, y, axis: x.sum(axis=axis) / y.sum(axis=axis),
        paired=True,
        n_resamples=8_000,
        method="percentile",
        rng=np.random.default_rng(8),
    )
    assert ours.std(ddof=1) == pytest.approx(oracle.standard_error, rel=0.035)  # 8,000 draws know it to 0.8 %
    found = np.quantile(ours, [0.025, 0.975])
    assert found == pytest.approx([*oracle.confidence_interval], abs=0.1 * oracle.standard_error)
