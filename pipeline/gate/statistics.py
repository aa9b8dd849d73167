"""The arithmetic of a paired comparison: bounds of the harm, a test of no difference, intervals.

Everything works on plain arrays: `d` is the harm of each case (positive = the candidate is worse)
and `clusters` says which cases share a document or a template and are not independent. Nothing is
rounded. The functions know neither records nor metrics nor tolerances; the rule that turns bounds
into an outcome is in `decision.py`. Only `scipy.special` is imported: `scipy.stats` and statsmodels
would cost seconds of import time for the same numbers, and are the oracles in the tests instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, gammaln, ndtr, ndtri, stdtrit

from pipeline.gate.clusters import (
    PRIOR_CLUSTERS,
    Spread,
    design_effect,
    effective_clusters,
    hiding_clusters,
    measure_spread,
    sum_by_cluster,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Tail = Callable[[Floats], Floats]  # p-values of totals

_MAX_ENUMERATED = 14  # 2 ** 14 sign patterns are enumerated; more clusters are sampled
_MAX_LATTICE = 200_000  # longest exact distribution of an integer sum that is worth building
_CORRECTION = 0.5  # cases: half the step in which b - c moves where nothing is gained
_NUM_DRAWS = 19_999  # the smallest p that sampling can give is 1 / 20,000
_MAX_SIGNS = 2_000_000  # in memory at once: 16 MB, twice


@dataclass(frozen=True)
class Bounds:
    """An estimated harm and its one-sided bounds, each at the confidence asked for."""

    harm: float
    low: float
    high: float
    design_effect: float = 1.0


def tango_bounds(b: float, c: float, n: float, *, confidence: float, correction: float = 0.0) -> tuple[float, float]:
    """Return one-sided score bounds of a paired difference of proportions.

    Inverts the score test of H0: (b - c) / n = delta, whose nuisance parameter is replaced by its
    maximum-likelihood estimate under H0. Unlike the Wald interval it keeps its level when flips are
    few, and b = c = 0 gives +- z^2 / (n + z^2) instead of an interval of width zero.

    Args:
        b: pairs with a loss; may be fractional after a cluster adjustment.
        c: pairs with a gain.
        n: all pairs.
        confidence: of each bound alone, so 0.95 gives the two-sided 90 % interval.
        correction: cases by which b - c is taken to be nearer to n delta than it is; 0: Tango's own.

    Returns:
        Lower and upper bound, both in [-1, 1].

    Reference: T. Tango, Statistics in Medicine 17:891-908 (1998), section 3; solved by bisection.
    """
    z = float(ndtri(confidence))
    return -_tango_upper(c, b, n, z, correction), _tango_upper(b, c, n, z, correction)


def _tango_upper(b: float, c: float, n: float, z: float, correction: float) -> float:
    if b + c == 0:  # the variance at the estimate is zero there, bisection has no bracket
        linear = z * z + 2 * correction
        root = math.sqrt(max(linear * linear - 4 * (1 + z * z / n) * correction**2, 0.0))
        return min((linear + root) / (2 * (n + z * z)), 1.0)
    low, high = (b - c) / n, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return high
        if _score_excess(middle, b, c, n, z, correction) > 0:
            high = middle
        else:
            low = middle


def _score_excess(delta: float, b: float, c: float, n: float, z: float, correction: float) -> float:
    """Return (|b - c - n delta| - correction)^2 - z^2 variance(delta): zero where the score statistic is +-z."""
    linear = -b - c + (2 * n - b + c) * delta
    constant = -c * delta * (1 - delta)
    root = math.sqrt(max(linear * linear - 8 * n * constant, 0.0))
    # two algebraically equal forms of the root; each is used where it does not cancel
    p_gain = (root - linear) / (4 * n) if linear <= 0 else -2 * constant / (root + linear)
    variance = n * max(2 * p_gain + delta * (1 - delta), 0.0)
    distance = max(abs(b - c - n * delta) - correction, 0.0)
    return distance * distance - z * z * variance


def proportion_bounds(d: Floats, clusters: Ints, *, confidence: float, count: float | None = None) -> Bounds:
    """Return the harm of a 0/1 score and its bounds, as `count_bounds` says.

    Args:
        d: reference minus candidate per case, in {-1, 0, 1}.
        clusters: cluster number per case, 0-based without holes.
        confidence: of each bound alone.
        count: their `hiding_clusters`, where they are known already.
    """
    n = len(d)
    count = hiding_clusters(clusters, confidence=confidence) if count is None else count
    b, c = float((d > 0).sum()), float((d < 0).sum())
    # one cluster has no spread, and could lose everything
    spread = None if count == n else measure_spread(d, clusters) if count > 1 else Spread(float(n) ** 2)
    bounds = count_bounds(b, c, n, count, spread, confidence=confidence)
    return replace(bounds, design_effect=design_effect(d, clusters))


def count_bounds(b: float, c: float, n: float, count: float, spread: Spread | None, *, confidence: float) -> Bounds:
    """Return the harm of a 0/1 score and its bounds from counts.

    Without clusters these are Tango's, corrected by half a case: counts are whole numbers, and without that half the
    level of Tango's test is 5 % on average and up to 7 % where few cases flip; with it, 5 % at most.

    Clusters only widen them. A few that lose as a whole are easily missed, and then the cases that flip one by one
    would prove too much. So half a cluster that loses everything is added to the spread seen, a long tail moves the
    bound on its side (`reach`), and the bound of a loss is never closer to zero than that of as many clusters without
    any flip: what they can't prove for a perfect candidate they don't prove for one with a few losses. Where gains
    outweigh the losses it is as far above the harm seen, so that one flip more or less changes little.

    Args:
        b: pairs with a loss.
        c: pairs with a gain.
        n: all pairs.
        count: clusters of equal size that could hide as large a loss (`hiding_clusters`); n without clusters.
        spread: of b - c by cluster; None without clusters.
        confidence: of each bound alone.
    """
    quantile = _for_few_clusters(confidence, n, count)
    low, high = tango_bounds(b, c, n, confidence=quantile, correction=_CORRECTION)
    harm = (b - c) / n
    if spread is not None:
        least, most = _bounds_of_clusters(harm, n, count, spread, confidence=confidence)
        low, high = max(min(low, least), -1.0), min(max(high, most), 1.0)
    return Bounds(harm, low, high)


def is_bounded(
    tolerance: float, b: float, c: float, n: float, count: float, spread: Spread | None, *, confidence: float
) -> bool:
    """Say whether the upper bound of `count_bounds` is at most `tolerance`, without looking for the bound."""
    if tolerance >= 1:
        return True
    harm, z = (b - c) / n, float(ndtri(_for_few_clusters(confidence, n, count)))
    if spread is not None and _bounds_of_clusters(harm, n, count, spread, confidence=confidence)[1] > tolerance:
        return False
    if b + c == 0:
        return _tango_upper(b, c, n, z, _CORRECTION) <= tolerance
    return tolerance > harm and _score_excess(tolerance, b, c, n, z, _CORRECTION) > 0


def _bounds_of_clusters(
    harm: float, n: float, count: float, spread: Spread, *, confidence: float
) -> tuple[float, float]:
    error, t = math.sqrt(spread.variance) / n, _students(count, confidence)
    tail = spread.cubes / spread.variance**1.5 if spread.variance > 0 else 0.0
    below, above = (reach(error, side, t, step=1 / count) for side in (-tail, tail))
    unseen = bound_unseen(n, count, confidence=confidence)
    return min(harm - below, max(harm, 0.0) - unseen), max(harm + above, min(harm, 0.0) + unseen)


def _students(count: float, confidence: float) -> float:
    return float(stdtrit(max(count - 1, 1.0), confidence))


def bound_unseen(n: float, count: float, *, confidence: float) -> float:
    """Return the share of `n` cases that may lose where none of `count` effective clusters showed one that does."""
    quantile = _for_few_clusters(confidence, n, count)
    return tango_bounds(0, 0, count, confidence=quantile, correction=_CORRECTION)[1]


def _for_few_clusters(confidence: float, n: float, count: float) -> float:
    """Return the normal confidence whose quantile is Student's, when a design effect was estimated."""
    return confidence if count == n or count < 2 else float(ndtr(stdtrit(count - 1, confidence)))


