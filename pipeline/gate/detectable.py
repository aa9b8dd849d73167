"""Which losses of a comparison its cases would show: planted among the flips seen, until the release is stopped.

Rates are planted case by case; a metric whose bound moves with its estimate loses alike in every case. The same
arithmetic says how large a total may be that still lets the release through.
Not covered: a loss that sits in few clusters, which is found less often, as bounds widen for it.
"""

from __future__ import annotations

import math

from scipy.special import ndtri

from pipeline.gate.clusters import Spread
from pipeline.gate.decision import Measurement
from pipeline.gate.statistics import is_bounded
from pipeline.gate.verdicts import MIN_CLUSTERS
from pipeline.gate.wording import definition_of
from pipeline.records.verdicts import DetectableLoss


def find_losses(m: Measurement, alpha: float, blocks_inconclusive: bool) -> DetectableLoss:
    """Return the true losses of a comparison that stop the release one time in two and four times in five."""
    find = _find_lost_cases if m.b is not None else _find_shift
    half, most = (find(m, probability, alpha, must_be_proven(m, blocks_inconclusive)) for probability in (0.5, 0.8))
    return DetectableLoss(metric=m.metric, bucket=m.bucket, k50=half, k80=most)


def must_be_proven(m: Measurement, blocks_inconclusive: bool) -> bool:
    """Say whether a loss that is not proven to be within its tolerance stops the release."""
    return blocks_inconclusive and m.tier == "critical"


def _find_lost_cases(m: Measurement, probability: float, alpha: float, must_prove: bool) -> float:
    """Return the smallest true loss that stops the release with a probability: each case is lost by chance.

    What swapping leaves of the flips and the number of lost cases are nearly normal. The verdict is monotone in their
    sum, so the release is stopped with this probability when it is stopped at that quantile. The lost cases may flip
    beside those seen, or be among them, which leaves fewer flips and a closer bound: it is stopped in both.
    """
    assert m.b is not None and m.c is not None
    flips, swapped = m.b + m.c, float(m.sums @ m.sums)

    def is_stopped(lost: int) -> bool:
        kept = max(flips - lost, 0)
        return all(
            _is_stopped(m, lost, other, swapped * other / max(flips, 1), probability, alpha, must_prove)
            for other in (flips, kept)
        )

    low, high = -1, m.n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_stopped(middle) else (middle, high)
    return high / m.n


def _is_stopped(
    m: Measurement, lost: int, flips: int, swapped: float, probability: float, alpha: float, must_prove: bool
) -> bool:
    """Say whether `lost` lost cases beside `flips` whose swapped total has a variance stop the release so often."""
    tolerance, by_chance = m.tolerance or 0.0, lost * (1 - lost / m.n)
    difference = lost - float(ndtri(probability)) * math.sqrt(swapped + by_chance)
    if difference > tolerance * m.n or not must_prove:
        return difference > tolerance * m.n
    spread = Spread(swapped + by_chance, by_chance * (1 - 2 * lost / m.n))
    return not _is_total_proven(m, difference, flips + lost, spread, alpha)


def _is_total_proven(m: Measurement, difference: float, flips: float, spread: Spread, alpha: float) -> bool:
    """Say whether a rate is proven with so many flips of which so many more are losses than gains."""
    gains = max((flips - difference) / 2, 0.0)
    is_clustered = m.effective_clusters < m.n
    return m.effective_clusters >= MIN_CLUSTERS and is_bounded(
        m.tolerance or 0.0,
        max(gains + difference, 0.0),
        gains,
        m.n,
        m.effective_clusters,
        spread if is_clustered else None,
        confidence=1 - alpha,
    )


def _find_shift(m: Measurement, probability: float, alpha: float, must_prove: bool) -> float:
    """Return the same for a metric whose bound moves with its estimate: each case loses alike."""
    if must_prove and m.effective_clusters < MIN_CLUSTERS:
        return 0.0
    spread = math.sqrt(float(m.sums @ m.sums)) / float(m.weights.sum())
    loss = max(0.0, _most_shift(m, must_prove) + float(ndtri(probability)) * spread)
    return math.expm1(loss) if _is_relative(m) else loss


def _most_shift(m: Measurement, must_prove: bool) -> float:
    """Return the largest difference per weight that is proven, or, where it need not be, that is within tolerance."""
    limit, high, harm = (math.log1p(x) if _is_relative(m) else x for x in (m.tolerance or 0.0, m.high, m.harm))
    return limit - (high - harm if must_prove else 0.0)


def _is_relative(m: Measurement) -> bool:
    return definition_of(m.metric).harm == "relative"


def find_most_total(m: Measurement, alpha: float, *, must_prove: bool) -> float:
    """Return the largest total of a metric's sums that lets the release through, where swapping leaves the flips."""
    if must_prove and m.effective_clusters < MIN_CLUSTERS:
        return -math.inf
    if m.b is None or m.c is None:
        return _most_shift(m, must_prove) * float(m.weights.sum())
    if not must_prove:
        return (m.tolerance or 0.0) * m.n
    flips, spread = m.b + m.c, Spread(float(m.sums @ m.sums))
    low, high = -flips - 1, flips
    while high > low:  # the largest whole number that is proven
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _is_total_proven(m, middle, flips, spread, alpha) else (low, middle - 1)
    return low if low >= -flips else -math.inf
