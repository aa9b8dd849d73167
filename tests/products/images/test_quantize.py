"""The step that stores a U-Net's linear layers in 8 bits: what it writes, what it refuses, and that it renders."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipeline.errors import CheckpointError, SettingsError
from pipeline.gate.audits import CandidateFindings
from pipeline.products.images import kernels, quantize
from pipeline.products.images.findings import ImagesAuditor
from pipeline.products.images.findings.decoder import explain_emulation
from pipeline.products.images.folders import find_weights, read_part
from pipeline.products.images.linear_layers import choose_layers, list_stored_matrices
from pipeline.products.images.preflight import check_images
from pipeline.products.images.rendering import Prompt, load_pipeline, make_latents
from pipeline.products.images.settings import ImagesProduct, QuantizeStep
from pipeline.products.images.show.rendering import _describe_products
from pipeline.products.params import load_params
from pipeline.records.digests import digest_files
from pipeline.records.reasons import ReasonKind
from pipeline.records.serving import PipelineServing

ROOT = Path(__file__).resolve().parents[3]
PLAIN = PipelineServing(num_inference_steps=3, guidance_scale=5)
PROMPTS = [Prompt("a red mug on a white table", 1), Prompt("a blue shoe", 2)]
INT8, FP8, DYNAMIC = "Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"
LAYER = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


def make_step(scheme: str = INT8, **changes: Any) -> QuantizeStep:
    return QuantizeStep.model_validate({"kind": "quantize", "scheme": scheme} | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "models/product-shots", tmp_path / "pipeline"))


def list_layers() -> list[str]:
    return quantize._list_linear("UNet2DConditionModel", ROOT / "models/product-shots/unet")


@pytest.mark.parametrize("scheme", [INT8, FP8, DYNAMIC])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_scheme_is_what_is_on_disk_and_what_diffusers_loads(folder: Path, scheme: str, dtype: str) -> None:
    before = digest_files(folder)
    done = quantize.run_quantize(folder, PLAIN, step=make_step(scheme, dtype=dtype, exclude=["re:time_embedding"]))
    asked = [layer for layer in done.coverage if layer.asked]
    assert {layer.layer for layer in done.coverage if not layer.asked} == {
        "time_embedding.linear_1",
        "time_embedding.linear_2",
    }
    stored = "float8_e4m3fn" if scheme == FP8 else "int8"
    assert {layer.format.split()[0] for layer in asked} == {stored} and len(asked) == 97
    assert {layer.format for layer in done.coverage if not layer.asked} == {dtype}
    made = done.record["quantized"]
    assert made["num_bytes_after"] == sum(info.num_bytes for info in read_part(folder / "unet").values())
    assert made["num_bytes_after"] < 0.72 * made["num_bytes_before"] and 0.4 < made["worst_error"] <= 1.002
    after = digest_files(folder)
    assert {name for name in after if after[name] != before.get(name)} == {
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
    }
    pipe = load_pipeline(folder, done.serving)
    assert str(pipe.unet.dtype) == f"torch.{dtype}" == f"torch.{done.serving.unet_dtype}"
    latents = make_latents(pipe, PROMPTS, done.serving).values
    exact = make_latents(load_pipeline(ROOT / "models/product-shots", PLAIN), PROMPTS, PLAIN).values
    assert 0 < (latents - exact).norm() / exact.norm() < 0.1


def test_it_writes_and_draws_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    """The library sorts the header of its files otherwise each time, and names the folder that it read."""
    other = Path(shutil.copytree(folder, tmp_path / "elsewhere/pipeline"))
    for path in (folder, other):
        quantize.run_quantize(path, PLAIN, step=make_step())
    assert digest_files(folder) == digest_files(other)
    assert str(tmp_path) not in (folder / "unet/config.json").read_text()
    first, second = (make_latents(load_pipeline(path, PLAIN), PROMPTS, PLAIN).values for path in (folder, other))
    assert torch.equal(first, second)


def damage(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., None]:
    """Return what writes a quantised part and plants a defect in it."""
    write = quantize._write

    def write_damaged(name: str, part: Path, made: Path, *rest: Any) -> None:
        write(name, part, made, *rest)
        path = find_weights(made)
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata=metadata)

    return write_damaged


def double_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}._weight_scale"] *= 2


def double_scale_of_one_row(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}._weight_scale"][7] *= 2


def nudge_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}._weight_scale"] *= 1.01


def break_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}._weight_scale"][3] = float("nan")


def leave_dense(tensors: dict[str, torch.Tensor]) -> None:
    for key in [key for key in tensors if key.startswith(f"{LAYER}._weight_")]:
        del tensors[key]
    tensors[f"{LAYER}.weight"] = torch.zeros(64, 64)


def drop_a_row_of_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}._weight_scale"] = tensors[f"{LAYER}._weight_scale"][:1].clone()


def move_another_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["conv_in.weight"] += 1e-3


def lose_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["conv_in.bias"]


def store_numbers_wide(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}._weight_qdata"] = tensors[f"{LAYER}._weight_qdata"].to(torch.int32)


@pytest.mark.parametrize("scheme", [INT8, FP8])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (double_scale, rf"{LAYER}: expected each weight within half a step of .* steps away: its scale is wrong"),
        (double_scale_of_one_row, rf"{LAYER}: expected each weight .*row 7 has one"),
        (break_scale, rf"{LAYER}: _weight_scale: expected finite positive scales"),
        (leave_dense, rf"{LAYER}: expected weights in \S+, as was asked, found float ones"),
        (drop_a_row_of_scales, rf"{LAYER}: expected weights of shape \(64, 64\) and a scale for each of 64 rows"),
        (move_another_tensor, "conv_in.weight: expected the tensor of"),
        (lose_a_tensor, "'conv_in.bias' is missing"),
        (store_numbers_wide, rf"{LAYER}._weight_qdata: expected \S+, found I32"),
    ],
)
def test_a_defect_is_refused_and_leaves_the_pipeline_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, change: Callable[..., None], said: str
) -> None:
    before = digest_files(folder / "unet")
    monkeypatch.setattr(quantize, "_write", damage(change))
    with pytest.raises(CheckpointError, match=said) as caught:
        quantize.run_quantize(folder, PLAIN, step=make_step(scheme))
    assert "\n" not in str(caught.value)
    assert digest_files(folder / "unet") == before


def test_a_scale_that_is_off_by_a_hundredth_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_write", damage(nudge_scale))
    with pytest.raises(CheckpointError, match=f"{LAYER}: expected each weight within half a step"):
        quantize.run_quantize(folder, PLAIN, step=make_step())


def test_a_folder_that_loads_as_another_scheme_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the same numbers: only how diffusers loads them tells that inputs are not rounded."""
    write = quantize._write
    monkeypatch.setattr(
        quantize, "_write", lambda name, part, made, step, left: write(name, part, made, make_step(), left)
    )
    with pytest.raises(CheckpointError, match=f"expected {DYNAMIC}, which rounds inputs, found one that leaves them"):
        quantize.run_quantize(folder, PLAIN, step=make_step(DYNAMIC))