def ratio_bounds(
    d: Floats,
    weights: Floats,
    clusters: Ints,
    *,
    confidence: float,
    lost: float = 0.0,
    count: float | None = None,
    growth: float = 1.0,
) -> Bounds:
    """Return sum(d) / sum(weights) with bounds from the linearised cluster-robust standard error.

    With one case per cluster and weights of 1 these are the bounds of the paired t test, each moved
    outwards where the clusters' harm has its long tail on that side: a few documents that lose much
    are easily missed by a small sample. For perplexity `d` is the difference of a document's negative
    log-likelihoods and `weights` its tokens.

    What no case showed has no spread, and cases that all lose little would prove that none loses more. With `lost`
    half a cluster that loses so much is added to what was seen, and a bound is never closer to the estimate than
    that of a rate is to zero without a flip.

    Args:
        d: harm of each case.
        weights: what its sum is divided by.
        clusters: cluster number per case, 0-based without holes.
        confidence: of each bound alone.
        lost: harm that any one case might have had, at an average weight of 1; 0: there is no saying.
        count: their `hiding_clusters`, where they are known already.
        growth: the bounds are those of so many times as many cases, in clusters like these.

    Raises:
        ValueError: fewer than two clusters, or weights that sum to nothing.

    Reference: W. G. Cochran, Sampling Techniques (1977), section 6.3 (ratio estimator).
    """
    num_clusters = int(clusters.max()) + 1
    total = float(weights.sum())
    if num_clusters < 2 or total <= 0:
        raise ValueError(f"expected two clusters or more and a positive weight, got {num_clusters} and {total!r}")
    ratio = float(d.sum()) / total
    residuals = np.bincount(clusters, weights=d - ratio * weights)
    squares = float(residuals @ residuals)
    num_clusters_then = num_clusters * growth
    error = math.sqrt(num_clusters_then / (num_clusters_then - 1) * squares / growth) / total
    count = hiding_clusters(clusters, confidence=confidence, weights=weights) if count is None else count
    count *= growth
    t = _students(count, confidence)
    tail = float((residuals**3).sum()) / squares**1.5 / math.sqrt(growth) if squares > 0 else 0.0
    below, above = (reach(error, side, t, step=lost / count) for side in (-tail, tail))
    if lost:
        unseen = lost * bound_unseen(len(d) * growth, count, confidence=confidence)
        below, above = max(below, unseen), max(above, unseen)
    return Bounds(ratio, ratio - below, ratio + above)


