"""What a gate is worth on the suite that it judged: how often it fails what is equal, and which losses it misses.

A certificate is computed with each verdict from the same records, without a model. Labels are swapped: if reference
and candidate were exchangeable, every cluster's harm would be as likely with the opposite sign, so whatever the rule
fails among such swaps it fails falsely. Within clusters that can't be more than alpha unless the rule or its code is
broken, as its test assumes just that; in blocks of neighbouring clusters it can, where clusters are less independent
than the rule takes them for, and a metric whose neighbours move together is named. A release passes only when every
metric does, so the swaps say, too, how often a release without a loss goes out. Which losses it misses is in
`detectable.py`.

Not covered: losses that no case of the suite shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from pipeline.gate.decision import Measurement, harm_of
from pipeline.gate.detectable import find_losses, find_most_total, must_be_proven
from pipeline.gate.statistics import holm_columns
from pipeline.gate.wording import name_metric
from pipeline.records.verdicts import Certificate

Floats = NDArray[np.float64]

NUM_SWAPS = 1_000  # they know a rate of 5 % to 0.7 points
BLOCK = 5  # neighbouring clusters of the evalset that are swapped together
_CHANCE = 0.001  # of refusing a rule that keeps its level
_MAX_SIGNS = 1_000_000  # in memory at once


def certify(
    measured: Mapping[str, Sequence[Measurement]],
    families: Sequence[Sequence[str]],
    *,
    alpha: float,
    blocks_inconclusive: bool,
) -> dict[str, Certificate]:
    """Certify the rule for every candidate.

    Args:
        measured: per candidate its measurements.
        families: candidates that are judged together; each is in one.
        alpha: of a family.
        blocks_inconclusive: whether a loss that is not proven to be within its tolerance stops the release.
    """
    gated = {name: [m for m in measurements if m.is_decisive] for name, measurements in measured.items()}
    swapped, in_blocks = _swap(gated, 1), _swap(gated, BLOCK)
    certificates = {}
    for family in families:
        fails, block_fails = (_count_fails(gated, family, totals, alpha) for totals in (swapped, in_blocks))
        passes = _find_passes(gated, family, swapped, alpha, blocks_inconclusive)
        passed_alone = {name_of: int(passed.sum()) for name_of, passed in passes.items()}
        for name in family:
            certificates[name] = Certificate(
                num_swaps=NUM_SWAPS,
                num_false_fails=fails,
                block=BLOCK,
                num_block_fails=block_fails,
                dependent=tuple(name_metric(m.metric, m.bucket) for m in gated[name] if _moves_in_blocks(m)),
                losses=tuple(find_losses(m, alpha, blocks_inconclusive) for m in gated[name] if m.tier != "watched"),
                num_passes=int(np.logical_and.reduce(list(passes.values())).sum()) if passes else None,
                weakest=min(passed_alone, key=lambda key: passed_alone[key], default=""),
                num_weakest_passes=min(passed_alone.values(), default=None),
            )
    return {name: certificates[name] for name in gated}


def is_above(count: int, alpha: float) -> bool:
    """Say whether so many false fails among the swaps are more than a rule of level alpha gives by chance."""
    return count > 0 and bool(bdtrc(count - 1, NUM_SWAPS, alpha) < _CHANCE)


def _count_fails(
    gated: Mapping[str, Sequence[Measurement]],
    family: Sequence[str],
    swapped: Mapping[str, Sequence[Floats]],
    alpha: float,
) -> int:
    """Count the swaps in which any comparison of a family fails.

    Evals are swapped independently of each other, and so are the candidates of a family; the metrics of an eval
    together.
    """
    members = _list_members(gated, family, swapped)
    if not members:
        return 0
    p = np.stack([m.tail(total) for _, m, total in members])
    beyond = np.stack([harm_of(m.metric, total / m.weights.sum()) > (m.tolerance or 0.0) for _, m, total in members])
    return int((beyond & (holm_columns(p) <= alpha)).any(axis=0).sum())


def _list_members(
    gated: Mapping[str, Sequence[Measurement]], family: Sequence[str], swapped: Mapping[str, Sequence[Floats]]
) -> list[tuple[str, Measurement, Floats]]:
    """Return a family's measurements with their totals, a draw of one candidate beside another draw of the next."""
    return [
        (name, m, np.roll(total, i * (NUM_SWAPS // 7)))
        for i, name in enumerate(family)
        for m, total in zip(gated[name], swapped[name], strict=True)
    ]


def _find_passes(
    gated: Mapping[str, Sequence[Measurement]],
    family: Sequence[str],
    swapped: Mapping[str, Sequence[Floats]],
    alpha: float,
    blocks_inconclusive: bool,
) -> dict[str, NDArray[np.bool_]]:
    """Return, of each of a family's comparisons, the swaps in which it lets the release through."""
    found = {}
    for name, m, total in _list_members(gated, family, swapped):
        if m.tier == "watched":
            continue  # nothing but a fail of it stops a release
        must = must_be_proven(m, blocks_inconclusive)
        is_through = total <= find_most_total(m, alpha, must_prove=must) + 1e-9 * float(np.abs(m.sums).sum())
        if must:  # a gain beyond the tolerance that is no chance
            is_gain = harm_of(m.metric, total / m.weights.sum()) < -(m.tolerance or 0.0)
            is_through &= ~(is_gain & (m.tail(-total) <= alpha))
        shown = name_metric(m.metric, m.bucket)
        found[shown if len(family) == 1 else f"{shown} of {name}"] = is_through
    return found


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


def describe_level(certificate: Certificate, alpha: float) -> str:
    """Say that the rule fails what is equal more often than it may."""
    c = certificate
    return (
        f"certificate: the rule fails {c.num_false_fails} of {c.num_swaps:,} swaps of equal labels, more than "
        f"gate.alpha ({alpha:g}) explains; a fail can't be told from chance on these records: look at the clusters"
    )
