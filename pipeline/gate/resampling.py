"""The paired bootstrap: resamples of the clusters of images, and bounds from what a number does in them.

Both sides are resampled alike, because the draws follow from the clusters and the seed alone. A bootstrap gives the
spread of a number that is no mean. Its percentiles are no bounds to decide by: it draws only what was seen, and where
few images lose everything they pass a candidate that sits on the tolerance 17 to 26 % of the time, and BCa's 10 to
24 % (100 images, 2 to 5 % of which lose everything; benchmarks/detection_bounds.py). So the draws give standard error
and skewness alone, and half a cluster that loses everything is added to what was seen.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from pipeline.gate.statistics import Bounds, reach

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_RESAMPLES = 1_000  # they know a standard error to 2 %


def number_by_first(clusters: Ints) -> Ints:
    """Number clusters in the order of their first case: what they are called changes no draw."""
    _, first, numbers = np.unique(clusters, return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[numbers], dtype=np.int64)


def draw_weights(clusters: Ints, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Floats:
    """Return how often each case counts, [1 + num_resamples, num_cases]: once in the first row, as drawn in the others.

    Clusters are drawn with replacement, as many as there are, each with all of its cases.

    Args:
        clusters: cluster number per case.
        num_resamples: how many draws.
        seed: of the draws.

    Reference: A. C. Davison and D. V. Hinkley, Bootstrap Methods and their Application (1997), section 3.8.
    """
    numbers = number_by_first(clusters)
    num = int(numbers.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), size=num_resamples)
    return np.concatenate([np.ones((1, len(clusters))), drawn[:, numbers]]).astype(np.float64)


def bootstrap_bounds(
    draws: Floats, count: float, *, lost: float, gained: float, confidence: float, growth: float = 1.0
) -> Bounds:
    """Return a number's one-sided bounds from its standard error and skewness over resamples.

    Half a cluster is added that loses all that a cluster can: up by `lost` / `count` for the upper bound of a harm. It
    stands for objects that are missed; confident false alarms on one image may move a ranking farther. Without any
    change these are about Tango's bounds without a flip, and a few lost clusters have nearly the exact bounds of as
    many events; many outweigh it. The bounds are Student's with `count` - 1 degrees of freedom, moved outwards on the
    side of a long tail. A resample without the number (none of its images has an object of the bucket) is NaN and left
    out: with the 30 effective clusters that a pass needs that is one in 10^13, with two one in eight.

    Args:
        draws: [1 + num_resamples], the number itself first.
        count: effective clusters, 2 or more.
        lost: how far the number would rise if every cluster lost everything.
        gained: how far it would fall if every cluster gained everything.
        confidence: of each bound alone.
        growth: the bounds are those of so many times as many clusters like these.

    Raises:
        ValueError: fewer than two effective clusters.

    Reference: `statistics.reach`; the half as in `statistics.design_effect`.
    """
    if count < 2:
        raise ValueError(f"expected objects in two clusters or more of like weight, got {count:.3g}")
    value, resampled = float(draws[0]), draws[1:][np.isfinite(draws[1:])]
    deviations = resampled - resampled.mean()
    error = math.sqrt(float(deviations @ deviations) / (len(deviations) - 1))
    tail = float((deviations**3).mean()) / error**3 if error else 0.0
    error, tail, count = error / math.sqrt(growth), tail / math.sqrt(growth), count * growth
    t = float(stdtrit(count - 1, confidence))
    return Bounds(
        value, value - reach(error, -tail, t, step=gained / count), value + reach(error, tail, t, step=lost / count)
    )
