"""A detector of many categories, evaluated as stage evaluate_network would: its results are matched by the same code.

500 pictures with 734 objects of 80 categories, 201 of which are people: COCO's shape. One of 80 is 1/80 of AP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.evalsets.cases import Annotation, DetectionCase
from pipeline.products.vision.detecting import build_categories, judge_results, save_tables
from pipeline.products.vision.detection_settings import DetectionEval
from pipeline.records.digests import digest_file, digest_text
from pipeline.records.evaluations import CaseRecord, EvalFile, Evaluation
from pipeline.records.record_files import write_cases, write_record
from tests.fakes.synthetic_records import make_candidate, write_canary, write_candidate

NUM_PICTURES, NUM_OBJECTS, NUM_PEOPLE, NUM_CATEGORIES = 500, 734, 201, 80
PERSON = 1
NAMES = {"person": PERSON} | {f"thing {number}": number for number in range(2, NUM_CATEGORIES + 1)}

Results = list[dict[str, Any]]
Edit = Callable[[Results], Results]


def lose(category: int) -> Edit:
    """Return a detector's change that finds nothing of a category."""
    return lambda results: [r for r in results if r["category_id"] != category]


def make_cases(rng: np.random.Generator, num_categories: int = NUM_CATEGORIES) -> list[DetectionCase]:
    """Return the pictures: every category is there, the others are about as many of each."""
    others = np.resize(np.arange(2, num_categories + 1), NUM_OBJECTS - NUM_PEOPLE)
    places = rng.integers(0, NUM_PICTURES, NUM_OBJECTS)
    found: list[list[Annotation]] = [[] for _ in range(NUM_PICTURES)]
    for number, place in zip([PERSON] * NUM_PEOPLE + others.tolist(), places.tolist(), strict=True):
        left, top, side = rng.uniform(0, 400), rng.uniform(0, 300), rng.uniform(20, 120)
        found[place].append(Annotation(bbox=(left, top, side, side), category_id=int(number), area=side * side))
    return [
        DetectionCase(
            id=f"p{i}", cluster=f"p{i}", image=f"{i}.png", sha256=digest_text(str(i)), annotations=tuple(marked)
        )
        for i, marked in enumerate(found)
    ]


def detect(case: DetectionCase, rng: np.random.Generator) -> Results:
    """Return what the reference finds: about two thirds of what is there, and a false alarm here and there."""
    found = [
        {"bbox": [float(x) for x in a.bbox], "score": float(rng.uniform(0.4, 1)), "category_id": a.category_id}
        for a in case.annotations
        if rng.random() < 0.7
    ]
    wrong = (
        [
            {
                "bbox": [1.0, 1.0, 30.0, 30.0],
                "score": float(rng.uniform(0.1, 0.5)),
                "category_id": int(rng.integers(1, NUM_CATEGORIES + 1)),
            }
        ]
        if rng.random() < 0.1
        else []
    )
    return found + wrong


def write_categories_tree(
    build: Path,
    changes: Mapping[str, Edit],
    settings: DetectionEval,
    *,
    names: Mapping[str, int] = NAMES,
    cases: Sequence[DetectionCase] | None = None,
) -> None:
    """Write what the evaluation of a reference and of changed detectors leaves, as of eval `shelves`."""
    rng = np.random.default_rng(5)
    cases = cases or make_cases(rng)
    found = [detect(case, rng) for case in cases]
    categories = build_categories(cases, names, settings)
    for name in ("reference", *changes):
        candidate, folder = make_candidate(name), build / "evaluations" / name
        write_candidate(build, candidate)
        folder.mkdir(parents=True, exist_ok=True)
        edit = changes.get(name, lambda results: results)
        records = []
        for case, results in zip(cases, found, strict=True):
            output, scores = judge_results(
                case,
                edit(results),
                is_finite=True,
                settings=settings,
                categories=categories,
                is_reference=name == "reference",
            )
            records.append(
                CaseRecord(
                    case_id=case.id,
                    input_digest=case.digest,
                    cluster=case.cluster,
                    prompt="",
                    output=output,
                    scores=scores,
                    fingerprint=candidate.fingerprint,
                )
            )
        write_cases(folder / "shelves.jsonl", records)
        save_tables(folder / "shelves.npz", cases, records, settings, categories)
        file = EvalFile(
            kind="detection",
            settings=settings.model_dump(mode="json"),
            key=digest_text("detection"),
            evalset_digest=digest_text("shelves"),
            num_cases=len(cases),
            records="shelves.jsonl",
            sha256=digest_file(folder / "shelves.jsonl"),
            arrays_sha256=digest_file(folder / "shelves.npz"),
        )
        write_record(
            folder / "evaluation.json",
            Evaluation(
                candidate=name,
                fingerprint=candidate.fingerprint,
                serving=candidate.serving,
                checkpoint_digest=candidate.checkpoint.digest,
                evals={"shelves": file},
                served_by=candidate.facts,
                canary=write_canary(folder, {}),
                seconds=1.0,
            ),
        )
