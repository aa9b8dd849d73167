"""Quantised weights are held against those they were made from: what rounding can't explain is refused.

The folders are written here, by rounding to nearest as the formula says, so no quantisation library is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from pipeline.errors import QuantizationError
from pipeline.products.text.optimize import reconstruction
from pipeline.products.text.optimize.layers import LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.optimize.reconstruction import check_reconstruction
from pipeline.products.text.step_settings import Calibration, QuantizeStep

LAYER, SHAPE, GROUP = "model.layers.0.mlp.down_proj", (24, 128), 32
CALIBRATION = Calibration(sources=["prose"], num_samples=1, max_tokens=8, length_exponent=0.0)


def make_step(kind: str, *, symmetric: bool = True) -> QuantizeStep:
    settings: dict[str, Any] = {"kind": kind, "group_size": GROUP, "symmetric": symmetric, "calibration": CALIBRATION}
    return QuantizeStep(**settings, num_grid_points=3) if kind == "awq" else QuantizeStep(**settings)


def write_folder(folder: Path, tensors: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    named = {f"{LAYER}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return folder


def round_to_nearest(weight: torch.Tensor, *, symmetric: bool) -> dict[str, Any]:
    """Quantise to 4 bits as compressed-tensors stores it."""
    groups = weight.float().reshape(SHAPE[0], -1, GROUP)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = (torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15).bfloat16()
    zero = torch.zeros_like(low) if symmetric else (-8 - low / scale.float()).round().clamp(-8, 7)
    values = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(-8, 7).reshape(SHAPE)
    parts = {"weight_packed": pack_to_int32(values.to(torch.int8), 4), "weight_scale": scale}
    return parts if symmetric else parts | {"weight_zero_point": pack_to_int32(zero.to(torch.int8), 4, packed_dim=0)}


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture
def source(tmp_path: Path, weight: torch.Tensor) -> Path:
    return write_folder(tmp_path / "source", {"weight": weight})


def check(folder: Path, source: Path, step: QuantizeStep, log: StepLog | None = None) -> None:
    plan = LayerPlan({LAYER: SHAPE}, {}, {LAYER: step.resolve()})
    check_reconstruction(folder, source=source, step=step, plan=plan, log=log or StepLog(step.algorithm, total=1))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero-points"])
@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_weights_that_were_rounded_pass(
    tmp_path: Path, source: Path, weight: torch.Tensor, kind: str, symmetric: bool
) -> None:
    folder = write_folder(tmp_path / "out", round_to_nearest(weight, symmetric=symmetric))
    check(folder, source, make_step(kind, symmetric=symmetric))


def stretch(parts: dict[str, Any]) -> None:
    parts["weight_scale"][3, 2] *= 1.5


def shift_zero(parts: dict[str, Any]) -> None:
    weights = parts["weight_packed"]
    # adding 1 to every nibble would carry: values are unpacked, moved and packed again
    nibbles = torch.stack([(weights >> (4 * i)) & 15 for i in range(8)], dim=-1).reshape(SHAPE)
    parts["weight_packed"] = pack_to_int32(((nibbles - 8) + 1).clamp(-8, 7).to(torch.int8), 4)


def drop_bit(parts: dict[str, Any]) -> None:
    parts["weight_packed"] = parts["weight_packed"] & -0x11111112  # the lowest bit of each nibble


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("awq", stretch, "group 2 of row 3 is .* its scale or its values are wrong"),
        ("awq", shift_zero, r"\+0.9\d steps from the source's on average.* zero-point is wrong"),
        ("gptq", shift_zero, r"\+0.9\d steps from the source's on average.* zero-point is wrong"),
        ("awq", drop_bit, "steps from the source's"),
    ],
    ids=["scale", "zero-point", "zero-point-gptq", "three-bits"],
)
def test_what_rounding_does_not_explain_is_refused(
    tmp_path: Path, source: Path, weight: torch.Tensor, kind: str, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    parts = round_to_nearest(weight, symmetric=True)
    change(parts)
    with pytest.raises(QuantizationError, match=f"layer '{LAYER}': .*{said}"):
        check(write_folder(tmp_path / "out", parts), source, make_step(kind))


def test_scales_that_awq_moved_are_undone_and_nothing_else_is(
    tmp_path: Path, source: Path, weight: torch.Tensor
) -> None:
    columns, rows = torch.linspace(0.5, 2, SHAPE[1]), torch.linspace(1, 3, SHAPE[0])
    moved = weight.float() * columns / rows.view(-1, 1)
    folder = write_folder(tmp_path / "out", round_to_nearest(moved, symmetric=True))
    log = StepLog("awq", total=1)
    log.record_scales([LAYER], columns, smoothed="norm")
    with pytest.raises(QuantizationError, match="its scale or its values are wrong"):
        check(folder, source, make_step("awq"), log)
    log.record_scales(["model.layers.0.mlp.next"], rows, smoothed=LAYER)
    check(folder, source, make_step("awq"), log)


def test_gptq_may_make_up_for_errors_by_others(tmp_path: Path, source: Path, weight: torch.Tensor) -> None:
    parts = round_to_nearest(weight, symmetric=True)
    steps = torch.randint(-2, 3, SHAPE, generator=torch.Generator().manual_seed(1))
    nudged = weight.float() + steps * parts["weight_scale"].float().repeat_interleave(GROUP, 1)
    values = (nudged / parts["weight_scale"].float().repeat_interleave(GROUP, 1)).round().clamp(-8, 7).to(torch.int8)
    folder = write_folder(tmp_path / "out", parts | {"weight_packed": pack_to_int32(values, 4)})
    check(folder, source, make_step("gptq"))


def test_a_layer_that_the_source_calls_otherwise_is_a_fallback(
    tmp_path: Path, source: Path, weight: torch.Tensor
) -> None:
    tensors = load_file(source / "model.safetensors")
    save_file({"other.weight": tensors[f"{LAYER}.weight"]}, source / "model.safetensors")
    log = StepLog("awq", total=1)
    check(write_folder(tmp_path / "out", round_to_nearest(weight, symmetric=True)), source, make_step("awq"), log)
    assert [fallback.layer for fallback in log.fallbacks] == [LAYER]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_values", [64, 40, 13])
def test_values_are_unpacked_as_the_library_packs_them(bits: int, num_values: int) -> None:
    limit = 2 ** (bits - 1)
    values = torch.randint(-limit, limit, (3, num_values), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    unpacked = reconstruction._unpack(pack_to_int32(values, bits), bits)[:, :num_values]
    assert (unpacked.int() - limit).tolist() == values.tolist()


def test_a_layer_in_parts_is_judged_as_a_whole(
    tmp_path: Path, source: Path, weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reconstruction._CHUNK_WEIGHTS, "cpu", 5 * SHAPE[1])  # the last part is shorter
    parts = round_to_nearest(weight, symmetric=False)
    check(write_folder(tmp_path / "out", parts), source, make_step("awq", symmetric=False))
    parts["weight_scale"][22, 1] *= 1.5
    before = torch.get_num_threads()
    with pytest.raises(QuantizationError, match="group 1 of row 22 is"):
        check(write_folder(tmp_path / "wrong", parts), source, make_step("awq", symmetric=False))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, source: Path, weight: torch.Tensor, kind: str) -> None:
    parts = round_to_nearest(weight, symmetric=True)
    parts["weight_scale"][3, 2] = float("nan")
    with pytest.raises(QuantizationError, match="nan steps from the source's on average"):
        check(write_folder(tmp_path / "out", parts), source, make_step(kind))
