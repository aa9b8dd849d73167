"""Matching and average precision against COCO's own evaluation, pycocotools, and against lists with repetitions."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faster_coco_eval import COCO as FastCoco
from faster_coco_eval import COCOeval_faster
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from pipeline.errors import EvidenceError, NumericsError
from pipeline.numerics.average_precision import average_precision, coco_numbers
from pipeline.records.detections import Detections, Objects, load_matches, match_image, save_matches
from pipeline.settings.metrics import AREAS
from tests.fakes.synthetic_detections import NUM_CLASSES, Detector, detect, make_objects, match_all

TINY = {**AREAS, "tiny": (0.0, 20.0**2), "shelf labels": (20.0**2, 64.0**2)}
NOTHING = Detections(np.zeros((0, 4)), np.zeros(0, dtype=np.int64), np.zeros(0))


def describe(objects: list[Objects], detections: list[Detections]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return COCO's dataset and list of results."""
    annotations = [
        {
            "image_id": i,
            "category_id": int(o.classes[j]),
            "bbox": o.boxes[j].tolist(),
            "area": float(o.areas[j]),
            "iscrowd": int(o.is_crowd[j]),
        }
        for i, o in enumerate(objects)
        for j in range(len(o.boxes))
    ]
    results = [
        {"image_id": i, "category_id": int(d.classes[j]), "bbox": d.boxes[j].tolist(), "score": float(d.scores[j])}
        for i, d in enumerate(detections)
        for j in range(len(d.scores))
    ]
    return {
        "images": [{"id": i} for i in range(len(objects))],
        "categories": [{"id": k} for k in range(NUM_CLASSES)],
        # an id of 0 would read as "not matched"
        "annotations": [{"id": i + 1, **annotation} for i, annotation in enumerate(annotations)],
    }, results


def evaluate(
    objects: list[Objects],
    detections: list[Detections],
    areas: dict[str, tuple[float, float]] = AREAS,
    library: tuple[Any, Any] = (COCO, COCOeval),
) -> Any:
    """Return the evaluation of a library after `accumulate`."""
    make, judge = library
    dataset, results = describe(objects, detections)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = make()
        truth.dataset = dataset
        truth.createIndex()
        found = truth.loadRes(results) if results else make()
        evaluation = judge(truth, found, "bbox")
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [list(a) for a in areas.values()], list(areas)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def make_set(name: str) -> tuple[list[Objects], list[Detections]]:
    """Return a named set of objects and detections."""
    rng = np.random.default_rng(sorted(SETS).index(name))
    options, detector = SETS[name]
    objects = [make_objects(rng, **options) for _ in range(40)]
    detections = [detect(o, detector, rng) for o in objects]
    if name == "perfect":
        detections = [Detections(o.boxes, o.classes, np.ones(len(o.boxes))) for o in objects]
    if name == "no-detection":
        detections = [NOTHING] * 40
    if name == "on-the-bounds":
        sides = np.array([32.0, 96.0])[rng.integers(0, 2, 40)]
        objects = [
            Objects(np.array([[10.0, 10.0, s, s]]), np.zeros(1, int), np.array([s * s]), np.zeros(1, bool))
            for s in sides
        ]
        detections = [
            Detections(np.array([[10.0, 10.0, s, s * 0.9], [300, 300, s, s]]), np.zeros(2, int), np.array([0.5, 0.6]))
            for s in sides
        ]
    if name == "between-two":  # equally far from both; only one choice leaves an object for the second detection
        pair = np.array([[0.0, 0, 10, 10], [4, 0, 10, 10]])
        objects = [Objects(pair[::step], np.zeros(2, int), np.full(2, 100.0), np.zeros(2, bool)) for step in (1, -1, 1)]
        detections = [
            Detections(np.array([[2.0, 0, 10, 10], [0, 0, 10, 10]]), np.zeros(2, int), np.array([0.9, 0.8]) - i / 100)
            for i in range(3)
        ]
    return objects, detections


SETS = {
    "perfect": ({}, Detector()),
    "noisy": ({}, Detector()),
    "empty-images": ({"mean": 0.7}, Detector(blind=0.3, false_alarms=0.5)),
    "crowds": ({"mean": 8.0, "crowds": 0.3}, Detector(false_alarms=6)),
    "ties": ({}, Detector(digits=1)),
    "equal-scores": ({"crowds": 0.1}, Detector(digits=0)),
    "more-than-100": ({"mean": 40.0}, Detector(false_alarms=250, digits=2)),
    "no-detection": ({}, Detector()),
    "on-the-bounds": ({}, Detector()),
    "between-two": ({}, Detector()),
}


