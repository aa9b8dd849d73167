"""What a gate is worth on the suite that it judged: how often it fails what is equal, and which losses it misses.

A certificate is computed with each verdict from the same records, without a model. Labels are swapped: if reference
and candidate were exchangeable, every cluster's harm would be as likely with the opposite sign, so whatever the rule
fails among such swaps it fails falsely. Swapped in blocks of neighbouring clusters, the same count shows whether
clusters are as independent as the rule takes them for. And losses are planted: into what swapping leaves of the flips,
cases that both sides had right are turned into losses until the release is stopped.

Not covered: losses that no case of the suite shows; a loss planted evenly over the cases, as here, is spread wider than
one that sits in a few clusters, which bounds widen for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, ndtri

from pipeline.gate.decision import Measurement, harm_of
from pipeline.gate.statistics import count_bounds, holm_columns
from pipeline.gate.verdicts import MIN_CLUSTERS, is_proven
from pipeline.gate.wording import definition_of
from pipeline.verdict_records import Certificate, DetectableLoss

Floats = NDArray[np.float64]

NUM_SWAPS = 1_000  # they know a rate of 5 % to 0.7 points
BLOCK = 5  # neighbouring clusters of the evalset that are swapped together
_CHANCE = 0.001  # of refusing a rule that keeps its level


def certify(
    measured: Mapping[str, Sequence[Measurement]], *, alpha: float, blocks_inconclusive: bool
) -> dict[str, Certificate]:
    """Certify the rule for candidates that are judged as one family.

    Args:
        measured: per candidate its measurements.
        alpha: of the family.
        blocks_inconclusive: whether a loss that is not proven to be within its tolerance stops the release.
    """
    gated = [(i, m) for i, name in enumerate(measured) for m in measured[name] if m.is_decisive]
    fails = {size: _count_fails(gated, size, alpha) for size in (1, BLOCK)}
    return {
        name: Certificate(
            num_swaps=NUM_SWAPS, num_false_fails=fails[1], block=BLOCK, num_block_fails=fails[BLOCK],
            losses=tuple(_find_losses(m, alpha, blocks_inconclusive) for m in measurements if m.is_decisive))
        for name, measurements in measured.items()
    }  # fmt: skip


def is_above(count: int, alpha: float) -> bool:
    """Say whether so many false fails among the swaps are more than a rule of level alpha gives by chance."""
    return count > 0 and bool(bdtrc(count - 1, NUM_SWAPS, alpha) < _CHANCE)


def _count_fails(gated: Sequence[tuple[int, Measurement]], size: int, alpha: float) -> int:
    """Count the swaps in which any comparison fails; clusters are swapped in blocks of `size`.

    Evals are swapped independently of each other, and so are candidates; the metrics of an eval together.
    """
    if not gated:
        return 0
    p, beyond = np.empty((len(gated), NUM_SWAPS)), np.empty((len(gated), NUM_SWAPS), dtype=bool)
    signs: dict[tuple[str, int], Floats] = {}
    for row, (candidate, m) in enumerate(gated):
        # swapped in blocks, what all clusters lose alike would look like a loss of some blocks
        sums = m.sums - (m.weights * (m.sums.sum() / m.weights.sum()) if size > 1 else 0.0)
        blocks = np.add.reduceat(sums, np.arange(0, len(sums), size))
        key = m.metric.partition("/")[0], len(blocks)
        if key not in signs:
            signs[key] = _draw_signs(len(blocks), seed=len(signs)).astype(np.float64)
        totals = np.roll(signs[key] @ blocks, candidate * (NUM_SWAPS // 7))
        p[row] = m.tail(totals)
        beyond[row] = harm_of(m.metric, totals / m.weights.sum()) > (m.tolerance or 0.0)
    return int((beyond & (holm_columns(p) <= alpha)).any(axis=0).sum())


@lru_cache(maxsize=64)  # every candidate's swaps are drawn alike
def _draw_signs(num: int, *, seed: int) -> NDArray[np.int8]:
    return np.where(np.random.default_rng(seed).random((NUM_SWAPS, num)) < 0.5, -1, 1).astype(np.int8)


def _find_losses(m: Measurement, alpha: float, blocks_inconclusive: bool) -> DetectableLoss:
    find = _find_lost_cases if m.b is not None else _find_shift
    half, most = (find(m, probability, alpha, blocks_inconclusive) for probability in (0.5, 0.8))
    return DetectableLoss(metric=m.metric, bucket=m.bucket, k50=half, k80=most)


def _find_lost_cases(m: Measurement, probability: float, alpha: float, blocks_inconclusive: bool) -> float:
    """Return the smallest share of cases that, lost, stops the release with a probability.

    Swapping leaves a difference of flips that is nearly normal. The verdict is monotone in it, so the release is
    stopped with this probability when it is stopped at that quantile.
    """
    assert m.b is not None and m.c is not None
    tolerance, flips, spread = m.tolerance or 0.0, m.b + m.c, math.sqrt(float(m.sums @ m.sums))
    difference = max(-float(flips), -float(ndtri(probability)) * spread)
    gains = (flips - difference) / 2

    def is_stopped(lost: int) -> bool:
        losses = flips - gains + lost
        if losses - gains > tolerance * m.n or not blocks_inconclusive:
            return losses - gains > tolerance * m.n
        bounds = count_bounds(losses, gains, m.n, m.deff, m.effective_clusters, confidence=1 - alpha)
        return not is_proven(bounds.high, tolerance, m.effective_clusters)

    low, high = -1, m.n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_stopped(middle) else (middle, high)
    return high / m.n


def _find_shift(m: Measurement, probability: float, alpha: float, blocks_inconclusive: bool) -> float:
    """Return the same for a metric whose bound moves with its estimate: each case loses alike."""
    assert m.tolerance is not None
    if blocks_inconclusive and m.effective_clusters < MIN_CLUSTERS:
        return 0.0
    is_relative = definition_of(m.metric).harm == "relative"
    limit, high, harm = (math.log1p(x) if is_relative else x for x in (m.tolerance, m.high, m.harm))
    spread = math.sqrt(float(m.sums @ m.sums)) / float(m.weights.sum())
    room = limit - (high - harm if blocks_inconclusive else 0.0)
    loss = max(0.0, room + float(ndtri(probability)) * spread)
    return math.expm1(loss) if is_relative else loss

