"""Images with boxes and two-sided detections of them, made up from a seed: no detector, no pixels.

Boxes are real ones, in pixels of a 640 x 480 image, so that matching is part of what a test sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from pipeline.products.text.findings import TextAuditor
from pipeline.products.text.settings import TextEval, TextProduct
from pipeline.products.vision.detection_settings import DetectionEval
from pipeline.products.vision.findings import VisionAuditor
from pipeline.records.detections import (
    Detections,
    MatchTable,
    Objects,
    join_tables,
    match_image,
    save_matches,
    score_image,
)
from pipeline.records.digests import digest_file, digest_text
from pipeline.records.evaluations import Candidate, CaseRecord, EvalFile, Evaluation
from pipeline.records.record_files import write_cases, write_record
from pipeline.records.verdicts import Comparison
from pipeline.settings.base import Product
from pipeline.settings.metrics import AREAS
from tests.fakes.synthetic_records import make_candidate, make_params, write_canary, write_candidate

NUM_CLASSES, RARE = 3, 2
SIZE = np.array([640.0, 480.0])


@dataclass(frozen=True)
class Detector:
    """How well a made-up detector sees.

    Attributes:
        miss: chance that an object is not found.
        miss_small: the same for objects below 32^2 square pixels.
        blind: chance that it finds nothing on an image.
        shift: standard deviation of a box's place and size, as a fraction of its sides.
        false_alarms: mean number per image.
        digits: scores are rounded to these, so that there are ties; None leaves them.
    """

    miss: float = 0.1
    miss_small: float = 0.3
    blind: float = 0.0
    shift: float = 0.06
    false_alarms: float = 3.0
    digits: int | None = None


_DETECTOR = Detector()


class ShelvesEval(DetectionEval, TextEval):
    """Detections with the traits of a text eval, as they go through the gate of a text product here."""


# a product's own buckets beside COCO's; nothing is as small as a speck
EVAL = ShelvesEval(
    kind="detection",
    evalset="evalsets/shelves",
    areas={"price_tags": [0.0, 24.0**2], "specks": [0.0, 4.0]},
    categories={"bottles": RARE},
)


def make_objects(rng: np.random.Generator, *, mean: float = 5.0, crowds: float = 0.0) -> Objects:
    """Return an image's objects: as many as a Poisson draw says, of all sizes, some of them crowds."""
    num = int(rng.poisson(mean))
    sides = np.exp(rng.uniform(np.log(8), np.log(250), (num, 1))) * np.exp(rng.normal(0, 0.2, (num, 2)))
    boxes = np.concatenate([rng.uniform(0, 1, (num, 2)) * (SIZE - 20), sides], axis=1)
    classes = rng.choice(NUM_CLASSES, num, p=(0.6, 0.3, 0.1))
    return Objects(boxes, classes, sides.prod(axis=1) * rng.uniform(0.6, 1, num), rng.random(num) < crowds)


def detect(objects: Objects, detector: Detector, rng: np.random.Generator) -> Detections:
    """Return what a detector says of an image."""
    is_small = objects.areas < AREAS["small"][1]
    is_found = rng.random(len(is_small)) >= np.where(is_small, detector.miss_small, detector.miss)
    is_found &= rng.random() >= detector.blind
    found = objects.boxes[is_found] * 1.0
    sides = found[:, 2:].copy()
    found[:, :2] += rng.normal(0, detector.shift, sides.shape) * sides
    found[:, 2:] *= np.exp(rng.normal(0, detector.shift, sides.shape))
    num = int(rng.poisson(detector.false_alarms))
    wrong = np.concatenate([rng.uniform(0, 1, (num, 2)) * (SIZE - 20), np.exp(rng.uniform(2, 5.5, (num, 2)))], axis=1)
    scores = np.concatenate([rng.beta(5, 2, len(found)), rng.beta(2, 5, num)])
    scores = scores if detector.digits is None else scores.round(detector.digits)
    classes = np.concatenate([objects.classes[is_found], rng.choice(NUM_CLASSES, num)])
    return Detections(np.concatenate([found, wrong]), classes.astype(np.int64), scores)


def match_all(
    objects: list[Objects], detections: list[Detections], areas: dict[str, tuple[float, float]] = AREAS
) -> MatchTable:
    """Match every image."""
    return join_tables(
        [match_image(o, d, num_classes=NUM_CLASSES, areas=areas) for o, d in zip(objects, detections, strict=True)]
    )


@dataclass(frozen=True)
class Change:
    """How another detector differs from one whose detections are known.

    Attributes:
        score: standard deviation that is added to scores.
        box: standard deviation of a box's place and size, as a fraction of its sides.
        drop: chance that a detection is gone.
        drop_small: the same for boxes below 32^2 square pixels.
        blind: chance that all of an image's are.
        drop_rare: the same as `drop` for the class that is rare.
    """

    score: float = 0.005
    box: float = 0.005
    drop: float = 0.0
    drop_small: float = 0.0
    blind: float = 0.0
    drop_rare: float = 0.0