def reach(error: float, tail: float, t: float, *, step: float = 0.0) -> float:
    """Return how far a bound is from an estimate, with half a cluster added that would move it by `step`.

    Args:
        error: standard error.
        tail: skewness of the estimate towards the bound.
        t: Student's quantile.
        step: what a whole cluster could add.

    Reference: N. J. Johnson, Journal of the American Statistical Association 73:536-544 (1978), for the skewness
    term, which we use on the side of the tail only.
    """
    if step:
        wider = math.hypot(error, math.sqrt(PRIOR_CLUSTERS) * step)
        tail = tail * (error / wider) ** 3 + PRIOR_CLUSTERS * (step / wider) ** 3
        error = wider
    return PRIOR_CLUSTERS * step + error * (t + (1 + 2 * t * t) / 6 * max(tail, 0.0))


def sign_flip_p(d: Floats, clusters: Ints) -> float:
    """Return the one-sided p-value of the cluster sign-flip test for harm.

    H0 is *no difference*: reference and candidate are exchangeable within each cluster, so every
    cluster's sum of `d` is as likely with the opposite sign. The p-value is the share of sign
    patterns whose total is at least the one seen. It tests harm > 0, not harm > tolerance; the
    decision rule asks for both this and an estimate beyond the tolerance. With 0/1 scores and one
    case per cluster it is McNemar's exact test, one-sided. Whole-number sums are summed exactly;
    others are enumerated up to 14 clusters and sampled (seeded, +1 correction) beyond.
    """
    sums = sum_by_cluster(d, clusters)
    return tail_at(sign_flip_tail(sums), sums.sum())


def tail_at(tail: Tail, observed: float) -> float:
    """Return the p-value of one total."""
    return float(tail(np.array([observed]))[0])


def sign_flip_tail(sums: Floats) -> Tail:
    """Return the function that gives the p-values of totals, when each cluster's sum is as likely with either sign.

    Args:
        sums: of each cluster.
    """
    sizes = np.sort(np.abs(sums[sums != 0]))[::-1]  # sorted: the answer does not depend on the order of cases
    if len(sizes) == 0:
        return np.ones_like
    if np.all(sizes == np.rint(sizes)) and sizes.sum() <= _MAX_LATTICE:
        return _lattice_tail(sizes.astype(np.int64))
    slack = 1e-12 * float(sizes.sum())  # equal totals must count as equal
    if len(sizes) <= _MAX_ENUMERATED:
        patterns = (np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes))) & 1
        totals, own = np.sort((2.0 * patterns - 1.0) @ sizes), 0
    else:
        totals, own = np.sort(_sample_totals(sizes, seed=0)), 1  # the one seen counts as a draw: p is never 0
    return lambda observed: (len(totals) - np.searchsorted(totals, observed - slack) + own) / (len(totals) + own)


