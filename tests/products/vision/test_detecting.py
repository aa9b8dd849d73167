"""What is kept of a detector's results is enough to judge them again, and what is no result is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import EngineError
from pipeline.evalsets.cases import Annotation, DetectionCase
from pipeline.products.vision.detecting import (
    Categories,
    build_categories,
    judge_results,
    match_output,
    save_tables,
)
from pipeline.products.vision.detection_settings import DetectionEval
from pipeline.records.detections import Detections, MatchTable, Objects, load_matches, match_image
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import CaseRecord

SETTINGS = DetectionEval(kind="detection", evalset="evalsets/e", areas={"tiny": [0.0, 256.0]})
CATEGORIES = (3, 7)
KNOWN = Categories(numbers=CATEGORIES, buckets={}, known=frozenset(CATEGORIES))
FIELDS = ("offsets", "classes", "scores", "matched", "ignored", "num_objects")


def make_case(number: int, annotations: list[Annotation]) -> DetectionCase:
    return DetectionCase(id=f"c{number}", cluster="c", image="i.png", sha256="0" * 64, annotations=tuple(annotations))


def make_pictures(num: int = 20) -> list[tuple[DetectionCase, list[dict[str, Any]]]]:
    """Return pictures with objects of two categories, and results near them, as numbers of float32."""
    rng, pictures = np.random.default_rng(0), []
    for number in range(num):
        boxes = np.concatenate([rng.uniform(0, 200, (4, 2)), rng.uniform(5, 120, (4, 2))], axis=1)
        marked = [
            Annotation(
                bbox=tuple(box),
                category_id=int(rng.choice(CATEGORIES)),
                area=float(box[2] * box[3]),
                iscrowd=bool(rng.random() < 0.2),
            )
            for box in boxes.tolist()
        ]
        found = (boxes * rng.uniform(0.9, 1.1, boxes.shape)).astype(np.float32)
        results = [
            {"bbox": box.tolist(), "score": float(np.float32(rng.random())), "category_id": a.category_id}
            for box, a in zip(found, marked, strict=True)
        ]
        pictures.append((make_case(number, marked), results))
    return pictures


def match_directly(case: DetectionCase, results: list[dict[str, Any]]) -> MatchTable:
    """Match without JSON in between."""
    places = {category: i for i, category in enumerate(CATEGORIES)}
    return match_image(
        Objects(
            np.array([a.bbox for a in case.annotations]),
            np.array([places[a.category_id] for a in case.annotations]),
            np.array([a.area for a in case.annotations]),
            np.array([a.iscrowd for a in case.annotations]),
        ),
        Detections(
            np.array([r["bbox"] for r in results]),
            np.array([places[r["category_id"]] for r in results]),
            np.array([r["score"] for r in results]),
        ),
        num_classes=2,
        areas=SETTINGS.all_areas,
    )


def judge(
    case: DetectionCase, results: Any, *, is_finite: bool = True, is_reference: bool = True
) -> tuple[str, dict[str, float]]:
    return judge_results(
        case, results, is_finite=is_finite, settings=SETTINGS, categories=KNOWN, is_reference=is_reference
    )


def assert_same(a: MatchTable, b: MatchTable) -> None:
    assert a.areas == b.areas
    for name in FIELDS:
        ours, theirs = getattr(a, name), getattr(b, name)
        if name == "scores":  # nine digits of a float32, read as float64
            ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
        assert np.array_equal(ours, theirs), name


def test_the_output_of_a_record_matches_as_the_results_did() -> None:
    """Were a digit of a float32 lost on the way to JSON, IoUs near a threshold would fall on its other side."""
    for case, results in make_pictures():
        output, scores = judge(case, results)
        table = match_output(case, output, settings=SETTINGS, categories=KNOWN)
        assert_same(table, match_directly(case, results))
        assert scores["objects"] == table.num_objects[0, :, 0].sum() and scores["finite"] == 1
        assert scores.keys() >= {"found", "found_tiny", "objects_tiny", "found_50", "false_alarms"}


def test_nine_digits_hold_any_float32() -> None:
    rng = np.random.default_rng(1)
    numbers = np.concatenate(
        [
            rng.integers(0, 2**31, 2000, dtype=np.uint32).view(np.float32),
            np.array([1e-45, 3.4e38, 16777217], dtype=np.float32),
        ]
    )
    numbers = numbers[np.isfinite(numbers)]
    for number in numbers:
        output, _ = judge(make_case(0, []), [{"bbox": [0, 0, 1, 1], "score": number, "category_id": 3}])
        assert np.float32(json.loads(output)[0]["score"]) == number


def test_tensors_and_numpy_numbers_are_results_too() -> None:
    case = make_case(0, [Annotation(bbox=(0, 0, 8, 8), category_id=3, area=64)])
    plain = judge(case, [{"bbox": [0.5, 0, 8, 8], "score": 0.25, "category_id": 3}])
    assert (
        judge(
            case, [{"bbox": torch.tensor([0.5, 0, 8, 8]), "score": torch.tensor(0.25), "category_id": torch.tensor(3)}]
        )
        == plain
    )
    assert (
        judge(
            case,
            [
                {
                    "bbox": np.array([0.5, 0, 8, 8], np.float32),
                    "score": np.float32(0.25),
                    "category_id": np.int64(3),
                    "name": "more",
                }
            ],
        )
        == plain
    )


def test_a_category_without_annotations_is_left_out_as_coco_does() -> None:
    """Its detections would all be false alarms of a class that has no AP."""
    case = make_case(0, [Annotation(bbox=(0, 0, 8, 8), category_id=3, area=64)])
    mine = {"bbox": [0, 0, 8, 8], "score": 0.5, "category_id": 3}
    output, scores = judge(case, [mine, mine | {"category_id": 99, "score": 0.9}])
    assert len(json.loads(output)) == 2, "what was found is kept"
    assert scores["found"] == 1 and scores["false_alarms"] == 0 and scores["finite"] == 1


def test_categories_are_those_of_the_evalset_in_order() -> None:
    marked = [Annotation(bbox=(0, 0, 1, 1), category_id=number, area=1) for number in (7, 3, 7)]
    cases = [make_case(0, marked[:1]), make_case(1, []), make_case(2, marked)]
    assert build_categories(cases, {}, SETTINGS).numbers == (3, 7)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "bad",
    [
        {"score": NAN},
        {"score": INF},
        {"bbox": [NAN, 0, 1, 1]},
        {"bbox": [0, 0, INF, 1]},
        {"bbox": [0, 0, -1, NAN]},
    ],
)
def test_a_result_that_is_no_number_is_left_out_and_counted(bad: dict[str, Any]) -> None:
    case = make_case(0, [Annotation(bbox=(0, 0, 8, 8), category_id=3, area=64)])
    mine = {"bbox": [0, 0, 8, 8], "score": 0.5, "category_id": 3}
    output, scores = judge(case, [mine | bad, mine])
    assert len(json.loads(output)) == 1
    assert scores["finite"] == 0 and scores["found"] == 1


@pytest.mark.parametrize("sides", [[-0.3, 8], [8, -0.3], [-8, -8]])
def test_a_box_of_a_candidate_with_a_negative_side_is_left_out_and_counted(sides: list[float]) -> None:
    """A damaged candidate had no verdict, and the adapter, with which the reference ran, was to blame."""
    case = make_case(0, [Annotation(bbox=(0, 0, 8, 8), category_id=3, area=64)])
    mine = {"bbox": [0, 0, 8, 8], "score": 0.5, "category_id": 3}
    output, scores = judge(case, [mine | {"bbox": [0, 0, *sides]}, mine], is_reference=False)
    assert len(json.loads(output)) == 1
    assert scores["finite"] == 0 and scores["found"] == 1


def test_raw_outputs_that_are_not_finite_count_though_results_are() -> None:
    assert judge(make_case(0, []), [], is_finite=False)[1]["finite"] == 0


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ({}, "returned 'dict' for a picture, expected a list of COCO results"),
        (None, "returned 'NoneType' for a picture"),
        ([None], "returned 'None', expected a COCO result with bbox, score and category_id"),
        ([{"bbox": [0, 0, 1, 1], "score": 0.5}], "('category_id'); correct the adapter"),
        ([{"bbox": [0, 0, 1], "score": 0.5, "category_id": 1}], "a box has left, top, width and height"),
        ([{"bbox": [0, 0, 1, -1], "score": 0.5, "category_id": 1}], "the last two 0 or more"),
        ([{"bbox": [0, 0, 1, 1], "score": "high", "category_id": 1}], "expected a number, got 'high'"),
        ([{"bbox": [0, 0, 1, 1], "score": 0.5, "category_id": INF}], "category_id is a whole number"),
        ([{"bbox": [0, 0, 1, 1], "score": 0.5, "category_id": 1.7}], "category_id is a whole number"),
        ([{"bbox": [0, 0, 1, 1], "score": 0.5, "category_id": "1"}], "category_id is a whole number"),
        ([{"bbox": [0, 0, 1, 1], "score": 0.5, "category_id": True}], "category_id is a whole number"),
        ([{"bbox": "0011", "score": 0.5, "category_id": 1}], "expected a number, got '0'"),
        ([{"bbox": {0: 5, 1: 5, 2: 5, 3: 5}, "score": 0.5, "category_id": 1}], "a box has left, top, width and height"),
        ([{"bbox": b"0011", "score": 0.5, "category_id": 1}], "a box has left, top, width and height"),
        ([{"bbox": {0, 1, 2, 3}, "score": 0.5, "category_id": 1}], "a box has left, top, width and height"),
        ([{"bbox": [0, 0, 1, 1], "score": True, "category_id": 1}], "expected a number, got True"),
        ([{"bbox": [0, 0, 1, 1], "score": torch.tensor(True), "category_id": 1}], "expected a number, got tensor"),
        ([{"bbox": [0, 0, 1, 1], "score": 0.5, "category_id": torch.tensor(True)}], "category_id is a whole number"),
        ([{"bbox": [0, 0, 1, 1], "score": "0.5", "category_id": 1}], "expected a number, got '0.5'"),
        ([{"bbox": 3, "score": 0.5, "category_id": 1}], "'int' object is not iterable"),
    ],
)
def test_what_is_no_result_is_said_with_its_case(results: Any, said: str) -> None:
    with pytest.raises(EngineError) as caught:
        judge(make_case(4, []), results)
    assert str(caught.value).startswith("case 'c4': postprocess() ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_tables_of_all_records_are_one_file_in_their_order(tmp_path: Path) -> None:
    cases, records, tables = [], [], []
    for case, results in make_pictures(6):
        output, scores = judge(case, results)
        cases.append(case)
        records.append(
            CaseRecord(
                case_id=case.id,
                input_digest=case.digest,
                cluster="c",
                prompt="",
                output=output,
                scores=scores,
                fingerprint="f",
            )
        )
        tables.append(match_directly(case, results))
    path = tmp_path / "e.npz"
    save_tables(path, cases, records, SETTINGS, KNOWN)
    digest = digest_file(path)
    save_tables(path, cases, records, SETTINGS, KNOWN)
    assert digest_file(path) == digest
    whole = load_matches(path, num_images=6)
    for number, table in enumerate(tables):
        assert_same(whole.at(np.array([number])), table)
