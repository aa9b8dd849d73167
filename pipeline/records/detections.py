"""What a detector found on each image, matched with what is there: all that average precision needs.

Matching needs boxes and happens once, at evaluation time, by the rules of COCO's own evaluation. What it leaves is a
`MatchTable`: per detection its score and, per bucket of object areas and IoU threshold, whether it is a hit, a false
alarm, or does not count; per image the number of objects. That is enough to compute every AP and AR of any set of
images, however often each is drawn, without the images, their boxes or torch.

The table lies in `<eval>.npz` beside the case records and not in them: a detection has 10 thresholds times 4 buckets
of flags, which as JSON numbers of a score dictionary would be a hundred times its size, and every resample reads all
of them. Two bits a threshold, ten thresholds in a uint16: 500 images with 30 detections each are 0.4 MiB.

Not covered: masks and keypoints, and averaging (`average_precision.py`).
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EvidenceError, NumericsError
from pipeline.records.files import replace_whole
from pipeline.settings.metrics import AREAS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Bits = NDArray[np.uint16]

IOU_THRESHOLDS: Floats = np.linspace(0.5, 0.95, 10)  # as COCO computes them: the seventh is not quite 0.8
MAX_DETECTIONS = 100  # of a class on an image
_ARRAYS = ("offsets", "classes", "scores", "matched", "ignored", "num_objects")


UNKNOWN = "unknown_categories"  # score of a record: detections of a category that the evalset does not have


@dataclass(frozen=True)
class Objects:
    """What is on an image.

    Attributes:
        boxes: [num, 4], left, top, width, height in pixels.
        classes: [num], 0-based.
        areas: [num], square pixels, by which an object belongs to a bucket; of its mask where it has one.
        is_crowd: [num], a region of many objects, in which detections neither hit nor miss.
    """

    boxes: Floats
    classes: Ints
    areas: Floats
    is_crowd: Bools


@dataclass(frozen=True)
class Detections:
    """What a detector says is on an image: boxes [num, 4] as of `Objects`, classes [num], scores [num]."""

    boxes: Floats
    classes: Ints
    scores: Floats


@dataclass(frozen=True, eq=False)  # two are one only when they are the same object: caches tell them apart by that
class MatchTable:
    """Detections of one or more images, matched; those of an image by falling score.

    Attributes:
        areas: bucket -> smallest and largest area in square pixels, both inclusive.
        offsets: [num_images + 1], where each image's detections start.
        classes: [num_detections].
        scores: [num_detections].
        matched: [num_detections, num_areas], bit t: a hit at IOU_THRESHOLDS[t].
        ignored: [num_detections, num_areas], bit t: neither hit nor false alarm there.
        num_objects: [num_images, num_classes, num_areas], that should be found.
        categories: bucket -> the class that it holds.
    """

    areas: dict[str, tuple[float, float]]
    offsets: Ints
    classes: Ints
    scores: Floats
    matched: Bits
    ignored: Bits
    num_objects: Ints
    categories: dict[str, int] = field(default_factory=dict)

    @property
    def num_images(self) -> int:
        """How many images it covers."""
        return len(self.offsets) - 1

    @property
    def images(self) -> Ints:
        """[num_detections], the image of each detection, 0-based."""
        return np.repeat(np.arange(self.num_images), np.diff(self.offsets))

    def at(self, positions: Ints) -> MatchTable:
        """Return the table of some images, in that order."""
        sizes = np.diff(self.offsets)[positions]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[positions] - offsets[:-1], sizes)
        return MatchTable(
            self.areas,
            offsets,
            self.classes[rows],
            self.scores[rows],
            self.matched[rows],
            self.ignored[rows],
            self.num_objects[positions],
            self.categories,
        )

    def of_class(self, number: int) -> MatchTable:
        """Return the table of one class, as the only one."""
        rows = np.flatnonzero(self.classes == number)
        return MatchTable(
            self.areas,
            np.searchsorted(rows, self.offsets),
            np.zeros(len(rows), dtype=np.int64),
            self.scores[rows],
            self.matched[rows],
            self.ignored[rows],
            self.num_objects[:, [number]],
        )


def join_tables(tables: Sequence[MatchTable]) -> MatchTable:
    """Return one table of all images of some that have the same buckets and classes."""
    sizes = np.concatenate([np.diff(table.offsets) for table in tables])
    classes, scores, matched, ignored, num_objects = (
        np.concatenate([getattr(table, name) for table in tables])
        for name in ("classes", "scores", "matched", "ignored", "num_objects")
    )
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return MatchTable(tables[0].areas, offsets, classes, scores, matched, ignored, num_objects, tables[0].categories)


def match_image(
    objects: Objects,
    detections: Detections,
    *,
    num_classes: int,
    areas: Mapping[str, tuple[float, float]] = AREAS,
    categories: Mapping[str, int] | None = None,
) -> MatchTable:
    """Match the detections of one image with its objects as COCO does, in every bucket and at every threshold.

    Within a class, detections take objects by falling score, each the one with the largest IoU that is free, of equals
    the last. An object that does not count (a crowd, or an area outside of the bucket) is taken only where no other
    fits, and then the detection does not count either; nor does one without an object whose own area is outside of
    the bucket. A crowd can be taken any number of times, and its IoU is the share of the detection that lies in it.

    Args:
        num_classes: of the whole evalset; classes are below it.
        areas: buckets, beside COCO's own any that a product needs.
        categories: bucket -> the class that it holds.

    Raises:
        NumericsError: a box or score that is not finite, a side below 0, or an unknown class.

    Reference: T.-Y. Lin et al., Microsoft COCO (2014), arXiv 1405.0312, and the rules of cocodataset.org's evaluation.
    """
    _check_boxes("object", objects.boxes, objects.areas, objects.classes, num_classes)
    _check_boxes("detection", detections.boxes, detections.scores, detections.classes, num_classes)
    with np.errstate(over="ignore"):  # of a box as wide as a float goes: it overlaps with nothing by half
        return _match(objects, detections, num_classes, areas, categories or {})


def _match(
    objects: Objects,
    detections: Detections,
    num_classes: int,
    areas: Mapping[str, tuple[float, float]],
    categories: Mapping[str, int],
) -> MatchTable:
    bounds = np.array(list(areas.values()))
    is_outside = (objects.areas < bounds[:, :1]) | (objects.areas > bounds[:, 1:])  # [areas, objects]
    is_hidden = is_outside | objects.is_crowd
    order = _select_best(detections)
    boxes, classes = detections.boxes[order], detections.classes[order]
    matched, ignored = (np.zeros((len(order), len(areas), len(IOU_THRESHOLDS)), dtype=bool) for _ in range(2))
    for number in np.unique(classes).tolist():
        mine, there = np.flatnonzero(classes == number), np.flatnonzero(objects.classes == number)
        iou = compute_iou(boxes[mine], objects.boxes[there], objects.is_crowd[there])
        matched[mine], ignored[mine] = _match_class(iou, objects.is_crowd[there], is_hidden[:, there])
    box_areas = boxes[:, 2] * boxes[:, 3]
    is_elsewhere = (box_areas < bounds[:, :1]) | (box_areas > bounds[:, 1:])
    ignored |= ~matched & is_elsewhere.T[:, :, None]
    num_objects = np.stack([np.bincount(objects.classes[~hidden], minlength=num_classes) for hidden in is_hidden], 1)
    return MatchTable(
        areas=dict(areas),
        offsets=np.array([0, len(order)]),
        classes=classes,
        scores=detections.scores[order],
        matched=_pack(matched & ~ignored),
        ignored=_pack(ignored),
        num_objects=num_objects[None],
        categories=dict(categories),
    )


def score_image(table: MatchTable) -> dict[str, float]:
    """Return the scores of a case record from the table of its image, for people: what was found of what is there.

    `objects` and `found`, the mean over thresholds of the objects found, are followed by "_<bucket>" for areas other
    than "all" and for categories that are there; `found_50` and `found_75` are at one threshold, `false_alarms` at 0.5.
    AP does not follow from them: it needs the ranking over all images.
    """
    flags = unpack(table.matched)
    scores = {"false_alarms": float((~flags[:, 0, 0] & ~unpack(table.ignored)[:, 0, 0]).sum())}
    scores |= {"found_50": float(flags[:, 0, 0].sum()), "found_75": float(flags[:, 0, 5].sum())}
    for number, name in enumerate(table.areas):
        suffix = "" if name == "all" else f"_{name}"
        scores |= {
            f"objects{suffix}": float(table.num_objects[:, :, number].sum()),
            f"found{suffix}": float(flags[:, number].sum(axis=0).mean()),
        }
    for name, number in table.categories.items():
        if not table.num_objects[:, number, 0].any():
            continue
        scores |= {
            f"objects_{name}": float(table.num_objects[:, number, 0].sum()),
            f"found_{name}": float(flags[table.classes == number, 0].sum(axis=0).mean()),
        }
    return scores


def compute_iou(detected: Floats, boxes: Floats, is_crowd: Bools) -> Floats:
    """Return the intersection over union [num_detected, num_boxes]; with a crowd, over the area of the detection."""
    low = np.maximum(detected[:, None, :2], boxes[None, :, :2])
    high = np.minimum(detected[:, None, :2] + detected[:, None, 2:], boxes[None, :, :2] + boxes[None, :, 2:])
    sides = np.maximum(high - low, 0.0)
    overlap = sides[..., 0] * sides[..., 1]
    detected_areas, areas = detected[:, 2] * detected[:, 3], boxes[:, 2] * boxes[:, 3]
    union = np.where(is_crowd, detected_areas[:, None], detected_areas[:, None] + areas - overlap)
    return np.divide(overlap, union, out=np.zeros_like(overlap), where=overlap > 0)


def _match_class(iou: Floats, is_crowd: Bools, is_hidden: Bools) -> tuple[Bools, Bools]:
    """Match one class: iou [detections, objects] to matched and ignored, each [detections, areas, thresholds]."""
    num_detected, num_there = iou.shape
    shape = (num_detected, len(is_hidden), len(IOU_THRESHOLDS))
    matched, ignored = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    limits = np.minimum(IOU_THRESHOLDS, 1 - 1e-10)[:, None]
    is_taken = np.zeros((*shape[1:], num_there), dtype=bool)
    for i in np.flatnonzero((iou >= limits[0]).any(axis=1)).tolist():
        fits = (iou[i] >= limits) & (~is_taken | is_crowd)  # [areas, thresholds, objects]
        for hides, group in ((False, ~is_hidden[:, None]), (True, is_hidden[:, None])):
            closeness = np.where(fits & group & ~matched[i][..., None], iou[i], -1.0)
            best = num_there - 1 - closeness[..., ::-1].argmax(axis=-1)
            area, threshold = np.nonzero(closeness.max(axis=-1) >= 0)
            is_taken[area, threshold, best[area, threshold]] = True
            matched[i, area, threshold] = True
            ignored[i, area, threshold] = hides
    return matched, ignored


def _select_best(detections: Detections) -> Ints:
    """Return the positions of the best detections of each class, by falling score."""
    order = np.argsort(-detections.scores, kind="stable")
    rank = rank_within(detections.classes[order])
    return order[rank < MAX_DETECTIONS]


def rank_within(groups: Ints) -> Ints:
    """Return how many of the same group come before each, 0-based."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    rank = np.empty(len(groups), dtype=np.int64)
    rank[order] = np.arange(len(groups)) - np.repeat(starts, np.diff(starts, append=len(groups)))
    return rank