def test_what_multiplied_is_counted_and_an_emulation_is_named(folder: Path) -> None:
    ran: dict[str, Any] = {}
    for scheme in (INT8, DYNAMIC):
        made = Path(shutil.copytree(folder, folder.with_name(scheme)))
        quantize.run_quantize(made, PLAIN, step=make_step(scheme, exclude=["re:.*emb"]))
        pipe = load_pipeline(made, PLAIN)
        one_step = PLAIN.model_copy(update={"num_inference_steps": 1})
        ran[scheme] = kernels.count_products(pipe.unet, partial(make_latents, pipe, PROMPTS, one_step))
    assert kernels.count_products(load_pipeline(folder, PLAIN).unet, list) is None
    num = sum("emb" not in layer for layer in list_layers())
    assert [counts["num_layers"] for counts in ran.values()] == [num, num]
    assert ran[INT8] == ran[INT8] | {"num_calls": num, "num_integer_products": 0, "rounds_inputs": False}
    assert ran[DYNAMIC] == ran[DYNAMIC] | {"num_calls": num, "num_integer_products": num, "rounds_inputs": True}
    assert "became floats for each product" in _describe_products("shots", ran[INT8])
    assert f"{num} products of INT8 numbers" in _describe_products("shots", ran[DYNAMIC])


RELEASES = [("a", None, "refused"), ("b", None, ReasonKind.LIMIT), ("a", "it was tried", ReasonKind.LIMIT)]


