"""What a detector found on a picture, drawn: its boxes, and those of the reference that it lost.

A record's output holds boxes, and the matched detections beside the records tell which of them are objects, so no
annotation is needed. Only boxes with a score of 0.3 or more are shown: that is a picture for people, AP counts all.
What is neither object nor false alarm is left out, too: in a crowd, of a category that no annotation has, or beyond
100 of a class.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import EvidenceError
from pipeline.gate.pairing import PairedCases
from pipeline.records.detections import (
    MAX_DETECTIONS,
    Bools,
    Floats,
    Ints,
    MatchTable,
    compute_iou,
    load_matches,
    unpack,
)
from pipeline.records.evaluations import CaseRecord
from pipeline.report.pictures.images import Picture

SHOWN_FROM = 0.3  # score
SAME_FROM = 0.5  # IoU from which two boxes are of one object
FOUND, FALSE, LOST = "#56B4E9", "#F0E442", "#D55E00"  # Okabe-Ito: an object, a false alarm, an object that is lost
BOXES_LEGEND = (
    f"boxes with a score of {SHOWN_FROM:g} or more; blue: an object is found, yellow: a false alarm, "
    "orange: an object that only the reference finds"
)
_SIDE = 640  # pixels that a picture is enlarged to at least, so that boxes are thin


@dataclass(frozen=True, eq=False)
class Found:
    """The shown boxes of one side: [num, 4], left, top, width, height in pixels; categories and hits [num]."""

    boxes: Floats
    categories: Ints
    is_hit: Bools

    def select(self, chosen: Bools) -> Found:
        """Return some of them."""
        return Found(self.boxes[chosen], self.categories[chosen], self.is_hit[chosen])


def read_found(record: CaseRecord, table: MatchTable) -> Found:
    """Return what a record's output holds.

    Args:
        record: of a detector.
        table: of this picture alone.

    Raises:
        EvidenceError: the output is not a list of COCO results, or not what the table was made of.
    """
    try:
        results = _check_list(json.loads(record.output))
        boxes = np.array([r["bbox"] for r in results], dtype=np.float64).reshape(-1, 4)
        categories = np.array([r["category_id"] for r in results], dtype=np.int64)
        scores = np.array([r["score"] for r in results], dtype=np.float64)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise EvidenceError(
            f"case {record.case_id!r}: expected COCO results as its output, got "
            f"{type(error).__name__} while reading them; run `dvc repro`"
        ) from None
    area, rows = list(table.areas).index("all"), _find_rows(record.case_id, categories, scores, table)
    is_hit, is_judged = np.zeros(len(scores), dtype=bool), np.zeros(len(scores), dtype=bool)
    is_hit[rows], is_judged[rows] = unpack(table.matched)[:, area, 0], ~unpack(table.ignored)[:, area, 0]
    return Found(boxes, categories, is_hit).select(is_judged & (scores >= SHOWN_FROM))


def _find_rows(case_id: str, categories: Ints, scores: Floats, table: MatchTable) -> Ints:
    """Return the position [num_rows] of each row's result: results are in the order of the adapter, rows by score.

    A table has classes and no category_ids, but both rise together. So a class is the first category after that of the
    class before whose scores are the class's own. Categories of the very same scores can't be told apart, which matters
    where no annotation has the first of them.
    """
    order = np.argsort(-scores, kind="stable")  # as it was matched
    found, left = np.empty(len(table.scores), dtype=np.int64), iter(np.unique(categories).tolist())
    for number in np.unique(table.classes).tolist():
        rows = table.classes == number
        of_categories = (order[categories[order] == category][:MAX_DETECTIONS] for category in left)
        mine = next((mine for mine in of_categories if np.array_equal(scores[mine], table.scores[rows])), None)
        if mine is None:
            raise EvidenceError(
                f"case {case_id!r}: expected the results of its output as the matched detections have them, got "
                f"none with the {rows.sum()} scores of class {number}; run `dvc repro`"
            )
        found[rows] = mine
    return found


def _check_list(results: Any) -> list[Any]:
    if not isinstance(results, list):
        raise TypeError
    return results


@dataclass(frozen=True)
class JudgedBoxes:
    """Where the boxes of a case lie, and where it is said which are objects.

    Attributes:
        record: whose output they are.
        table: file of matched detections.
        place: position of the record among those of the file.
        num_images: of the file.
    """

    record: CaseRecord
    table: Path
    place: int
    num_images: int

    def read(self) -> Found:
        """Return the boxes that are shown.

        Raises:
            EvidenceError: output or file are damaged.
        """
        return read_found(self.record, load_matches(self.table, num_images=self.num_images).at(np.array([self.place])))


def read_both(pairs: PairedCases, i: int) -> tuple[Found, Found]:
    """Return what reference and candidate found on one picture.

    Raises:
        EvidenceError: an output holds no boxes, or they were not matched.
    """
    if pairs.tables is None:
        raise EvidenceError("boxes: expected matched detections beside the records, found none; run `dvc repro`")
    place = np.array([i])
    return (
        read_found(pairs.reference[i], pairs.tables[0].at(place)),
        read_found(pairs.candidate[i], pairs.tables[1].at(place)),
    )


def list_losses(pairs: PairedCases) -> list[tuple[int, int]]:
    """Return (number of objects that are lost, position) of the pictures that lost any, most first.

    Raises:
        EvidenceError: as of `read_both`.
    """
    counts = [(len(find_lost(*read_both(pairs, i)).boxes), i) for i in range(len(pairs.reference))]
    return sorted(((num, i) for num, i in counts if num), key=lambda row: (-row[0], row[1]))


def rank_losses(pairs: Mapping[str, PairedCases]) -> list[tuple[str, int]]:
    """Return (eval, position) of the pictures that lost any object, the worst first; none of an eval that is unfit."""
    ranked = []
    for eval_name, paired in pairs.items():
        try:
            ranked += [(-num, eval_name, i) for num, i in list_losses(paired)]
        except EvidenceError:
            continue  # the verdict was refused for it
    return [(eval_name, i) for _, eval_name, i in sorted(ranked)]


def find_lost(ours: Found, theirs: Found) -> Found:
    """Return the objects that the reference finds and the candidate does not."""
    mine, other = ours.select(ours.is_hit), theirs.select(theirs.is_hit)
    iou = compute_iou(mine.boxes, other.boxes, np.zeros(len(other.boxes), dtype=bool))
    is_same = (iou >= SAME_FROM) & (mine.categories[:, None] == other.categories)
    return mine.select(~is_same.any(axis=1))


def draw_boxes(picture: Picture, found: Found, lost: Found, *, boldness: int = 1) -> Picture:
    """Return an enlarged copy of a picture with boxes on it, those that are lost on top and twice as thick.

    Args:
        picture: what the detector was given.
        found: boxes of one side.
        lost: boxes that the other side has alone.
        boldness: times the thinnest line; a picture that is shown small needs more.
    """
    from PIL import Image, ImageDraw

    factor = max(1, round(_SIDE / max(picture.shape[:2])))
    image = Image.fromarray(picture.repeat(factor, axis=0).repeat(factor, axis=1))
    pen, width = ImageDraw.Draw(image), boldness * max(2, max(image.size) // 320)
    for colour, boxes, line in (
        (FALSE, found.boxes[~found.is_hit], width),
        (FOUND, found.boxes[found.is_hit], width),
        (LOST, lost.boxes, 2 * width),
    ):
        for left, top, right, bottom in _find_corners(boxes, factor, image.size, 2 * line).tolist():
            pen.rectangle((left, top, right, bottom), outline=colour, width=line)
    return np.asarray(image)


def _find_corners(boxes: Floats, factor: int, size: tuple[int, int], margin: int) -> Floats:
    """Return left, top, right and bottom [num, 4] on an enlarged picture, outside of it by no more than a margin.

    Pillow draws an outline pixel by pixel, those outside of the picture, too: a box of 1e20 pixels took minutes.
    """
    with np.errstate(over="ignore"):  # of a box as wide as a float goes: infinity is clipped as well
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1) * factor
    return np.clip(corners, -margin, np.array([*size, *size]) + margin)
