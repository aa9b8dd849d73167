"""The arithmetic of a small rate that was counted: how many more a floor explains, and what a count can notice."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import bdtrc, betaincinv, betaln, gammaln

JEFFREYS = 0.5  # of both parameters of the prior on a rate


def predictive_quantile(count: int, n: int, num_next: int, *, alpha: float) -> int:
    """Return the most events that `num_next` trials show with probability 1 - alpha, given `count` of n before.

    The quantile of the beta-binomial distribution with Jeffreys prior: a floor that was itself only counted leaves
    room, and 0 of 100 leaves room for 2.

    Reference: A. Gelman et al., Bayesian Data Analysis (2013), section 2.4.
    """
    a, b = count + JEFFREYS, n - count + JEFFREYS
    k = np.arange(num_next + 1, dtype=np.float64)
    log_choose = gammaln(num_next + 1) - gammaln(k + 1) - gammaln(num_next - k + 1)
    cumulative = np.cumsum(np.exp(log_choose + betaln(k + a, num_next - k + b) - betaln(a, b)))
    return min(num_next, int(np.searchsorted(cumulative, 1 - alpha)))


def detection_power(allowed: int, n: int, rate: float) -> float:
    """Return the probability that n trials show more than `allowed` events of a true rate."""
    return float(bdtrc(allowed, n, rate)) if allowed < n else 0.0


def rate_upper_bound(count: int, n: int, *, alpha: float) -> float:
    """Return the one-sided upper bound of a rate at 1 - alpha, exact.

    Reference: C. Clopper and E. Pearson, Biometrika 26:404-413 (1934).
    """
    return 1.0 if count >= n else float(betaincinv(count + 1, n - count, 1 - alpha))


def plan_trials(rate: float, *, power: float, alpha: float) -> int:
    """Return the fewest trials that notice a rate with a probability, when the floor shows no event.

    To within a hundredth: what a floor explains is a whole number, so the power rises in steps.
    """
    n = max(8, math.ceil(math.log(1 - power) / math.log1p(-rate)))
    while detection_power(predictive_quantile(0, n, n, alpha=alpha), n, rate) < power:
        n += max(1, n // 100)
    return n
