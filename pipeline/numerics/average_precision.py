"""Average precision and recall from matched detections: COCO's twelve numbers, of any resample of the images.

A resample is a weight per image, how often it is drawn. An image that is drawn twice has every detection and every
object twice, and its copies stand together in the ranking. So weighted counts give the AP of the image list with
repetitions, exactly but for the order of equal scores on one image. Each core computes some of the resamples. A class
without an object in a bucket does not enter that bucket's mean, as in COCO, in a resample too; where no class has one
there is no AP, which is NaN here and never -1: -1 less -1 would be no change.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from pipeline.records.detections import IOU_THRESHOLDS, MatchTable, rank_within, unpack

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_RECALLS: Floats = np.linspace(0.0, 1.0, 101)  # as COCO computes them: the eighth is above 7 / 100 by a rounding error
_EVERYWHERE = (1 << len(IOU_THRESHOLDS)) - 1  # the bits of a detection that counts at no threshold
_CHUNK_NUMBERS = 60_000  # weights x detections at once; larger ones fall out of the cache of the CPU


def average_precision(table: MatchTable, weights: Floats | None = None) -> Floats:
    """Return AP [num_resamples, num_areas, num_thresholds], the mean over classes; NaN where a bucket is empty.

    Args:
        table: matched detections.
        weights: [num_resamples, num_images], whole numbers, how often each image counts; None counts each once.

    Reference: precision interpolated at 101 recalls, M. Everingham et al., International Journal of Computer Vision
    88:303-338 (2010), section 4.2, with COCO's number of recalls.
    """
    weights = np.ones((1, table.num_images)) if weights is None else weights
    num_classes = table.num_objects.shape[1]
    return mean_over_classes(_one_class_precision(table.of_class(number), weights) for number in range(num_classes))


def mean_over_classes(parts: Iterable[Floats]) -> Floats:
    """Return AP of all classes as `average_precision` does, from that of each, which is NaN where it has no object."""
    total, num_classes = np.zeros(()), np.zeros(())
    for part in parts:
        has_objects = np.isfinite(part)
        total, num_classes = total + np.where(has_objects, part, 0.0), num_classes + has_objects
    with np.errstate(invalid="ignore"):
        return np.asarray(total / num_classes)


def _one_class_precision(table: MatchTable, weights: Floats) -> Floats:
    """Return AP [num_resamples, num_areas, num_thresholds] of a table with one class."""
    order = np.argsort(-table.scores, kind="stable")
    images, flags = table.images[order], (table.matched[order], table.ignored[order])
    num_objects = weights @ table.num_objects[:, 0].astype(np.float64)
    rows = max(1, _CHUNK_NUMBERS // max(len(order), 1))

    def compute(start: int) -> Floats:
        part = slice(start, start + rows)
        return _class_precision(weights[part][:, images], *flags, num_objects[part])

    with ThreadPoolExecutor() as pool:  # numpy lets other threads run
        precision = np.concatenate(list(pool.map(compute, range(0, len(weights), rows))))
    return np.where(num_objects[:, :, None] > 0, precision, np.nan)


def _class_precision(
    weights: Floats, matched: NDArray[np.uint16], ignored: NDArray[np.uint16], num_objects: Floats
) -> Floats:
    """Return AP [resamples, areas, thresholds] of one class; 0 where it has no object.

    Args:
        weights: [resamples, detections], by falling score.
        matched: [detections, areas], bit t.
        ignored: [detections, areas], bit t.
        num_objects: [resamples, areas].
    """
    areas = np.zeros((*num_objects.shape, len(IOU_THRESHOLDS)))
    for area in np.flatnonzero(num_objects.any(axis=0)).tolist():
        rows = np.flatnonzero(ignored[:, area] != _EVERYWHERE)
        drawn, hit_bits, ignored_bits = weights[:, rows], matched[rows, area], ignored[rows, area]
        seen, before = np.empty(0), None
        for t in range(len(IOU_THRESHOLDS)):
            counts = (ignored_bits >> t) & 1 == 0
            hits = np.flatnonzero((hit_bits >> t) & 1)
            if before is None or not np.array_equal(counts, before):  # mostly they are the last threshold's
                seen, before = np.cumsum(drawn * counts, axis=1), counts
            areas[:, area, t] = _area_under(np.cumsum(drawn[:, hits], axis=1), seen[:, hits], num_objects[:, area])
    return areas


def _area_under(num_hits: Floats, seen: Floats, num_objects: Floats) -> Floats:
    """Return the mean precision at 101 recalls [resamples].

    Args:
        num_hits: [resamples, hits], hits up to and with each hit, by falling score.
        seen: [resamples, hits], detections that count up to and with it.
        num_objects: [resamples].
    """
    precision = num_hits / np.maximum(seen, 1.0)
    best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    reached = np.searchsorted(_RECALLS, num_hits / np.maximum(num_objects, 1.0)[:, None], side="right")
    return np.asarray((best * np.diff(reached, axis=1, prepend=0)).sum(axis=1) / len(_RECALLS))


def average_recall(table: MatchTable, *, max_detections: int) -> Floats:
    """Return the recall [num_areas, num_thresholds] of each image's and class's best detections, mean over classes."""
    num_classes = table.num_objects.shape[1]
    is_best = rank_within(table.images * num_classes + table.classes) < max_detections
    hits = unpack(table.matched)
    num_objects = table.num_objects.sum(axis=0)  # [classes, areas]
    num_hits = np.stack([hits[is_best & (table.classes == k)].sum(axis=0) for k in range(num_classes)])
    with np.errstate(invalid="ignore"):
        recall = np.where(num_objects[..., None] > 0, num_hits / np.maximum(num_objects, 1)[..., None], 0.0)
        return np.asarray(recall.sum(axis=0) / (num_objects > 0).sum(axis=0)[:, None])


def coco_numbers(table: MatchTable) -> dict[str, float]:
    """Return COCO's twelve numbers under the names of our metrics; NaN where a bucket is empty."""
    places = {name: i for i, name in enumerate(table.areas)}
    precision = average_precision(table)[0]
    numbers = {"ap": precision[0].mean(), "ap_50": precision[0, 0], "ap_75": precision[0, 5]}
    numbers |= {f"ap_{name}": precision[places[name]].mean() for name in ("small", "medium", "large")}
    numbers |= {f"ar_{most}": average_recall(table, max_detections=most)[0].mean() for most in (1, 10, 100)}
    recall = average_recall(table, max_detections=100)
    numbers |= {f"ar_{name}": recall[places[name]].mean() for name in ("small", "medium", "large")}
    return {name: float(value) for name, value in numbers.items()}
