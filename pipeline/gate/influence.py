"""What each image adds to a loss of average precision: AP is no mean over images, but nearly a sum of such parts.

A detection's part is the derivative of AP by its weight, taken half way between the two sides: in the ranking of the
detections of both, each counted half. A hit adds the precision at its place and raises that of all hits below it, a
false alarm lowers theirs. The derivatives do not change when the sides of an image are swapped, its part changes
sign: so the sign-flip test of these sums is exact under "the two detectors are exchangeable on every image", however
few images there are. Their total is the difference of AP up to COCO's interpolation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.records.detections import IOU_THRESHOLDS, MatchTable, unpack

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDING = 1e-12  # of AP: sums of equal parts with opposite signs leave less


def share_of_objects(table: MatchTable) -> Floats:
    """Return [num_images, num_areas], the share of AP that each image's objects carry: classes count alike."""
    totals = table.num_objects.sum(axis=0)
    shares = (table.num_objects / np.maximum(totals, 1)).sum(axis=1)
    return np.asarray(shares / np.maximum((totals > 0).sum(axis=0), 1))


def harm_by_image(reference: MatchTable, candidate: MatchTable) -> Floats:
    """Return what each image adds to AP(reference) - AP(candidate), [num_images, num_areas, num_thresholds].

    Args:
        reference: table of the reference.
        candidate: table of the candidate, of the same images in the same order.
    """
    sides = (reference, candidate)
    images, classes, scores = (
        np.concatenate([getattr(side, name) for side in sides]) for name in ("images", "classes", "scores")
    )
    hits, ignored = (
        np.concatenate([unpack(bits) for bits in pair])
        for pair in ([side.matched for side in sides], [side.ignored for side in sides])
    )
    signs = np.repeat([1.0, -1.0], [len(side.scores) for side in sides])
    num_objects = reference.num_objects.sum(axis=0)  # [classes, areas]
    harm = np.zeros((reference.num_images, len(reference.areas), len(IOU_THRESHOLDS)))
    for number, area in zip(*np.nonzero(num_objects), strict=True):
        rows = np.flatnonzero(classes == number)
        rows = rows[np.argsort(-scores[rows], kind="stable")]
        values = _marginal_values(scores[rows], hits[rows, area], ~ignored[rows, area])
        parts = values * signs[rows, None] / num_objects[number, area]
        np.add.at(harm[:, area], images[rows], parts)
    harm /= np.maximum((num_objects > 0).sum(axis=0), 1)[:, None]
    return np.where(np.abs(harm) < _ROUNDING, 0.0, harm)


def _marginal_values(scores: Floats, hits: NDArray[np.bool_], counts: NDArray[np.bool_]) -> Floats:
    """Return the derivative of objects x AP by each detection's weight, at weights of a half.

    Equal scores are one place of the ranking: the order of the sides in the list must not matter.

    Args:
        scores: [num], falling.
        hits: [num, num_thresholds].
        counts: [num, num_thresholds], hit or false alarm.
    """
    first, last = (np.searchsorted(-scores, -scores, side=side) for side in ("left", "right"))
    found = np.cumsum(hits / 2, axis=0)[last - 1]
    seen = np.maximum(np.cumsum(counts / 2, axis=0)[last - 1], 0.5)

    def from_here(values: Floats) -> Floats:
        return np.asarray(np.cumsum(values[::-1], axis=0)[::-1][first])

    gain = found / seen + from_here(hits / 2 / seen)
    return np.asarray(hits * gain - counts * from_here(hits / 2 * found / seen**2))
