"""What a gate is worth on the suite that it judged: how often it fails what is equal, and which losses it misses.

A certificate is computed with each verdict from the same records, without a model. Labels are swapped: if reference
and candidate were exchangeable, every cluster's harm would be as likely with the opposite sign, so whatever the rule
fails among such swaps it fails falsely. Within clusters that can't be more than alpha unless the rule or its code is
broken, as its test assumes just that; in blocks of neighbouring clusters it can, where clusters are less independent
than the rule takes them for, and a metric whose neighbours move together is named. And losses are planted: into what
swapping leaves of the flips, cases are lost by chance until the release is stopped.

Not covered: losses that no case of the suite shows; a loss planted evenly over the cases, as here, is spread wider than
one that sits in a few clusters, which bounds widen for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, ndtri

from pipeline.gate.decision import Measurement, harm_of
from pipeline.gate.statistics import count_bounds, holm_columns, mix_effects
from pipeline.gate.verdicts import MIN_CLUSTERS, is_proven
from pipeline.gate.wording import definition_of, name_metric
from pipeline.verdict_records import Certificate, DetectableLoss

Floats = NDArray[np.float64]

NUM_SWAPS = 1_000  # they know a rate of 5 % to 0.7 points
BLOCK = 5  # neighbouring clusters of the evalset that are swapped together
_CHANCE = 0.001  # of refusing a rule that keeps its level
_MAX_SIGNS = 1_000_000  # in memory at once


def certify(
    measured: Mapping[str, Sequence[Measurement]], families: Sequence[Sequence[str]], *, alpha: float,
    blocks_inconclusive: bool,
) -> dict[str, Certificate]:  # fmt: skip
    """Certify the rule for every candidate.

    Args:
        measured: per candidate its measurements.
        families: candidates that are judged together; each is in one.
        alpha: of a family.
        blocks_inconclusive: whether a loss that is not proven to be within its tolerance stops the release.
    """
    gated = {name: [m for m in measurements if m.is_decisive] for name, measurements in measured.items()}
    fails = {size: _count_fails(gated, families, size, alpha) for size in (1, BLOCK)}
    return {
        name: Certificate(
            num_swaps=NUM_SWAPS, num_false_fails=fails[1][name], block=BLOCK, num_block_fails=fails[BLOCK][name],
            dependent=tuple(name_metric(m.metric, m.bucket) for m in measurements if _moves_in_blocks(m)),
            losses=tuple(_find_losses(m, alpha, blocks_inconclusive) for m in measurements))
        for name, measurements in gated.items()
    }  # fmt: skip


def is_above(count: int, alpha: float) -> bool:
    """Say whether so many false fails among the swaps are more than a rule of level alpha gives by chance."""
    return count > 0 and bool(bdtrc(count - 1, NUM_SWAPS, alpha) < _CHANCE)


def _count_fails(
    gated: Mapping[str, Sequence[Measurement]], families: Sequence[Sequence[str]], size: int, alpha: float
) -> dict[str, int]:
    """Count the swaps in which any comparison of a candidate's family fails; clusters are swapped in blocks of `size`.

    Evals are swapped independently of each other, and so are the candidates of a family; the metrics of an eval
    together.
    """
    swapped = _swap(gated, size)
    counts = dict.fromkeys(gated, 0)
    for family in families:
        members = [(i, m, total) for i, name in enumerate(family) for m, total in zip(
            gated[name], swapped[name], strict=True)]  # fmt: skip
        if not members:
            continue
        # a draw of one candidate beside another draw of the next
        totals = [np.roll(total, i * (NUM_SWAPS // 7)) for i, _, total in members]
        p = np.stack([m.tail(total) for (_, m, _), total in zip(members, totals, strict=True)])
        beyond = np.stack([harm_of(m.metric, total / m.weights.sum()) > (m.tolerance or 0.0)
                           for (_, m, _), total in zip(members, totals, strict=True)])  # fmt: skip
        count = int((beyond & (holm_columns(p) <= alpha)).any(axis=0).sum())
        counts |= dict.fromkeys(family, count)
    return counts


def _swap(gated: Mapping[str, Sequence[Measurement]], size: int) -> dict[str, list[Floats]]:
    """Return the totals of each measurement's sums under random signs, [NUM_SWAPS] each."""
    by_eval: dict[tuple[str, int], list[tuple[str, int, Floats]]] = {}
    for name, measurements in gated.items():
        for i, m in enumerate(measurements):
            # swapped in blocks, what all clusters lose alike would look like a loss of some blocks
            sums = m.sums - (m.weights * (m.sums.sum() / m.weights.sum()) if size > 1 else 0.0)
            blocks = np.add.reduceat(sums, np.arange(0, len(sums), size))
            by_eval.setdefault((m.metric.partition("/")[0], len(blocks)), []).append((name, i, blocks))
    swapped = {name: [np.empty(0)] * len(measurements) for name, measurements in gated.items()}
    for (eval_name, num), members in by_eval.items():
        # of the eval and no other: who else is judged must change no draw
        seed = crc32(f"{eval_name}/{num}/{size}".encode())
        totals = _draw_totals(np.stack([blocks for _, _, blocks in members], axis=1), num, seed=seed)
        for column, (name, i, _) in enumerate(members):
            swapped[name][i] = totals[:, column]
    return swapped