@pytest.mark.parametrize(("num", "is_told"), [(3, True), (4, False)])
def test_layers_that_ran_in_no_kernel_are_a_limit_of_the_verdict(
    num: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = {"num_layers": 4, "num_calls": 4, "num_integer_products": num, "rounds_inputs": True}
    monkeypatch.setattr("pipeline.products.images.findings.decoder.read_notes", lambda *_: {"quantized": ran})
    said = explain_emulation(None, "shots")  # type: ignore[arg-type]
    assert (said is not None) == is_told and (said or "emulated: of 4 calls of layers in INT8 3").startswith("emulated")


@pytest.mark.parametrize(("release", "reason", "outcome"), RELEASES)
def test_a_release_on_emulated_layers_needs_a_reason(
    release: str, reason: str | None, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "emulated: of 4 calls of layers in INT8 3 ran in an INT8 kernel"
    monkeypatch.setattr("pipeline.products.images.findings.explain_unsound", lambda *_: None)
    monkeypatch.setattr("pipeline.products.images.findings.explain_emulation", lambda *_: said)
    findings = CandidateFindings()
    evidence: Any = SimpleNamespace(candidate=SimpleNamespace(name="a"))
    product: Any = SimpleNamespace(release=[release], allow_emulated=reason, show_allowance=lambda: "a line")
    ImagesAuditor().audit_eval(findings, evidence, evidence, "shots", product)
    assert ("refused" if findings.refusals else findings.notes[0].kind) == outcome
    assert said in (findings.refusals or [findings.notes[0].text])[0]


def test_preflight_knows_the_linear_layers_from_headers_alone() -> None:
    tensors = read_part(ROOT / "models/product-shots/unet")
    assert sorted(list_stored_matrices(tensors)) == sorted(list_layers())
    assert choose_layers(["a.b", "a.c"], ["a.b"]) == ["a.c"]
    assert choose_layers(["a.b", "a.c", "d"], [r"re:a\."]) == ["d"]
    assert choose_layers(["a.b", "a.c", "d"], ["*.c", "d"]) == ["a.b"]


def read_product(tmp_path: Path, steps: str) -> ImagesProduct:
    """Read the shipped settings with other steps of `unet-int8`."""
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    changed, num = re.subn(r"(\n  unet-int8:\n(?:    .*\n)*?)    steps: .*\n", rf"\1    steps: {steps}\n", text)
    assert num == 1
    path = tmp_path / "params.yaml"
    path.write_text(changed, encoding="utf-8")
    product = load_params(path).products["shots"]
    assert isinstance(product, ImagesProduct)
    return product


AT = "candidates.unet-int8.steps"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("[{kind: quantize, scheme: int8wo}]", rf"{AT}.0.*scheme.*{INT8}.*{FP8}.*{DYNAMIC}"),
        ("[{kind: quantize, scheme: Float8DynamicActivationFloat8WeightConfig}]", rf"{AT}.0.*scheme.*{INT8}"),
        (f"[{{kind: quantize, scheme: {INT8}, part: vae}}]", f"{AT}.0.*part.*unet"),
        (f"[{{kind: quantize, scheme: {INT8}, bits: 4}}]", f"{AT}.0.*bits"),
        (f"[{{kind: quantize, scheme: {INT8}}}, {{kind: quantize, scheme: {FP8}}}]", f"{AT}.1.*quantize"),
        (f"[{{kind: vae_precision, dtype: float16}}, {{kind: quantize, scheme: {INT8}}}]", "to be the first step"),
        (
            f"[{{kind: quantize, scheme: {INT8}}}, {{kind: vae_range_fix}}]",
            "expected vae_range_fix to be the first step",
        ),
        (
            f"[{{kind: quantize, scheme: {INT8}}}, {{kind: unet_precision, dtype: bfloat16}}]",
            f"{AT}.1: expected no unet_precision beside quantize",
        ),
    ],
)
def test_settings_that_contradict_themselves_are_refused(tmp_path: Path, steps: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        read_product(tmp_path, steps)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("exclude", "said"),
    [
        (
            "[mid_block.attn1.to_q]",
            r"exclude.0: expected linear layers, 'mid_block.attn1.to_q' matches none; the .*to_q",
        ),
        ("['re:.*emb', 're:conv']", "exclude.1: expected linear layers, 're:conv' matches none"),
        ("['re:(']", r"exclude.0: expected a regular expression, got 're:\('"),
        ("['re:.*']", "expected linear layers to quantise, found none: exclude names all 99"),
    ],
)
def test_patterns_that_the_part_contradicts_are_refused_before_any_work(
    tmp_path: Path, exclude: str, said: str
) -> None:
    product = read_product(tmp_path, f"[{{kind: quantize, scheme: {INT8}, exclude: {exclude}}}]")
    with pytest.raises(SettingsError, match=said) as caught:
        check_images(product, ROOT)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"{AT}.0")


def test_a_pipeline_that_is_quantised_already_is_refused(folder: Path, tmp_path: Path) -> None:
    quantize.run_quantize(folder, PLAIN, step=make_step())
    product = read_product(tmp_path, f"[{{kind: quantize, scheme: {INT8}}}]")
    candidate = product.candidates["unet-int8"].model_copy(update={"checkpoint": str(folder)})
    product = product.model_copy(update={"candidates": product.candidates | {"unet-int8": candidate}})
    with pytest.raises(SettingsError, match="expected float weights to quantise, .* has a quantization_config"):
        check_images(product, ROOT)


def test_a_quantised_folder_that_lacks_a_tensor_is_not_filled_with_random_numbers(folder: Path) -> None:
    quantize.run_quantize(folder, PLAIN, step=make_step())
    path = find_weights(folder / "unet")
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(path)
    del tensors["conv_in.bias"]
    names = [name for name in json.loads(metadata["tensor_names"]) if name != "conv_in.bias"]
    save_file(tensors, path, metadata=metadata | {"tensor_names": json.dumps(names)})
    with pytest.raises(CheckpointError, match="expected the tensor 'conv_in.bias', found none"):
        load_pipeline(folder, PLAIN)
