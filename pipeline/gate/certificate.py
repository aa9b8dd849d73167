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
    for seed, ((_, num), members) in enumerate(by_eval.items()):
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

