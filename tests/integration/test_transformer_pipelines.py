"""Flux and Stable Diffusion 3 through the stages of kind `images`, on tiny random pipelines."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest

from evalsets.seal import seal
from pipeline.products.images import channels_last, workers
from pipeline.products.images.candidate import build_image_candidate
from pipeline.products.images.denoisers import DENOISERS
from pipeline.products.images.evaluate import evaluate_images
from pipeline.products.images.likeness import measure_likeness
from pipeline.products.images.preflight import check_images
from pipeline.products.images.serving import read_image_candidate
from pipeline.products.images.settings import ImagesProduct
from pipeline.products.images.show.guidance import plot_guidance
from pipeline.records.evaluations import CaseRecord, read_cases
from tests.fakes.judging import compare_release, render_report
from tests.fakes.tiny_transformers import write_tiny_flux, write_tiny_sd3
from tests.fakes.tiny_vae import inflate_decoder
from tests.fakes.workers_here import start_here

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPTS = 6
HALF = {"kind": "vae_precision", "dtype": "bfloat16"}
TILED = {"kind": "vae_tiling", "tile": 16, "overlap": 0.25, "window": "hann"}
QUANTIZED = {"kind": "quantize", "part": "transformer", "scheme": "Int8WeightOnlyConfig", "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("transformers")
    write_tiny_flux(root / "models/flux")
    write_tiny_sd3(root / "models/sd3")
    shutil.copytree(ROOT / "models/product-shots-clip", root / "models/clip")
    shutil.copytree(ROOT / "evalsets/shots", root / "evalsets/few")
    cases = (ROOT / "evalsets/shots/cases.jsonl").read_text().splitlines(keepends=True)
    (root / "evalsets/few/cases.jsonl").write_text("".join(cases[:: len(cases) // NUM_PROMPTS][:NUM_PROMPTS]))
    seal(root / "evalsets/few")
    return root


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render in this process, and let Flux draw 32 pixels: its own 1024 have nothing to do with its weights."""
    monkeypatch.setattr(workers, "start_workers", start_here)
    monkeypatch.setitem(DENOISERS, "FluxPipeline", dataclasses.replace(DENOISERS["FluxPipeline"], size=16))


def make_product(model: str, steps: dict[str, list[dict[str, Any]]], **serving: Any) -> ImagesProduct:
    tolerances = {"sound_image_rate": 0.5, "decode_ssim": 0.5, "reference_ssim": 0.5, "seam_step_levels": 9}
    return ImagesProduct.model_validate(
        {
            "name": model,
            "kind": "images",
            "reference": model,
            "release": [list(steps)[-1]],
            "candidates": {
                model: {"checkpoint": f"models/{model}", "steps": []},
                **{name: {"checkpoint": f"models/{model}", "steps": own} for name, own in steps.items()},
            },
            "serving": {"num_inference_steps": 2, "guidance": {"scale": 3}, "batch_size": 2, "num_threads": 1}
            | serving,
            "evals": {"few": {"kind": "images", "evalset": "evalsets/few", "clip": "models/clip"}},
            "gate": {
                "alpha": 0.05,
                "on_inconclusive": "block",
                "tolerances": {f"few/{name}": {"overall": value} for name, value in tolerances.items()},
            },
        }
    )


def run(project: Path, product: ImagesProduct, name: str) -> tuple[list[CaseRecord], dict[str, Any]]:
    build = project / product.build
    build_image_candidate(name, product, root=project, build=build)
    evaluate_images(read_image_candidate(build, name, product), product, root=project, build=build)
    folder = build / "evaluations" / name
    notes: dict[str, Any] = json.loads((folder / "few.json").read_text())
    return read_cases(folder / "few.jsonl"), notes


@pytest.mark.parametrize("model", ["flux", "sd3"])
def test_every_stage_takes_a_pipeline_with_a_transformer(project: Path, model: str) -> None:
    steps: dict[str, list[dict[str, Any]]] = {
        "half": [{"kind": "transformer_precision", "dtype": "bfloat16"}],
        "int8": [QUANTIZED],
        "guided": [{"kind": "guidance", "scale": 9, "by_category": {"background/white": {"scale": 3}}}],
        "tiled": [HALF, TILED],
    }
    product = make_product(model, steps)
    check_images(product, project)
    ran = {name: run(project, product, name) for name in product.candidates}
    assert all(record.scores["sound"] for records, _ in ran.values() for record in records)
    assert all(record.scores["ssim"] == 1 for record in ran[model][0])
    assert len(ran[model][1]["other_seed_ssim"]) == NUM_PROMPTS
    assert [ran[name][1]["num_taken"] for name in steps] == [0, 0, 0, NUM_PROMPTS - 4], "only a decode takes latents"
    assert len(ran[model][1]["std_ratio_by_step"]) == (2 if model == "sd3" else 0), "Flux is guided without a 2nd pass"
    coverage = read_image_candidate(project / product.build, "int8", product).coverage
    assert ran["int8"][1]["quantized"]["num_layers"] == len(coverage) > 9 and all(layer.asked for layer in coverage)
    assert any(record.scores["seam_levels"] for record in ran["tiled"][0])
    for plain, guided in zip(
        *(sorted(ran[name][0], key=lambda r: r.case_id) for name in (model, "guided")), strict=True
    ):
        assert (plain.output == guided.output) == ("background/white" in plain.buckets)
    lines = measure_likeness(product, project / product.build)
    assert len(lines) == 4 and not any("refused" in line for line in lines)
    compared = compare_release(product, project / product.build)
    assert {v.candidate: v.outcome for v in compared.judgement.verdicts}.keys() == steps.keys()
    report = render_report(compared)
    assert "Int8WeightOnlyConfig: the transformer takes" in report and "scale 9, rescale 0" in report
    plot_guidance(compared, project / "guidance.png")


@pytest.mark.parametrize("model", ["flux", "sd3"])
def test_a_decoder_with_a_shift_is_repaired_and_laid_out(
    project: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = project / f"models/hot-{model}"
    shutil.copytree(project / "models" / model, hot)
    vae = diffusers.AutoencoderKL.from_pretrained(hot / "vae")
    inflate_decoder(vae, 2.0**14).save_pretrained(hot / "vae")
    half = {"kind": "vae_precision", "dtype": "float16"}
    fix = {"kind": "vae_range_fix", "num_prompts": NUM_PROMPTS}
    product = make_product(
        f"hot-{model}", {"hot": [half], "fixed": [fix, half], "laid-out": [{"kind": "channels_last", "parts": ["vae"]}]}
    )
    check_images(product, project)
    monkeypatch.setattr(channels_last, "ROUNDS", 6)
    ran = {name: run(project, product, name) for name in product.candidates}
    assert all(record.scores["nonfinite"] for record in ran["hot"][0])
    assert all(record.scores["sound"] and record.scores["ssim"] > 0.99 for record in ran["fixed"][0])
    assert all(record.scores["ssim"] > 0.999 for record in ran["laid-out"][0])
    assert ran["fixed"][1]["num_taken"] == NUM_PROMPTS - 4
    made = read_image_candidate(project / product.build, "fixed", product).steps[0]
    assert made["scales"] and made["proof"]["max_difference"] < 1e-3