@pytest.mark.parametrize("name", SETS)
def test_all_twelve_numbers_are_those_of_pycocotools(name: str) -> None:
    """Catches: a bound that is open at one end, an unmatched box outside of the bucket that counts as a false alarm,
    a crowd that is taken once, the first of equal IoUs, 100 detections per image and not per class, unstable ties."""
    objects, detections = make_set(name)
    numbers = np.array(list(coco_numbers(match_all(objects, detections)).values()))
    expected = evaluate(objects, detections).stats
    assert np.abs(np.nan_to_num(numbers, nan=-1) - expected).max() < 1e-12
    assert len(expected) == 12


@pytest.mark.parametrize("library", [(COCO, COCOeval), (FastCoco, COCOeval_faster)], ids=["pycocotools", "faster"])
def test_own_buckets_are_matched_like_cocos(library: tuple[Any, Any]) -> None:
    objects, detections = make_set("crowds")
    precision = evaluate(objects, detections, TINY, library).eval["precision"][..., -1]  # [T, R, K, A]
    mine = average_precision(match_all(objects, detections, TINY))[0]
    for area, t in np.ndindex(len(TINY), 10):
        expected = precision[t, :, :, area]
        assert mine[area, t] == pytest.approx(expected[expected > -1].mean(), abs=1e-12)


@pytest.mark.parametrize("name", ["crowds", "more-than-100", "empty-images"])
def test_the_table_of_a_class_has_cocos_numbers_of_that_category(name: str) -> None:
    """Catches detections of the image before or after, and a mean over classes that aren't there."""
    objects, detections = make_set(name)
    precision = evaluate(objects, detections).eval["precision"][..., -1]  # [T, R, K, A]
    table = match_all(objects, detections)
    for k in range(NUM_CLASSES):
        mine = average_precision(table.of_class(k))[0]
        for area, t in np.ndindex(len(AREAS), 10):
            expected = precision[t, :, k, area].mean()
            assert np.nan_to_num(mine[area, t], nan=-1) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["noisy", "crowds", "empty-images"])
def test_a_weight_is_a_repetition(name: str) -> None:
    """Catches: precision read before all copies of a hit are in, objects that are not weighted, weights of another
    order than the ranking's."""
    table = match_all(*make_set(name))
    counts = np.random.default_rng(0).multinomial(40, np.ones(40) / 40, size=5)
    weighted = average_precision(table, counts.astype(float))
    for resample, count in zip(weighted, counts, strict=True):
        repeated = average_precision(table.at(np.repeat(np.arange(40), count)))[0]
        assert np.allclose(resample, repeated, rtol=0, atol=1e-12, equal_nan=True)


def test_an_empty_bucket_is_nan_and_never_minus_one() -> None:
    objects, detections = make_set("noisy")
    is_large = [o.areas >= AREAS["large"][0] for o in objects]
    rest = [
        Objects(o.boxes[~b], o.classes[~b], o.areas[~b], o.is_crowd[~b]) for o, b in zip(objects, is_large, strict=True)
    ]
    numbers = coco_numbers(match_all(rest, detections))
    assert np.isnan([numbers["ap_large"], numbers["ar_large"]]).all() and numbers["ap_small"] > 0


@pytest.mark.parametrize(
    "change",
    [
        {"scores": np.array([np.nan])},
        {"boxes": np.array([[0.0, 0, -1, 4]])},
        {"boxes": np.array([[0.0, np.inf, 1, 4]])},
        {"classes": np.array([NUM_CLASSES])},
    ],
)
def test_a_detector_that_says_nonsense_is_refused(change: dict[str, NDArray[Any]]) -> None:
    """NaN would sort to some place of the ranking and count."""
    said = Detections(np.array([[0.0, 0, 4, 4]]), np.zeros(1, int), np.ones(1))
    objects = Objects(said.boxes, said.classes, np.array([16.0]), np.zeros(1, bool))
    assert match_image(objects, said, num_classes=NUM_CLASSES).matched[0, 0] == 0b1111111111
    with pytest.raises(NumericsError, match="detection 0: expected finite numbers"):
        match_image(objects, replace(said, **change), num_classes=NUM_CLASSES)


def test_a_table_survives_its_file_and_the_file_follows_from_it(tmp_path: Path) -> None:
    table = replace(match_all(*make_set("crowds"), TINY), categories={"bottles": 2})
    for name in ("a.npz", "b.npz"):
        save_matches(tmp_path / name, table)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    read = load_matches(tmp_path / "a.npz", num_images=40)
    assert read.areas == table.areas and read.categories == table.categories
    assert coco_numbers(read) == coco_numbers(table)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-30], lambda data: b"no archive", lambda data: b""], ids=["cut", "text", "empty"]
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    save_matches(tmp_path / "a.npz", match_all(*make_set("noisy")))
    with pytest.raises(EvidenceError, match="expected finite detections of 41 images"):
        load_matches(tmp_path / "a.npz", num_images=41)
    (tmp_path / "a.npz").write_bytes(damage((tmp_path / "a.npz").read_bytes()))
    with pytest.raises(EvidenceError, match="a.npz: not a file of matched detections"):
        load_matches(tmp_path / "a.npz", num_images=40)
