"""What a U-Net in each scheme of 8 bits takes and draws: bytes, time of a step, likeness, and the verdict.

    python -m benchmarks.unet_schemes [--product shots] [--exclude PATTERN ...]

Makes a candidate of the reference for each scheme of the step `quantize`, with everything else in float32 and in
bfloat16, and one in bfloat16 alone. Renders all prompts of the product, and judges each as if it were released alone.
Prints a row of Markdown each. The time of a step is a sum over the run, beside whatever else ran. The megabytes are
those of the U-Net's file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from pipeline.gate.compare import ReleaseComparison, compare_release
from pipeline.products.images import ImagesKind
from pipeline.products.images.candidate import build_image_candidate
from pipeline.products.images.evaluate import evaluate_images
from pipeline.products.images.findings.decoder import read_notes
from pipeline.products.images.folders import read_part
from pipeline.products.images.likeness import measure_likeness
from pipeline.products.images.metrics import LIKENESS_SCORE
from pipeline.products.images.settings import ImageCandidateSettings, ImagesProduct, QuantizeScheme
from pipeline.products.params import get_product, load_params

BUILD = Path("build/unet-schemes")
DTYPES = ("float32", "bfloat16")


def make_product(product: ImagesProduct, exclude: list[str]) -> ImagesProduct:
    """Return a product whose candidates are its reference and one a scheme and number format."""
    reference = product.candidates[product.reference]
    steps = {"bfloat16": [{"kind": "unet_precision", "dtype": "bfloat16"}]} | {
        f"{scheme.removesuffix('Config')}-{dtype}": [
            {"kind": "quantize", "scheme": scheme, "dtype": dtype, "exclude": exclude}
        ]
        for scheme in get_args(QuantizeScheme)
        for dtype in DTYPES
    }
    candidates = {product.reference: reference} | {
        name: ImageCandidateSettings.model_validate({"checkpoint": reference.checkpoint, "steps": its})
        for name, its in steps.items()
    }
    return product.model_copy(update={"candidates": candidates, "release": ["bfloat16"]})


def format_row(compared: ReleaseComparison, name: str, eval_name: str) -> str:
    """Write what an eval found of a candidate."""
    verdict = next(v for v in compared.judgement.verdicts if v.candidate == name)
    findings = compared.findings[name]
    assert findings.evidence is not None
    num_bytes = sum(
        info.num_bytes for info in read_part(Path(findings.evidence.candidate.checkpoint.path, "unet")).values()
    )
    notes = read_notes(findings.evidence, eval_name)
    found = {c.metric: c for c in verdict.comparisons if c.bucket is None}
    mean, clip = (found[f"{eval_name}/{metric}"].candidate for metric in ("reference_ssim", "clip_similarity"))
    lowest = min(record.scores[LIKENESS_SCORE] for record in findings.pairs[eval_name].candidate)
    others = sorted(c.metric for c in found.values() if c.outcome in ("fail", "inconclusive"))
    products = (notes.get("quantized") or {}).get("num_integer_products", "")
    why = f" ({', '.join(others)})" if others else ""
    numbers = f"{num_bytes / 1e6:.2f} | {products} | {notes['step_ms_per_image']:.2f} | {mean:.4f} | {lowest:.4f}"
    return f"| `{name}` | {numbers} | {clip:.4f} | {verdict.outcome}{why} |"


def main() -> None:
    """Render, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", default="shots")
    parser.add_argument("--exclude", nargs="*", default=[])
    options = parser.parse_args()
    product = make_product(get_product(load_params(), options.product, kind=ImagesProduct), options.exclude)
    (BUILD / "benchmarks").mkdir(parents=True, exist_ok=True)
    for name in product.candidates:
        candidate = build_image_candidate(name, product, root=Path(), build=BUILD)
        evaluate_images(candidate, product, root=Path(), build=BUILD)
    for line in measure_likeness(product, BUILD):
        print(line, file=sys.stderr)
    compared = compare_release(product, ImagesKind().get_auditor(), BUILD)
    eval_name = next(iter(product.evals))
    print(
        "| U-Net | MB | INT8 products a step | step, ms an image | mean likeness | lowest | CLIP similarity | verdict |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for name in product.candidates:
        if name != product.reference:
            print(format_row(compared, name, eval_name))


if __name__ == "__main__":
    main()
