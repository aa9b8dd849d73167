"""Judge what a detector found: COCO results matched with what is on each picture.

A record's output is the results as JSON, so nothing else has to be kept to match them again. Results that hold NaN or
infinity are no results: they are left out, and the picture's output counts as not finite. So are a candidate's boxes
with a side below 0, which a damaged network may emit; of the reference they are the adapter's mistake. Categories that
no annotation of the evalset has are left out, as COCO's own evaluation does; those that its card does not name either
are counted, and the gate refuses them.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import EngineError
from pipeline.evalsets.cases import DetectionCase
from pipeline.products.vision.detection_settings import DetectionEval, name_categories
from pipeline.records.detections import (
    UNKNOWN,
    Detections,
    MatchTable,
    Objects,
    join_tables,
    match_image,
    save_matches,
    score_image,
)
from pipeline.records.digests import canonical_json
from pipeline.records.evaluations import CaseRecord

_BYTES = (bytes, bytearray, memoryview)
_LARGEST_CATEGORY = 2**31 - 1


@dataclass(frozen=True)
class Categories:
    """The categories of an evalset.

    Attributes:
        numbers: category_id of each class: those of the annotations, in order.
        buckets: name -> class, of those that are compared.
        known: category_ids that a detection may have.
    """

    numbers: tuple[int, ...]
    buckets: dict[str, int]
    known: frozenset[int]


def build_categories(cases: Sequence[DetectionCase], names: Mapping[str, int], settings: DetectionEval) -> Categories:
    """Return the categories of an evalset.

    Args:
        cases: all of them.
        names: name -> category_id, of its card.
        settings: the eval's.
    """
    numbers = sorted({a.category_id for case in cases for a in case.annotations})
    present = {a.category_id for case in cases for a in case.annotations if not a.iscrowd}
    named = name_categories(settings, names, present)
    return Categories(
        numbers=tuple(numbers),
        known=frozenset(numbers) | frozenset(names.values()),
        buckets={name: numbers.index(number) for name, number in named.items()},
    )


def judge_results(
    case: DetectionCase,
    results: Any,
    *,
    is_finite: bool,
    settings: DetectionEval,
    categories: Categories,
    is_reference: bool,
) -> tuple[str, dict[str, float]]:
    """Return the output and the scores of a record.

    Args:
        case: one picture.
        results: what the adapter made of it, a list of COCO results.
        is_finite: whether all raw outputs of this picture are.
        settings: the eval's.
        categories: of the whole evalset.
        is_reference: whether the reference found them, whose boxes tell whether the adapter gives them as it should.

    Raises:
        EngineError: not COCO results, or a box of the reference has a side below 0.
    """
    read = [_read_result(case.id, result, is_reference) for result in _as_list(case.id, results)]
    sound = [r for r in read if all(map(math.isfinite, (*r["bbox"], r["score"]))) and min(r["bbox"][2:]) >= 0]
    output = canonical_json(sound)
    scores = score_image(match_output(case, output, settings=settings, categories=categories))
    scores[UNKNOWN] = float(sum(r["category_id"] not in categories.known for r in read))
    return output, scores | {"finite": float(is_finite and len(sound) == len(read))}


def match_output(case: DetectionCase, output: str, *, settings: DetectionEval, categories: Categories) -> MatchTable:
    """Match the results that a record holds with what is on its picture."""
    places = {category: number for number, category in enumerate(categories.numbers)}
    results = [r for r in json.loads(output) if r["category_id"] in places]
    detections = Detections(
        np.array([r["bbox"] for r in results], dtype=np.float64).reshape(-1, 4),
        np.array([places[r["category_id"]] for r in results], dtype=np.int64),
        np.array([r["score"] for r in results], dtype=np.float64),
    )
    marked = case.annotations
    there = Objects(
        np.array([a.bbox for a in marked], dtype=np.float64).reshape(-1, 4),
        np.array([places[a.category_id] for a in marked], dtype=np.int64),
        np.array([a.area for a in marked], dtype=np.float64),
        np.array([a.iscrowd for a in marked], dtype=bool),
    )
    return match_image(
        there, detections, num_classes=len(places), areas=settings.all_areas, categories=categories.buckets
    )


def save_tables(
    path: Path,
    cases: Sequence[DetectionCase],
    records: Sequence[CaseRecord],
    settings: DetectionEval,
    categories: Categories,
) -> None:
    """Write the matched detections of all records."""
    save_matches(
        path,
        join_tables(
            [
                match_output(case, record.output, settings=settings, categories=categories)
                for case, record in zip(cases, records, strict=True)
            ]
        ),
    )


def _as_list(case_id: str, results: Any) -> list[Any]:
    if not isinstance(results, list):
        raise EngineError(
            f"case {case_id!r}: postprocess() returned {type(results).__name__!r} for a picture, "
            "expected a list of COCO results; correct the adapter"
        )
    return results


def _read_result(case_id: str, result: Any, is_reference: bool) -> dict[str, Any]:
    """Return a result as JSON; nine digits hold a float32 exactly."""
    try:
        bbox = [_read_number(side) for side in result["bbox"]]
        read = {
            "bbox": bbox,
            "score": _read_number(result["score"]),
            "category_id": _read_category(result["category_id"]),
        }
        is_mistaken = is_reference and all(map(math.isfinite, bbox)) and min(bbox[2:], default=0) < 0
        if isinstance(result["bbox"], (Mapping, Set, *_BYTES)) or len(bbox) != 4 or is_mistaken:
            raise ValueError("a box has left, top, width and height, the last two 0 or more")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(
            f"case {case_id!r}: postprocess() returned {str(result)[:120]!r}, expected a COCO result "
            f"with bbox, score and category_id ({' '.join(str(error).split())}); correct the adapter"
        ) from None
    return read


def _read_number(value: Any) -> float:
    if isinstance(value, (str, *_BYTES)) or _is_boolean(value):
        raise TypeError(f"expected a number, got {value!r}")
    return float(f"{float(value):.9g}")


def _read_category(value: Any) -> int:
    try:
        if _is_boolean(value):
            raise TypeError
        number = operator.index(value)  # of a tensor or of numpy, too; a float has none
    except TypeError:
        raise TypeError(f"category_id is a whole number, got {value!r}") from None
    if not 0 <= number <= _LARGEST_CATEGORY:
        raise ValueError(f"category_id is 0 or more and below 2^31, got {number}")
    return number


def _is_boolean(value: Any) -> bool:
    """Say whether a value is True or False, which count as 1 and 0; of a tensor or of numpy, too."""
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