def _lattice_tail(sizes: Ints) -> Tail:
    """Sum the exact distribution of sum(+-size), one binomial per distinct size."""
    distinct, counts = np.unique(sizes, return_counts=True)
    total = int(sizes.sum())
    if len(distinct) == 1:
        size, count = int(distinct[0]), int(counts[0])
        return lambda observed: np.where(
            (needed := (np.rint(observed) + total) // (2 * size)) > 0, bdtrc(needed - 1, count, 0.5), 1.0
        )
    distribution = np.ones(1)
    for size, count in zip(distinct.tolist(), counts.tolist(), strict=True):
        positives = np.arange(count + 1)
        log_p = gammaln(count + 1) - gammaln(positives + 1) - gammaln(count - positives + 1) - count * math.log(2)
        distribution = _convolve(distribution, np.exp(log_p), size)
    tail = np.minimum(np.append(np.cumsum(distribution[::-1])[::-1], 0.0), 1.0)  # of the sizes that come out positive
    return lambda observed: tail[np.clip((np.rint(observed).astype(np.int64) + total + 1) // 2, 0, total + 1)]


def _convolve(distribution: Floats, steps: Floats, size: int) -> Floats:
    """Return the distribution of a sum when a number of steps of `size`, with the chances `steps`, is added."""
    if size == 1:
        return np.convolve(distribution, steps)
    wider = np.zeros(len(distribution) + size * (len(steps) - 1))
    for number, chance in enumerate(steps.tolist()):
        wider[number * size : number * size + len(distribution)] += chance * distribution
    return wider


def _sample_totals(sizes: Floats, seed: int) -> Floats:
    """Return the totals of sampled sign patterns, some draws at a time: a matrix of signs can be large."""
    rng = np.random.default_rng(seed)
    totals = np.empty(_NUM_DRAWS)
    # random bytes come four at a time: with other multiples than these the chunk's size would change the draws
    chunk = min(2_000, max(_MAX_SIGNS // len(sizes) // 16 * 16, 4))
    for start in range(0, _NUM_DRAWS, chunk):
        num_draws = min(chunk, _NUM_DRAWS - start)
        packed = rng.integers(0, 256, size=(num_draws, (len(sizes) + 7) // 8), dtype=np.uint8)
        positive = np.unpackbits(packed, axis=1, count=len(sizes)).astype(np.float64)
        totals[start : start + num_draws] = 2 * (positive @ sizes) - sizes.sum()
    return totals


def holm(p_values: list[float]) -> list[float]:
    """Return Holm-adjusted p-values in the order given."""
    return holm_columns(np.asarray(p_values, dtype=np.float64)[:, None])[:, 0].tolist()


def holm_columns(p: Floats) -> Floats:
    """Return Holm-adjusted p-values of many families, one a column.

    Reference: S. Holm, Scandinavian Journal of Statistics 6:65-70 (1979).
    """
    order = np.argsort(p, axis=0, kind="stable")
    steps = np.take_along_axis(p, order, axis=0) * np.arange(len(p), 0, -1)[:, None]
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.minimum(np.maximum.accumulate(steps, axis=0), 1.0), axis=0)
    return adjusted


def proportion_interval(scores: Floats, clusters: Ints, *, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's two-sided interval of a proportion on the cluster-adjusted n.

    Reference: E. B. Wilson, Journal of the American Statistical Association 22:209-212 (1927).
    """
    p = float(scores.mean())
    n = len(scores) / design_effect(scores, clusters)
    count = effective_clusters(np.ones(len(scores)), clusters)
    z = float(ndtri(_for_few_clusters(0.5 + confidence / 2, len(scores), count)))
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def ratio_interval(scores: Floats, weights: Floats, clusters: Ints) -> tuple[float, float]:
    """Return the two-sided 95 % interval of sum(scores) / sum(weights), clustered."""
    bounds = ratio_bounds(scores, weights, clusters, confidence=0.975)
    return bounds.low, bounds.high
