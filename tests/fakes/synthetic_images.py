"""Writes the records and images that stages optimize_images and evaluate_images would, without rendering any.

Every candidate has images of its own with noise, so that an exchanged one shows. Scores are the reference's plus what a
behaviour asks for; the case that a candidate is worst in is `worst`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pipeline.products.images.serving import serve
from pipeline.products.images.settings import ImagesProduct
from pipeline.records.digests import digest_file, digest_text
from pipeline.records.evaluations import BuiltCandidate, CaseRecord, Checkpoint, EvalFile, Evaluation, ImageCandidate
from pipeline.records.files import write_text
from pipeline.records.record_files import write_cases, write_record

NUM_CASES = 40
SIDE = 8  # pixels
_SOUND = {
    "sound": 1.0,
    "saturated": 0.02,
    "std_ratio": 1.5,
    "clip": 0.9,
    "seam_levels": 0.0,
    "ssim": 1.0,
    "psnr_db": 100.0,
    "clipped": 0.0,
    "nonfinite": 0.0,
    "black": 0.0,
    "latents_out_of_range": 0.0,
    "oversaturated": 0.0,
}
_DECODER = {
    "": {"absmax": 9.0, "headroom_bits": 12.0, "headroom_bits_float16": 12.0, "nonfinite_count": 0},
    "up.0": {"absmax": 9.0, "headroom_bits": 3.0, "headroom_bits_float16": 0.5, "nonfinite_count": 0},
}

_NOTES = {
    "denoise_ms_per_image": 1.0,
    "num_taken": 0,
    "latents_differ": False,
    "step_ms_per_image": 1.0,
    "decode_ms_per_image": 1.0,
    "decode_to_float32": None,
    "decode_peak_mib": 1.0,
    "peak_memory_mib": 1.0,
    "decoder": _DECODER,
}


@dataclass(frozen=True)
class Look:
    """How the images of a candidate look beside the reference's.

    Attributes:
        guidance: what its step `guidance` asks for; None: it has none.
        changes: scores of all its images that differ from the reference's by so much.
        worst: the case that is worse still; None: all are alike.
        notes: what its notes hold beside the decoder's ranges.
    """

    guidance: dict[str, Any] | None = None
    changes: dict[str, float] = field(default_factory=dict)
    worst: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def make_image_product(looks: dict[str, Look], release: str) -> ImagesProduct:
    """Return the settings of a product with a reference `shots` and these candidates."""
    candidates = {name: {"checkpoint": "models/shots", "steps": [_step(look)]} for name, look in looks.items()}
    return ImagesProduct.model_validate(
        {
            "name": "shots",
            "kind": "images",
            "reference": "shots",
            "release": [release],
            "candidates": {"shots": {"checkpoint": "models/shots", "steps": []}, **candidates},
            "serving": {"num_inference_steps": 2, "guidance": {"scale": 5}, "batch_size": 4, "num_threads": 1},
            "resources": {"num_workers": 1},
            "evals": {"shots": {"kind": "images", "evalset": "evalsets/shots", "clip": "models/clip"}},
            "gate": {
                "alpha": 0.05,
                "on_inconclusive": "block",
                "tolerances": {
                    "shots/sound_image_rate": {"overall": 0.2},
                    "shots/clip_similarity": {"overall": 0.01},
                    "shots/saturated_pixel_fraction": {"overall": 0.01},
                },
            },
        }
    )


def write_image_tree(build: Path, product: ImagesProduct, looks: dict[str, Look], *, case_id: str = "shot-{i}") -> None:
    """Write what a product's candidates leave under `build`.

    Args:
        build: the product's folder.
        product: of `make_image_product`.
        looks: by candidate.
        case_id: names the cases; `{i}` is their number.
    """
    for number, name in enumerate(product.candidates):
        look = looks.get(name, Look())
        candidate = _write_candidate(build, product, name)
        folder, rng = build / "evaluations" / name, np.random.default_rng(number)
        records = [
            _write_case(folder / "shots", candidate, look, i, case_id.format(i=i), rng) for i in range(NUM_CASES)
        ]
        write_image_evaluation(folder, candidate, product, records, _NOTES | look.notes)


def write_image_evaluation(
    folder: Path, candidate: ImageCandidate, product: ImagesProduct, records: list[CaseRecord], notes: dict[str, Any]
) -> None:
    """Write records, notes and index of a candidate's eval `shots`, sealed."""
    write_cases(folder / "shots.jsonl", records)
    write_text(folder / "shots.json", json.dumps(notes))
    file = EvalFile(
        kind="images",
        settings=product.evals["shots"].model_dump(mode="json"),
        key="k",
        evalset_digest="e",
        num_cases=len(records),
        records="shots.jsonl",
        sha256=digest_file(folder / "shots.jsonl"),
        notes_sha256=digest_file(folder / "shots.json"),
    )
    write_record(
        folder / "evaluation.json",
        Evaluation(
            candidate=candidate.name,
            fingerprint=candidate.fingerprint,
            checkpoint_digest=candidate.checkpoint.digest,
            serving=candidate.serving,
            evals={"shots": file},
            served_by=candidate.facts,
            seconds=1.0,
        ),
    )


def _step(look: Look) -> dict[str, Any]:
    return {"kind": "guidance", **look.guidance} if look.guidance else {"kind": "vae_precision", "dtype": "float16"}


def _write_candidate(build: Path, product: ImagesProduct, name: str) -> ImageCandidate:
    steps = [step.model_dump(mode="json") for step in product.candidates[name].steps]
    for step in steps:
        if step["kind"] == "guidance":
            step["serving"] = {
                "guidance_scale": step["scale"],
                "guidance_rescale": step["rescale"],
                "guidance_by_category": step["by_category"],
            }
    built = BuiltCandidate(
        name=name,
        steps=tuple(steps),
        checkpoint=Checkpoint(
            path="models/shots",
            kind="StableDiffusionXLPipeline",
            format="diffusers",
            dtype="float32",
            num_parameters=1,
            num_bytes=4,
            digest=digest_text(name),
        ),
    )
    write_record(build / "candidates" / name / "candidate.json", built)
    return serve(built, product)


def _write_case(
    folder: Path, candidate: ImageCandidate, look: Look, i: int, case_id: str, rng: np.random.Generator
) -> CaseRecord:
    pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    path = folder / f"{case_id}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    changes = look.changes | ({"clip": look.changes.get("clip", 0.0) - 0.2} if i == look.worst else {})
    spread = 0.001 * (i % 7)  # of every candidate alike: intervals need it
    scores = {
        key: value + changes.get(key, 0.0) + (spread if key in ("saturated", "clip") else 0.0)
        for key, value in _SOUND.items()
    }
    return CaseRecord(
        case_id=case_id,
        input_digest=digest_text(str(i)),
        cluster=str(i),
        prompt=f"ball {i}",
        scores=scores,
        output=hashlib.sha256(pixels.transpose(2, 0, 1).tobytes()).hexdigest(),
        fingerprint=candidate.fingerprint,
    )