def _draw_totals(sums: Floats, num: int, *, seed: int) -> Floats:
    """Return [NUM_SWAPS, columns] from sums [num, columns], some draws at a time: a matrix of signs can be large."""
    rng, totals = np.random.default_rng(seed), np.empty((NUM_SWAPS, sums.shape[1]))
    step = max(1, _MAX_SIGNS // num)
    for start in range(0, NUM_SWAPS, step):
        signs = np.where(rng.random((min(step, NUM_SWAPS - start), num)) < 0.5, -1.0, 1.0)
        totals[start : start + step] = signs @ sums
    return totals


def _moves_in_blocks(m: Measurement) -> bool:
    """Say whether neighbouring clusters move together more than another order of the same clusters would show.

    Reference: the sum of squared block sums against its distribution under permutations; most orders are told apart by
    its mean and variance alone.
    """
    used = m.weights > 0
    centred = (m.sums - m.weights * (m.sums.sum() / m.weights.sum()))[used]
    num, squares = len(centred), float(centred @ centred)
    if num < 2 * BLOCK or squares == 0:
        return False
    seen = _sum_blocks(centred)
    if (seen / squares - 1) * num < 3 * math.sqrt(2 * (BLOCK - 1) * num):  # three standard deviations
        return False
    rng = np.random.default_rng(0)
    return sum(_sum_blocks(rng.permutation(centred)) >= seen for _ in range(NUM_SWAPS)) < _CHANCE * NUM_SWAPS


def _sum_blocks(sums: Floats) -> float:
    blocks = np.add.reduceat(sums, np.arange(0, len(sums), BLOCK))
    return float(blocks @ blocks)


def _find_losses(m: Measurement, alpha: float, blocks_inconclusive: bool) -> DetectableLoss:
    find = _find_lost_cases if m.b is not None else _find_shift
    must_prove = blocks_inconclusive and m.tier == "critical"
    half, most = (find(m, probability, alpha, must_prove) for probability in (0.5, 0.8))
    return DetectableLoss(metric=m.metric, bucket=m.bucket, k50=half, k80=most)


def _find_lost_cases(m: Measurement, probability: float, alpha: float, must_prove: bool) -> float:
    """Return the smallest true loss that stops the release with a probability: each case is lost by chance.

    What swapping leaves of the flips and the number of lost cases are nearly normal. The verdict is monotone in their
    sum, so the release is stopped with this probability when it is stopped at that quantile.
    """
    assert m.b is not None and m.c is not None
    tolerance, flips, swapped = m.tolerance or 0.0, m.b + m.c, float(m.sums @ m.sums)

    def is_stopped(lost: int) -> bool:
        spread = math.sqrt(swapped + lost * (1 - lost / m.n))
        difference = lost - float(ndtri(probability)) * spread
        gains = max((flips + lost - difference) / 2, 0.0)
        losses = gains + difference
        if difference > tolerance * m.n or not must_prove:
            return difference > tolerance * m.n
        deff = _plant_effect(m, swapped, flips, lost)
        bounds = count_bounds(max(losses, 0.0), gains, m.n, deff, m.effective_clusters, confidence=1 - alpha)
        return not is_proven(bounds.high, tolerance, m.effective_clusters)

    low, high = -1, m.n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_stopped(middle) else (middle, high)
    return high / m.n


def _plant_effect(m: Measurement, swapped: float, flips: int, lost: int) -> float:
    """Return the design effect after `lost` cases, in no cluster more than in others, were planted among the flips."""
    sizes = m.weights[m.weights > 0]
    if len(sizes) in (1, m.n):
        return m.deff
    clustered = swapped * len(sizes) / (len(sizes) - 1)
    return mix_effects(clustered, flips * m.n / (m.n - 1), sizes, more=lost * (1 - lost / m.n))


def _find_shift(m: Measurement, probability: float, alpha: float, must_prove: bool) -> float:
    """Return the same for a metric whose bound moves with its estimate: each case loses alike."""
    assert m.tolerance is not None
    if must_prove and m.effective_clusters < MIN_CLUSTERS:
        return 0.0
    is_relative = definition_of(m.metric).harm == "relative"
    limit, high, harm = (math.log1p(x) if is_relative else x for x in (m.tolerance, m.high, m.harm))
    spread = math.sqrt(float(m.sums @ m.sums)) / float(m.weights.sum())
    room = limit - (high - harm if must_prove else 0.0)
    loss = max(0.0, room + float(ndtri(probability)) * spread)
    return math.expm1(loss) if is_relative else loss