def _check_boxes(what: str, boxes: Floats, numbers: Floats, classes: Ints, num_classes: int) -> None:
    is_bad = ~np.isfinite(boxes).all(axis=1) | ~np.isfinite(numbers) | (boxes[:, 2:] < 0).any(axis=1)
    for i in np.flatnonzero(is_bad | (classes < 0) | (classes >= num_classes))[:1].tolist():
        raise NumericsError(
            f"{what} {i}: expected finite numbers, sides of 0 or more and a class below {num_classes}, "
            f"got box {boxes[i].tolist()!r}, class {int(classes[i])!r}, score or area {numbers[i]!r}"
        )


def _pack(flags: Bools) -> Bits:
    return (flags.astype(np.uint16) << np.arange(len(IOU_THRESHOLDS), dtype=np.uint16)).sum(axis=-1, dtype=np.uint16)


def unpack(bits: Bits) -> Bools:
    """Return the flags [..., num_thresholds] that are packed into bits."""
    return (bits[..., None] >> np.arange(len(IOU_THRESHOLDS), dtype=np.uint16)) & 1 == 1


def save_matches(path: Path, table: MatchTable) -> None:
    """Write a table as .npz whose bytes follow from it alone; np.savez would write the time of day into the file."""
    arrays = {name: getattr(table, name) for name in _ARRAYS}
    arrays |= {
        "area_bounds": np.array(list(table.areas.values())),
        "area_names": np.array(list(table.areas)),
        "category_names": np.array(list(table.categories), dtype=np.str_),
        "category_classes": np.array(list(table.categories.values()), dtype=np.int64),
    }
    with replace_whole(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def load_matches(path: Path, *, num_images: int) -> MatchTable:
    """Read a table back.

    Raises:
        EvidenceError: missing, damaged, or not about this many images.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            parts = {name: arrays[name] for name in _ARRAYS}
            areas = dict(zip(arrays["area_names"].tolist(), map(tuple, arrays["area_bounds"].tolist()), strict=True))
            categories = dict(zip(arrays["category_names"].tolist(), arrays["category_classes"].tolist(), strict=True))
    except FileNotFoundError:
        raise EvidenceError(f"{path}: expected the matched detections, found no file; run `dvc repro`") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise EvidenceError(f"{path}: not a file of matched detections: {error}; run `dvc repro`") from None
    table = MatchTable(areas=areas, categories=categories, **parts)
    _check_table(path, table, num_images)
    return table


def _check_table(path: Path, table: MatchTable, num_images: int) -> None:
    num, width = len(table.scores), len(table.areas)
    fits = (
        len(table.offsets) == num_images + 1
        and table.offsets[0] == 0
        and table.offsets[-1] == num
        and (np.diff(table.offsets) >= 0).all()
        and table.classes.shape == (num,)
        and table.matched.shape == table.ignored.shape == (num, width)
        and table.num_objects.ndim == 3
        and table.num_objects.shape[::2] == (num_images, width)
        and np.isfinite(table.scores).all()
        and np.isin(table.classes, range(table.num_objects.shape[1])).all()
        and all(number in range(table.num_objects.shape[1]) for number in table.categories.values())
    )
    if not fits:
        raise EvidenceError(
            f"{path}: expected finite detections of {num_images} images in {width} buckets, got "
            f"arrays that don't fit together; run `dvc repro`"
        )
