"""Writes what stages optimize_network and evaluate_network would of a detector and an upscaler, without running any.

Pictures are of one colour, or noise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pipeline.products.vision.serving import serve
from pipeline.products.vision.settings import VisionProduct
from pipeline.records.detections import Detections, Objects, join_tables, match_image, save_matches, score_image
from pipeline.records.digests import canonical_json, digest_file, digest_text
from pipeline.records.evaluations import (
    BuiltCandidate,
    CaseRecord,
    Checkpoint,
    EvalFile,
    Evaluation,
    Fallback,
    LayerCoverage,
    NetworkCandidate,
)
from pipeline.records.files import write_text
from pipeline.records.record_files import write_cases, write_record
from tests.fakes.synthetic_detections import SIZE, Change, change

REFERENCE = "plain"
GIVEN, FACTOR, TILE = 32, 2, 16  # pixels a side of what is enlarged, by how much, and of a tile
_RATIO = {"median": 0.7, "low": 0.65, "high": 0.75}
_LAYERS = {
    name: {"relative_error": 0.001 * i, "absmax": 1.0, "nonfinite_count": 0, "headroom_bits": 9.0 - i}
    for i, name in enumerate(("stem", "branches.small.0", "head"))
}
NOTES: dict[str, Any] = {
    "layers": _LAYERS,
    "speed": None,
    "total": None,
    "compile": None,
    "layout": None,
    "peak_mib": 8.0,
    "peak_pixels": [GIVEN, GIVEN],
    "work": 1.0,
    "shapes": {"num_shapes": 1, "timed": [1, GIVEN, GIVEN], "num_timed": 60, "num_pictures": 60},
}


@dataclass(frozen=True)
class Way:
    """How a candidate is run, and what comes of it.

    Attributes:
        steps: of params.yaml.
        by: how its detections differ from the reference's.
        seam: grey levels by which an upscaler's picture steps at every stitch.
        notes: what differs from `NOTES`.
        fallbacks: of its record.
        checkpoint: folder of its weights; the reference's are models/net.
    """

    steps: Sequence[dict[str, Any]] = ()
    by: Change = field(default_factory=Change)
    seam: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    fallbacks: Sequence[Fallback] = ()
    checkpoint: str = "models/net"


def time_notes(**ratio: float) -> dict[str, Any]:
    """Return the notes of a candidate that was timed; `ratio` replaces parts of its ratio."""
    clocks = {clock: {"ratio": _RATIO | ratio} for clock in ("cpu", "wall")}
    return {"baseline": "torch float32", "difference": 1e-6, "tolerance": 1e-4, "timed": clocks, "clock": "cpu"}


def compile_notes(**changes: Any) -> dict[str, Any]:
    """Return the notes of a candidate that was compiled into one graph."""
    return {
        "num_graphs": 1,
        "num_graph_breaks": 0,
        "num_recompilations": 0,
        "num_shapes": 1,
        "first_call_s": 1.0,
        "limit": 8,
        "num_over_limit": 0,
        "shape_over_limit": None,
    } | changes


def make_network_product(
    name: str, ways: dict[str, Way], tolerances: dict[str, Any] | None = None, **gate: Any
) -> VisionProduct:
    """Return the settings of a product that releases all candidates."""
    is_detector = name == "detector"
    evals = (
        {"scenes": {"kind": "detection", "evalset": "evalsets/scenes"}}
        if is_detector
        else {"views": {"kind": "upscaling", "evalset": "evalsets/views"}}
    )
    usual = (
        {
            "scenes/ap": {"overall": 0.03},
            "scenes/ap_small": {"overall": 0.05},
            "scenes/finite_output_rate": {"overall": 0.05},
        }
        if is_detector
        else {"views/psnr_db": {"overall": 0.1}, "views/finite_output_rate": {"overall": 0.2}}
    )
    return VisionProduct.model_validate(
        {
            "name": name,
            "kind": "vision",
            "adapter": "models/net.py",
            "reference": REFERENCE,
            "release": list(ways),
            "candidates": {REFERENCE: {"checkpoint": "models/net", "steps": []}}
            | {name: {"checkpoint": way.checkpoint, "steps": list(way.steps)} for name, way in ways.items()},
            "serving": {"batch_size": 1, "num_threads": 1},
            "resources": {"num_workers": 1},
            "evals": evals,
            "gate": {"alpha": 0.05, "on_inconclusive": "block", "tolerances": tolerances or usual, **gate},
        }
    )


def write_detector(
    root: Path,
    product: VisionProduct,
    ways: dict[str, Way],
    *,
    num_images: int = 60,
    objects: Sequence[Objects] | None = None,
    case_id: str = "scene-{i}",
) -> Path:
    """Write a detector's tree and its pictures; returns the folder of its results.

    Args:
        root: the folder that holds pictures and results.
        product: of `make_network_product`.
        ways: by candidate.
        num_images: with objects of all sizes, where they are not given.
        objects: of each image.
        case_id: names the cases; `{i}` is their number.
    """
    rng = np.random.default_rng(0)
    objects = objects or [make_people(rng, num_large=3, num_small=2) for _ in range(num_images)]
    found = [Detections(o.boxes, o.classes, rng.uniform(0.5, 1, len(o.areas))) for o in objects]
    pictures = _write_pictures(root, len(objects), (480, 640))
    for name, way in {REFERENCE: Way(), **ways}.items():
        candidate, folder = _write_candidate(root / "build", product, name, way)
        theirs = found if name == REFERENCE else [change(d, way.by, rng) for d in found]
        tables = [match_image(o, d, num_classes=1) for o, d in zip(objects, theirs, strict=True)]
        save_matches(folder / "scenes.npz", join_tables(tables))
        _write_evaluation(
            folder,
            candidate,
            product,
            way,
            [
                CaseRecord(
                    case_id=case_id.format(i=i),
                    input_digest=digest_text(str(i)),
                    cluster=str(i),
                    prompt=str(pictures[i]),
                    output=_write_results(theirs[i]),
                    scores=score_image(tables[i]) | {"finite": 1.0},
                    fingerprint=candidate.fingerprint,
                )
                for i in range(len(objects))
            ],
        )
    return root / "build"


def make_people(rng: np.random.Generator, *, num_large: int, num_small: int) -> Objects:
    """Return so many objects of over 96 and of under 32 pixels a side."""
    sides = np.concatenate([rng.uniform(100, 200, (num_large, 2)), rng.uniform(10, 28, (num_small, 2))])
    boxes = np.concatenate([rng.uniform(0, 1, sides.shape) * (SIZE - 20), sides], axis=1)
    return Objects(boxes, np.zeros(len(sides), dtype=np.int64), sides.prod(axis=1), np.zeros(len(sides), dtype=bool))


def write_upscaler(
    root: Path, product: VisionProduct, ways: dict[str, Way], *, num_images: int = 40, case_id: str = "view-{i}"
) -> Path:
    """Write an upscaler's tree and its pictures as `write_detector` does."""
    pictures, rng = _write_pictures(root, num_images, (GIVEN, GIVEN)), np.random.default_rng(1)
    plain = [rng.integers(90, 160, (GIVEN * FACTOR, GIVEN * FACTOR, 3), dtype=np.uint8) for _ in range(num_images)]
    for name, way in {REFERENCE: Way(), **ways}.items():
        candidate, folder = _write_candidate(root / "build", product, name, way)
        records = []
        for i, picture in enumerate(plain):
            seam = way.seam * (1 + (i == 7))  # one is the worst
            own = np.clip(picture + (np.arange(GIVEN * FACTOR) >= TILE * FACTOR)[:, None] * seam, 0, 255)
            path = folder / "views" / f"{case_id.format(i=i)}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(own.astype(np.uint8)).save(path)
            digest = hashlib.sha256(own.astype(np.uint8).transpose(2, 0, 1).tobytes()).hexdigest()
            records.append(
                CaseRecord(
                    case_id=case_id.format(i=i),
                    input_digest=digest_text(str(i)),
                    cluster=str(i),
                    prompt=str(pictures[i]),
                    output=digest,
                    fingerprint=candidate.fingerprint,
                    scores={
                        "finite": 1.0,
                        "psnr_db": 37 + 0.01 * (i % 5) - 0.1 * seam,
                        "ssim": 0.9,
                        "seam_levels": seam,
                        "worst_seam_levels": seam,
                    },
                )
            )
        _write_evaluation(folder, candidate, product, way, records)
    return root / "build"


