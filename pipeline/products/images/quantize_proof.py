"""Prove what a quantised part's folder holds, by reading it back: layers, formats, sizes, and each weight's error.

A wrong scale, a layer that stayed float, rounding by anything but the nearest number, and any other tensor that is not
its source's are refused before an image is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import CheckpointError
from pipeline.products.images.folders import read_part
from pipeline.products.images.settings import QuantizeStep
from pipeline.records.evaluations import LayerCoverage
from pipeline.running.weight_files import TensorInfo

NUMBERS, SCALE, ZERO_POINT = "_weight_qdata", "_weight_scale", "_weight_zero_point"  # as torchao names them
_FORMATS = {"I8": "int8", "F8_E4M3": "float8_e4m3fn", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SPELT = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# the share by which float32's own rounding may exceed a bound
_SLACK = 1e-3
# of E4M3: half the spacing of numbers beside a number, as a share of it, and below the smallest normal number
_FLOAT8_SHARE, _FLOAT8_LEAST = 2.0**-4, 2.0**-10
_MOST_STEPS = 127.5  # of INT8, on each side of zero: the largest weight of a row lies half a step beyond the last


@dataclass(frozen=True)
class QuantizeProof:
    """What was read back."""

    coverage: tuple[LayerCoverage, ...]
    record: dict[str, Any]


def prove_quantized(made: Path, source: Path, step: QuantizeStep, asked: list[str], layers: list[str]) -> QuantizeProof:
    """Refuse a folder that is not its source, quantised as it was asked; return what it holds.

    Args:
        made: folder of the part as written.
        source: of the part with float weights.
        step: what was asked for.
        asked: the layers that it names.
        layers: all linear layers of the part, in its order.

    Raises:
        CheckpointError: names the layer, what was expected and what is there.
    """
    tensors, exact = read_part(made), read_part(source)
    _check_names(made, source, tensors, exact, step, asked)
    shares: dict[str, float] = {}
    with open_part(made, tensors) as read, open_part(source, exact) as read_float:
        for layer in asked:
            shares[layer] = _check_layer(f"{made}: {layer}", layer, read, read_float, step)
        quantised = {f"{layer}.weight" for layer in asked}
        for name in sorted(exact.keys() - quantised):
            wanted = read_float(name).to(getattr(torch, step.dtype))
            if not torch.equal(read(name), wanted):
                raise CheckpointError(f"{made}: {name}: expected the tensor of {source} in {step.dtype}, found another")
    coverage = tuple(
        LayerCoverage(
            layer=layer,
            format=_name_format(tensors, layer, step),
            num_bytes=_count_bytes(tensors, layer),
            asked=layer in set(asked),
        )
        for layer in layers
    )
    before, after = (sum(info.num_bytes for info in stored.values()) for stored in (exact, tensors))
    worst = max(shares, key=lambda layer: shares[layer])
    record = {
        "num_bytes_before": before,
        "num_bytes_after": after,
        "worst_layer": worst,
        "worst_error": round(shares[worst], 4),  # 1 is as far as the format can explain
    }
    return QuantizeProof(coverage, {"quantized": record})


def _check_names(
    made: Path,
    source: Path,
    tensors: Mapping[str, TensorInfo],
    exact: Mapping[str, TensorInfo],
    step: QuantizeStep,
    asked: list[str],
) -> None:
    keys = (NUMBERS, SCALE, ZERO_POINT) if step.number_format == "int8" else (NUMBERS, SCALE)
    for layer in asked:
        if f"{layer}.weight" in tensors:
            raise CheckpointError(
                f"{made}: {layer}: expected weights in {step.number_format}, as was asked, found float ones; diffusers "
                "left it out: name it in exclude"
            )
    expected = {name: _SPELT[step.dtype] for name in exact if name not in {f"{layer}.weight" for layer in asked}}
    spelt = {"int8": "I8", "float8_e4m3fn": "F8_E4M3"}[step.number_format]
    kinds = {NUMBERS: spelt, SCALE: "F32", ZERO_POINT: "I8"}
    expected |= {f"{layer}.{key}": kinds[key] for layer in asked for key in keys}
    if wrong := sorted(tensors.keys() ^ expected.keys()):
        raise CheckpointError(
            f"{made}: expected the tensors of {source} and those of quantised layers, {wrong[0]!r} is "
            f"{'one too many' if wrong[0] in tensors else 'missing'}"
        )
    for name, kind in expected.items():
        if (came := tensors[name].dtype) != kind:
            raise CheckpointError(f"{made}: {name}: expected {_FORMATS[kind]}, found {_FORMATS.get(came, came)}")


def _check_layer(
    where: str, layer: str, read: Callable[[str], Any], read_float: Callable[[str], Any], step: QuantizeStep
) -> float:
    """Refuse a layer that is further from its source than its format explains; return the largest share of that."""
    exact = read_float(f"{layer}.weight").to(getattr(torch, step.dtype)).double()
    numbers, scale = read(f"{layer}.{NUMBERS}"), read(f"{layer}.{SCALE}")
    if numbers.shape != exact.shape or scale.shape != (len(exact), 1):
        raise CheckpointError(
            f"{where}: expected weights of shape {tuple(exact.shape)} and a scale for each of {len(exact)} rows, got "
            f"{tuple(numbers.shape)} and {tuple(scale.shape)}"
        )
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(f"{where}: {SCALE}: expected finite positive scales, got others")
    steps, held = scale.double(), numbers.to(torch.float32).double()  # which compares no floats of eight bits
    if step.number_format == "int8":
        points = read(f"{layer}.{ZERO_POINT}")
        if points.shape != scale.shape or bool(points.any()):
            raise CheckpointError(f"{where}: {ZERO_POINT}: expected zeros, one a row, got others")
        # torchao finds a scale in the format of the weights. In float16 it may come out too small, so that the largest
        # weight is cut; bfloat16 rounds every quotient by 127.5 upwards
        rounding = torch.finfo(torch.float16).eps / 2 if step.dtype == "float16" else 0.0
        limits = steps * (0.5 + _MOST_STEPS * rounding)
    else:
        limits = torch.maximum(exact.abs() * _FLOAT8_SHARE, steps * _FLOAT8_LEAST)
    shares = ((held * steps - exact).abs() / limits).amax(1)
    worst = int(shares.nan_to_num(nan=float("inf")).argmax())
    if not bool(shares[worst] <= 1 + 2 * _SLACK):  # NaN is refused
        raise CheckpointError(
            f"{where}: expected each weight within half a step of {step.number_format} of its source, row {worst} has "
            f"one {shares[worst] / 2:.2f} steps away: its scale is wrong, or it was rounded otherwise"
        )
    return float(shares[worst])


def _name_format(tensors: Mapping[str, TensorInfo], layer: str, step: QuantizeStep) -> str:
    stored = tensors.get(f"{layer}.{NUMBERS}") or tensors[f"{layer}.weight"]
    name = _FORMATS.get(stored.dtype, stored.dtype)
    return f"{name} with inputs in it" if step.rounds_inputs and f"{layer}.{NUMBERS}" in tensors else name


def _count_bytes(tensors: Mapping[str, TensorInfo], layer: str) -> int:
    return sum(info.num_bytes for name, info in tensors.items() if name.rpartition(".")[0] == layer)


@contextmanager
def open_part(part: Path, tensors: Mapping[str, TensorInfo]) -> Iterator[Callable[[str], Any]]:
    """Open all files of a component, and give a function that returns a tensor by its name."""
    from safetensors import safe_open

    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(part / file, framework="pt"))
            for file in sorted({info.file for info in tensors.values()})
        }
        yield lambda name: opened[tensors[name].file].get_tensor(name)
