"""What a coarser U-Net draws: likeness to the reference's pictures, and what the measures of one picture see of it.

    python -m benchmarks.unet_rounding [--product shots]

Rounds the weights of the U-Net's convolutions and linear layers to the nearest, symmetrically, and keeps the rest:
8 and 4 bits with a scale a channel, and 4 bits with one for 32 weights where a channel divides by that. These are no
steps of the pipeline: such U-Nets are what likeness is there to stop. Renders all prompts of the product by them, by a
U-Net in bfloat16 and by the reference, and judges each as if it were released alone. Prints a row of Markdown each.

Not covered: speed and memory, which rounded weights in float32 do not change; quantisation that calibrates.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from pipeline.gate.compare import ReleaseComparison, compare_release
from pipeline.products.images import ImagesKind
from pipeline.products.images.candidate import build_image_candidate
from pipeline.products.images.evaluate import evaluate_images
from pipeline.products.images.findings.likeness import read_floor
from pipeline.products.images.likeness import measure_likeness
from pipeline.products.images.metrics import LIKENESS_SCORE
from pipeline.products.images.settings import ImageCandidateSettings, ImagesProduct
from pipeline.products.params import get_product, load_params

BUILD = Path("build/unet-rounding")
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
ROUNDED: dict[str, tuple[int, int | None]] = {"int8": (8, None), "int4-g32": (4, 32), "int4": (4, None)}  # bits, group
METRICS = ("reference_ssim", "decode_ssim", "clip_similarity")


def round_weight(weight: Any, bits: int, group: int | None) -> Any:
    """Return a weight as so many bits would hold it, in its own number format.

    Args:
        weight: (channels, ...).
        bits: of each number.
        group: weights that share a scale; None, or where a channel does not divide by it: those of a channel.
    """
    rows = weight.flatten(1)
    size = group if group and rows.shape[1] % group == 0 else rows.shape[1]
    groups, largest = rows.reshape(-1, size), 2 ** (bits - 1) - 1
    scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    return ((groups / scale).round().clamp(-largest, largest) * scale).reshape(weight.shape)


def write_rounded(source: Path, target: Path, *, bits: int, group: int | None) -> None:
    """Write a copy of a pipeline folder with a rounded U-Net."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    tensors = {
        name: round_weight(tensor, bits, group) if name.endswith(".weight") and tensor.dim() > 1 else tensor
        for name, tensor in load_file(source / WEIGHTS).items()
    }
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})


def make_product(product: ImagesProduct) -> ImagesProduct:
    """Write the rounded pipelines, and return the product with the reference and these alone."""
    reference = product.candidates[product.reference]
    half = [{"kind": "unet_precision", "dtype": "bfloat16"}]
    candidates = {
        product.reference: reference,
        "bfloat16": ImageCandidateSettings.model_validate({"checkpoint": reference.checkpoint, "steps": half}),
    }
    for name, (bits, group) in ROUNDED.items():
        folder = BUILD / "models" / name
        write_rounded(Path(reference.checkpoint), folder, bits=bits, group=group)
        candidates[name] = ImageCandidateSettings(checkpoint=folder.as_posix(), steps=[])
    return product.model_copy(update={"candidates": candidates, "release": ["bfloat16"]})


def format_row(compared: ReleaseComparison, name: str, eval_name: str) -> str:
    """Write what an eval found of a candidate."""
    verdict = next(v for v in compared.judgement.verdicts if v.candidate == name)
    found = {c.metric: c for c in verdict.comparisons if c.bucket is None}
    values = [found[f"{eval_name}/{metric}"] for metric in METRICS]
    lowest = min(record.scores[LIKENESS_SCORE] for record in compared.findings[name].pairs[eval_name].candidate)
    numbers = [f"{values[0].candidate:.4f}", f"{lowest:.4f}", *(f"{c.candidate:.4f}" for c in values[1:])]
    outcomes = ", ".join(f"{c.metric.rpartition('/')[2]} {c.outcome}" for c in values)
    return f"| {eval_name} | `{name}` | {' | '.join(numbers)} | {verdict.outcome} ({outcomes}) |"


def main() -> None:
    """Render, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", default="shots")
    product = make_product(get_product(load_params(), parser.parse_args().product, kind=ImagesProduct))
    (BUILD / "benchmarks").mkdir(parents=True, exist_ok=True)
    for name in product.candidates:
        candidate = build_image_candidate(name, product, root=Path(), build=BUILD)
        evaluate_images(candidate, product, root=Path(), build=BUILD)
    for line in measure_likeness(product, BUILD):
        print(line, file=sys.stderr)
    compared = compare_release(product, ImagesKind().get_auditor(), BUILD)
    print("| eval | U-Net | mean likeness | lowest | SSIM to the decode | CLIP similarity | verdict |")
    print("|---|---|---:|---:|---:|---:|---|")
    evidence = compared.findings[product.reference].evidence
    for eval_name in product.evals:
        if evidence is not None and (floor := read_floor(evidence, eval_name)):
            mean = sum(floor.values()) / len(floor)
            print(f"| {eval_name} | the reference, another seed | {mean:.4f} | {min(floor.values()):.4f} | | | |")
        for name in product.candidates:
            if name != product.reference:
                print(format_row(compared, name, eval_name))


if __name__ == "__main__":
    main()