def _write_pictures(root: Path, num: int, size: tuple[int, int]) -> list[Path]:
    paths = [root / "pictures" / f"{i}.png" for i in range(num)]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for i, path in enumerate(paths):
        Image.fromarray(np.full((*size, 3), 60 + i % 100, dtype=np.uint8)).save(path)
    return paths


def _write_results(found: Detections) -> str:
    return canonical_json(
        [
            {"bbox": box.tolist(), "score": float(score), "category_id": 1}
            for box, score in zip(found.boxes, found.scores, strict=True)
        ]
    )


def _write_candidate(build: Path, product: VisionProduct, name: str, way: Way) -> tuple[NetworkCandidate, Path]:
    steps, coverage = [], []
    for step in (s.model_dump(mode="json") for s in product.candidates[name].steps):
        known: dict[str, dict[str, Any]] = {
            "tiling": {"tiling": {key: step.get(key) for key in ("tile", "overlap", "window")}},
            "compile": {"compile_mode": step.get("mode")},
            "precision": {"dtype": step.get("dtype")},
            "channels_last": {"channels_last": True},
        }
        changes = known.get(step["kind"], {})
        if step["kind"] == "conv_policy":
            given = {"algorithm": step["algorithm"], "dtype": step["dtype"]}
            coverage = [
                LayerCoverage(layer=layer, format=" ".join(given.values()), num_bytes=4, asked=True)
                for layer in _LAYERS
            ]
            changes = {"conv_policy": dict.fromkeys(_LAYERS, given)}
        steps.append(step | {"serving": changes})
    built = BuiltCandidate(
        name=name,
        steps=tuple(steps),
        coverage=tuple(coverage),
        fallbacks=tuple(way.fallbacks),
        checkpoint=Checkpoint(
            path=way.checkpoint,
            kind=product.name,
            format="dense",
            dtype="float32",
            num_parameters=1,
            num_bytes=4,
            digest=digest_text(way.checkpoint),
        ),
    )
    write_record(build / "candidates" / name / "candidate.json", built)
    folder = build / "evaluations" / name
    folder.mkdir(parents=True, exist_ok=True)
    return serve(built, product), folder


def _write_evaluation(
    folder: Path, candidate: NetworkCandidate, product: VisionProduct, way: Way, records: list[CaseRecord]
) -> None:
    ((name, settings),) = product.evals.items()
    write_cases(folder / f"{name}.jsonl", records)
    write_text(folder / f"{name}.json", json.dumps(NOTES | way.notes))
    arrays = folder / f"{name}.npz"
    file = EvalFile(
        kind=settings.kind,
        settings=settings.model_dump(mode="json"),
        key="k",
        evalset_digest="e",
        num_cases=len(records),
        records=f"{name}.jsonl",
        sha256=digest_file(folder / f"{name}.jsonl"),
        arrays_sha256=digest_file(arrays) if arrays.is_file() else None,
        notes_sha256=digest_file(folder / f"{name}.json"),
    )
    write_record(
        folder / "evaluation.json",
        Evaluation(
            candidate=candidate.name,
            fingerprint=candidate.fingerprint,
            checkpoint_digest=candidate.checkpoint.digest,
            serving=candidate.serving,
            evals={name: file},
            served_by=candidate.facts,
            seconds=1.0,
        ),
    )