def change(detections: Detections, by: Change, rng: np.random.Generator) -> Detections:
    """Return what a slightly different detector says of the same image."""
    num, is_small = len(detections.scores), detections.boxes[:, 2:].prod(axis=1) < AREAS["small"][1]
    is_kept = rng.random(num) >= np.where(is_small, max(by.drop, by.drop_small), by.drop)
    is_kept &= rng.random() >= by.blind
    if by.drop_rare:
        is_kept &= (detections.classes != RARE) | (rng.random(num) >= by.drop_rare)
    boxes = detections.boxes + rng.normal(0, by.box, (num, 4)) * detections.boxes[:, [2, 3, 2, 3]]
    boxes[:, 2:] = np.abs(boxes[:, 2:])
    scores = detections.scores + rng.normal(0, by.score, num)
    return Detections(boxes[is_kept], detections.classes[is_kept], scores[is_kept])


def make_pair(
    num_images: int,
    by: Change,
    *,
    seed: int = 0,
    detector: Detector = _DETECTOR,
    mean: float = 5.0,
    areas: dict[str, tuple[float, float]] = AREAS,
) -> tuple[MatchTable, MatchTable]:
    """Return the tables of a detector and of a changed one on the same images."""
    rng = np.random.default_rng(seed)
    objects = [make_objects(rng, mean=mean) for _ in range(num_images)]
    detections = [detect(o, detector, rng) for o in objects]
    return match_all(objects, detections, areas), match_all(objects, [change(d, by, rng) for d in detections], areas)


class DetectorParams(TextProduct):
    """Settings of a release of detectors, through the same gate as text."""

    evals: dict[str, ShelvesEval] = Field(min_length=1)  # type: ignore[assignment]  # a kind that no text has


class DetectorAuditor(TextAuditor):
    """What the gate asks of them: as of text, and what an average hides as of a detector."""

    def list_headlines(self, name: str, comparisons: Sequence[Comparison], product: Product) -> list[str]:
        return VisionAuditor().list_headlines(name, comparisons, product)


def make_detector_params(candidates: list[str], tolerances: dict[str, dict[str, object]]) -> DetectorParams:
    """Return settings that release all candidates and judge them on `shelves`."""
    data = make_params(candidates, candidates).model_dump()
    gate = data["gate"] | {"tolerances": tolerances, "tripwires": {}}
    return DetectorParams.model_validate(data | {"evals": {"shelves": EVAL.model_dump()}, "gate": gate})


def write_detector_tree(
    build: Path, changes: dict[str, Change], *, num_images: int = 200, seed: int = 0, buckets: tuple[str, ...] = ()
) -> None:
    """Write what the evaluation of a reference and of changed detectors leaves; every other image has `buckets`."""
    rng = np.random.default_rng(seed)
    objects = [make_objects(rng) for _ in range(num_images)]
    detections = [detect(o, _DETECTOR, rng) for o in objects]
    for name in ("reference", *changes):
        found = detections if name == "reference" else [change(d, changes[name], rng) for d in detections]
        candidate = make_candidate(name)
        write_candidate(build, candidate)
        folder = build / "evaluations" / name
        tables = [
            match_image(o, d, num_classes=NUM_CLASSES, areas=EVAL.all_areas, categories=EVAL.categories)
            for o, d in zip(objects, found, strict=True)
        ]
        save_matches(folder / "shelves.npz", join_tables(tables))
        write_cases(
            folder / "shelves.jsonl",
            [
                CaseRecord(
                    case_id=f"shelf-{i:03d}",
                    input_digest=digest_text(str(i)),
                    cluster=f"shop-{i // 2}",
                    prompt="",
                    buckets=buckets if i % 2 else (),
                    output=f"{len(table.scores)} boxes",
                    scores=score_image(table) | {"finite": 1.0},
                    fingerprint=candidate.fingerprint,
                )
                for i, table in enumerate(tables)
            ],
        )
        write_record(folder / "evaluation.json", _index(folder, candidate, num_images))


def _index(folder: Path, candidate: Candidate, num_images: int) -> Evaluation:
    file = EvalFile(
        kind="detection",
        settings=EVAL.model_dump(mode="json"),
        key=digest_text("detection"),
        evalset_digest=digest_text("shelves"),
        num_cases=num_images,
        records="shelves.jsonl",
        sha256=digest_file(folder / "shelves.jsonl"),
        arrays_sha256=digest_file(folder / "shelves.npz"),
    )
    return Evaluation(
        candidate=candidate.name,
        fingerprint=candidate.fingerprint,
        serving=candidate.serving,
        checkpoint_digest=candidate.checkpoint.digest,
        evals={"shelves": file},
        served_by=candidate.facts,
        canary=write_canary(folder, {}),
        seconds=1.0,
    )
