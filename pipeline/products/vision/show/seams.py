"""One stitch of a tiled picture, cut out: where the tiled candidate steps away from the reference most.

A step is averaged with its sign along the edge that two tiles share, as the score `seam_levels` is (what a picture
shows there changes sign from row to row), here of the difference between candidate and reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EvidenceError
from pipeline.numerics.tile_grid import list_stitches
from pipeline.records.serving import Tiling
from pipeline.report.pictures.images import Picture

REACH = 24  # pixels shown on each side of a stitch
LENGTH = 64  # pixels shown along it
SEAM_GAIN = 16  # a seam of a few levels is too faint to see as it is


@dataclass(frozen=True, eq=False)
class Strip:
    """A stitch, upright in the middle, of reference and candidate.

    Attributes:
        reference: pixels.
        candidate: the same place.
        steps: [2, columns - 1], the mean signed step from column to column along the whole edge, of both sides, in
            grey levels.
        stitch: column of the pictures before which it lies.
    """

    reference: Picture
    candidate: Picture
    steps: NDArray[np.float64]
    stitch: int


def cut_strip(ours: Picture, theirs: Picture, given: tuple[int, int], tiling: Tiling | None) -> Strip | None:
    """Cut out the stitch at which a candidate steps most; None where the picture is not cut into tiles.

    Args:
        ours: the reference's picture.
        theirs: the candidate's.
        given: rows and columns of what was enlarged.
        tiling: how that was cut.

    Raises:
        EvidenceError: the pictures differ in size, or are no multiple of what was enlarged.
    """
    factor = ours.shape[0] // given[0]
    if ours.shape != theirs.shape or factor < 1 or ours.shape[:2] != (given[0] * factor, given[1] * factor):
        raise EvidenceError(
            f"seams: expected two pictures of a whole multiple of {given} pixels, got shapes "
            f"{ours.shape} and {theirs.shape}"
        )
    rows, columns = list_stitches(given, tiling, factor)
    best: tuple[float, Strip] | None = None
    turned = ours.transpose(1, 0, 2), theirs.transpose(1, 0, 2)
    for (mine, other), places, cuts in (((ours, theirs), columns, rows), (turned, rows, columns)):
        change = other.astype(float) - mine
        for x, start, end in _list_edges(places, cuts, mine.shape[0]):
            step = float(np.abs((change[start:end, x] - change[start:end, x - 1]).mean(axis=0)).mean())
            if best is None or step > best[0]:
                best = step, _cut(mine, other, x, start, end)
    return None if best is None else best[1]


def _list_edges(places: Sequence[int], cuts: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """Yield each edge that two tiles share: its column, first row and end."""
    for x, (start, end) in itertools.product(places, itertools.pairwise([0, *cuts, size])):
        yield x, start, end


def _cut(mine: Picture, other: Picture, x: int, start: int, end: int) -> Strip:
    left, right, middle = max(0, x - REACH), x + REACH, (start + end) // 2
    top = max(0, middle - LENGTH // 2)
    where = slice(top, top + LENGTH), slice(left, right)
    steps = np.stack([np.diff(side[start:end, left:right].astype(float).mean(axis=(0, 2))) for side in (mine, other)])
    return Strip(mine[where], other[where], steps, x - left)
