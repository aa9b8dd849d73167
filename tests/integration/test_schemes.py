"""Every scheme made by the library from a tiny checkpoint: what is stored, and what a planted defect says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import QuantgateError, QuantizationError
from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.text.optimize.coverage import check_coverage
from pipeline.products.text.optimize.layers import plan_folder
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.optimize.quantize import quantize
from pipeline.products.text.optimize.reconstruction import check_reconstruction
from pipeline.products.text.schemes import PRESETS
from pipeline.products.text.settings import Calibration, QuantizeStep
from tests.fakes.tiny_llama import write_documents, write_tiny_llama

LAYER = "model.layers.1.mlp.up_proj"
CALIBRATION = Calibration(sources=["prose"], num_samples=16, max_tokens=64, length_exponent=0.0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16, as transformers unpacks floats of four bits into it alone."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Evalset:
    words = "courier parcel north gate before market opens call room blue wait result".split()
    documents = [" ".join(words[i % 12 :] + words[: i % 7]) * 3 for i in range(30)]
    return load_evalset(write_documents(tmp_path_factory.mktemp("texts") / "calibration", {"prose": documents}))


def make_step(scheme: str, **changes: Any) -> QuantizeStep:
    settings: dict[str, Any] = {"scheme": scheme}
    if PRESETS[scheme].needs_calibration:
        settings["calibration"] = CALIBRATION
    if scheme == "FP8_BLOCK":
        settings["exclude"] = ["lm_head", "re:.*[qkv]_proj"]
    return QuantizeStep(kind="quantize", **settings | changes)


@pytest.fixture(scope="module")
def make(source: Path, texts: Evalset, tmp_path_factory: pytest.TempPathFactory) -> Callable[[QuantizeStep], Path]:
    made: dict[str, Path] = {}

    def make_once(step: QuantizeStep) -> Path:
        key = step.model_dump_json()
        if key not in made:
            folder = tmp_path_factory.mktemp("made") / "checkpoint"
            quantize(source, folder, step=step, calibration_set=texts)
            made[key] = folder
        return made[key]

    return make_once


@pytest.mark.parametrize("name", PRESETS)
def test_a_scheme_is_stored_as_it_is_described(name: str, source: Path, make: Callable[[QuantizeStep], Path]) -> None:
    step = make_step(name, **({"group_size": 64} if name.startswith("W4") or name == "W8A16" else {}))
    tensors = load_file(make(step) / "model.safetensors")
    stored = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{LAYER}.")}
    shape = plan_folder(source, step).asked[LAYER]
    assert {part: tuple(t.shape) for part, t in stored.items()} == {
        part: size for part, (_, size) in step.resolve().list_parts(shape).items()
    }
    assert sum(t.nbytes for t in stored.values()) == step.resolve().count_bytes(shape)


def test_rules_mix_schemes_and_the_first_that_matches_counts(source: Path, texts: Evalset, tmp_path: Path) -> None:
    rules = [
        {"layers": ["model.layers.0.mlp.down_proj"], "scheme": "W8A8"},
        {"layers": ["re:.*down_proj"], "scheme": "W4A16", "group_size": 64},
    ]
    step = make_step("FP8_DYNAMIC", rules=rules)
    result = quantize(source, tmp_path / "out", step=step, calibration_set=texts)
    formats = {layer.layer: layer.format for layer in result.coverage}
    assert formats["model.layers.0.mlp.down_proj"] == PRESETS["W8A8"].name
    assert formats["model.layers.1.mlp.down_proj"] == "int4-g64-symmetric"
    assert formats[LAYER] == PRESETS["FP8_DYNAMIC"].name


def edit(folder: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def check(folder: Path, source: Path, step: QuantizeStep) -> None:
    plan, log = plan_folder(source, step), StepLog(step.algorithm)
    check_coverage(folder, source=source, plan=plan, log=log)
    check_reconstruction(folder, source=source, step=step, plan=plan, log=log)


def double(tensor: Any, *place: int) -> None:
    if tensor.dtype == torch.uint8:  # a power of two by its exponent
        tensor[place] += 1
    else:
        tensor[place] = (tensor[place].float() * 2).to(tensor.dtype)


@pytest.mark.parametrize("name", PRESETS)
def test_one_scale_twice_as_large_is_refused(
    name: str, source: Path, make: Callable[[QuantizeStep], Path], tmp_path: Path
) -> None:
    step = make_step(name, **({"group_size": 64} if name.startswith("W4") or name == "W8A16" else {}))

    def change(tensors: dict[str, Any]) -> None:
        scale = tensors[f"{LAYER}.weight_scale"]
        double(scale, *(0,) * scale.dim())

    folder = edit(make(step), tmp_path / "out", change)
    with pytest.raises(QuantizationError, match=rf"layer '{LAYER}': (group 0 of row \d+ is|its weights are) "):
        check(folder, source, step)


@pytest.mark.parametrize("name", ["W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4"])
def test_a_layer_left_dense_is_refused(
    name: str, source: Path, make: Callable[[QuantizeStep], Path], tmp_path: Path
) -> None:
    dense = load_file(source / "model.safetensors")[f"{LAYER}.weight"]

    def change(tensors: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.startswith(f"{LAYER}.")]:
            del tensors[key]
        tensors[f"{LAYER}.weight"] = dense

    folder = edit(make(make_step(name)), tmp_path / "out", change)
    with pytest.raises(QuantizationError, match=rf"layer '{LAYER}': expected .*, found weight BF16"):
        check(folder, source, make_step(name))


def test_another_scheme_than_asked_is_refused(source: Path, make: Callable[[QuantizeStep], Path]) -> None:
    with pytest.raises(QuantizationError, match=r"config\.json: quantization_config: expected .*, found .*float-quant"):
        check(make(make_step("FP8_DYNAMIC")), source, make_step("W8A8"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheme": "FP8_BLOCK", "exclude": ["lm_head"]}, r"^scheme: blocks of 128 x 128 do not divide \d+ layers: "),
        ({"scheme": "W4A16", "group_size": 48}, "^group_size: 48 does not divide"),
        ({"rules": [{"layers": ["re:.*k_proj"], "scheme": "W4A16", "group_size": 64}]}, "^rules: .* fused by vLLM"),
        ({"rules": [{"layers": ["re:.*w2"], "scheme": "W4A16"}]}, r"^rules\.0\.layers: 're:\.\*w2' matches no linear"),
        ({"rules": [{"layers": ["lm_head"], "scheme": "W8A16"}]}, r"^rules\.0\.layers: .* 'lm_head', which `exclude`"),
        ({"rules": [{"layers": ["re:("], "scheme": "W8A16"}]}, r"^rules\.0\.layers: 're:\(' is not a regular"),
    ],
)
def test_what_does_not_fit_a_checkpoint_is_one_line(source: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(QuantgateError, match=said) as caught:
        plan_folder(source, make_step(**{"scheme": "W8A8"} | changes))
    assert "\n" not in str(caught.value)
