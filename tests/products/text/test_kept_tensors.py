"""What a step does not quantise is the source's, or the source's with the scales that were moved into it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.errors import QuantizationError
from pipeline.products.text.optimize.kept_tensors import check_kept
from pipeline.products.text.optimize.layers import LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.schemes import PRESETS

NORM, LAYER, BEFORE = "model.layers.0.input_layernorm", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.v_proj"
PLAN = LayerPlan({LAYER: (8, 4)}, {BEFORE: (6, 4)}, {LAYER: PRESETS["W8A8"]})


def make_tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (16, 4), f"{NORM}.weight": (4,), f"{BEFORE}.weight": (6, 4)}
    shapes |= {f"{BEFORE}.bias": (6,), f"{LAYER}.weight": (8, 4), f"{LAYER}.bias": (8,)}
    return {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", make_tensors())


def check(tmp_path: Path, source: Path, tensors: dict[str, torch.Tensor], log: StepLog | None = None) -> None:
    check_kept(write(tmp_path / "out", tensors), source=source, plan=PLAN, log=log or StepLog("awq"))


def test_equal_values_pass_also_in_the_type_that_a_model_is_loaded_in(tmp_path: Path) -> None:
    wide = make_tensors()
    wide[f"{NORM}.weight"] = wide[f"{NORM}.weight"].float() + 1e-4  # one of several types in a file
    narrow = wide | {f"{NORM}.weight": wide[f"{NORM}.weight"].bfloat16(), f"{LAYER}.weight": torch.zeros(8, 4)}
    narrow["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    check(tmp_path, write(tmp_path / "source", wide), narrow)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", f"{NORM}.weight", f"{BEFORE}.weight", f"{BEFORE}.bias", f"{LAYER}.bias"]
)
def test_a_change_in_the_last_bit_is_refused(tmp_path: Path, source: Path, name: str) -> None:
    changed = make_tensors()
    changed[name].view(torch.int16).flatten()[-1] += 1
    with pytest.raises(
        QuantizationError, match=f"tensor '{name}': expected the values of .*, which are off by up to 0"
    ):
        check(tmp_path, source, changed)


def test_another_shape_is_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(QuantizationError, match="off by up to inf"):
        check(tmp_path, source, make_tensors() | {f"{NORM}.weight": torch.ones(8).bfloat16()})


@pytest.mark.parametrize("distance", [0, 1], ids=["plain", "from-one"])
def test_scales_that_were_moved_into_a_norm_are_undone_and_nothing_else_is(
    tmp_path: Path, source: Path, distance: int
) -> None:
    scales, tensors = torch.tensor([0.5, 1.25, 2.0, 3.0]), make_tensors()
    log = StepLog("awq")
    log.record_scales([LAYER], scales, smoothed=NORM)
    moved = ((tensors[f"{NORM}.weight"].float() + distance) / scales - distance).bfloat16()
    check(tmp_path, source, tensors | {f"{NORM}.weight": moved}, log)
    with pytest.raises(QuantizationError, match=f"tensor '{NORM}.weight'"):
        check_kept(source, source=source, plan=PLAN, log=log)


def test_scales_that_were_moved_into_a_layer_that_is_left_out_are_undone(tmp_path: Path, source: Path) -> None:
    scales, tensors = torch.tensor([0.5, 1.25, 2.0, 3.0]), make_tensors()
    log = StepLog("awq")
    log.record_scales([LAYER], scales, smoothed=BEFORE)
    for part in ("weight", "bias"):  # of its last channels, as of a fused layer
        tensors[f"{BEFORE}.{part}"][-4:] /= scales.view(-1, *[1] * (part == "weight"))
    check(tmp_path, source, tensors, log)


@pytest.mark.parametrize("name", [f"{BEFORE}.weight", f"{BEFORE}.bias", f"{LAYER}.bias"])
def test_small_values_that_became_zeros_are_refused_where_scales_were_moved_out(tmp_path: Path, name: str) -> None:
    """They are near one less than one, and only a norm may be stored as its distance from that."""
    tensors = {name: tensor / 100 if "proj" in name else tensor for name, tensor in make_tensors().items()}
    source, log = write(tmp_path / "source", tensors), StepLog("awq")
    scales = torch.ones(len(tensors[name]))
    log.record_scales(["model.layers.0.mlp.down_proj"], scales, smoothed=name.rpartition(".")[0])
    check_kept(source, source=source, plan=PLAN, log=log)
    with pytest.raises(QuantizationError, match=f"tensor '{name}'"):
        check(tmp_path, source, tensors | {name: torch.zeros_like(tensors[name])}, log)


def test_subnormal_values_are_as_coarse_as_their_type_has_them(tmp_path: Path) -> None:
    """A few of float16, in layers that smoothing changed and nothing quantised, refused the whole step."""
    scales, tensors = torch.tensor([0.7, 1.3, 2.1, 3.3]), make_tensors()
    tensors = {name: tensor.half() for name, tensor in tensors.items()}
    tensors[f"{NORM}.weight"] = torch.tensor([3e-6, -2e-6, 1e-5, 5e-7]).half()
    log = StepLog("rtn")
    log.record_scales([LAYER], scales, smoothed=NORM)
    moved = (tensors[f"{NORM}.weight"] / scales.half()).half()
    check(tmp_path, write(tmp_path / "source", tensors), tensors | {f"{NORM}.weight": moved}, log)
