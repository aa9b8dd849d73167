"""Prove what a quantised network's folder holds, by reading it back: layers, scales, and each weight's error.

A wrong scale or zero point, a layer that stayed float, rounding by anything but the nearest step, and any other tensor
that is not its source's are refused before anything is evaluated. Not covered: an observer that chose too small a range
for an input, which clips. Evaluating it shows that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from pipeline.errors import CheckpointError
from pipeline.products.vision.int8_conv import INPUT_SCALE, INPUT_ZERO_POINT, MAX_INPUT, SCALE, list_stored
from pipeline.products.vision.quantize import InputRange
from pipeline.records.evaluations import LayerCoverage
from pipeline.running.weight_files import TensorInfo, open_weights, read_tensors

# the share by which float32's own rounding may exceed a bound
_SLACK = 1e-3
_FORMATS = {"I8": "int8", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_quantized(folder: Path, source: Path, ranges: Mapping[str, InputRange], layers: list[str]) -> None:
    """Refuse a folder that is not its source, quantised as it was asked.

    Args:
        folder: what was written.
        source: the network's float weights.
        ranges: of each layer that was asked for, as calibration saw its input.
        layers: all convolutions of the network.

    Raises:
        CheckpointError: names the layer, what was expected and what is there.
    """
    tensors, exact = read_tensors(folder), read_tensors(source)
    stored = list_stored({name: info.dtype for name, info in tensors.items()})
    for name in layers:
        if (name in ranges) != (name in stored):
            asked, came = ("INT8", "float") if name in ranges else ("float", "INT8")
            raise CheckpointError(f"{folder}: {name}: expected {asked} weights, as was asked, found {came} ones")
    added = {f"{name}.{key}" for name in ranges for key in (SCALE, INPUT_SCALE, INPUT_ZERO_POINT)}
    if wrong := sorted(tensors.keys() ^ (exact.keys() | added)):
        raise CheckpointError(
            f"{folder}: expected the tensors of {source} and the scales of layers in INT8, {wrong[0]!r} is "
            f"{'one too many' if wrong[0] in tensors else 'missing'}"
        )
    with open_weights(folder) as read, open_weights(source) as read_float:
        for name, given in ranges.items():
            where = f"{folder}: {name}"
            _check_input(where, read(f"{name}.{INPUT_SCALE}"), read(f"{name}.{INPUT_ZERO_POINT}"), given)
            _check_weight(where, read(f"{name}.weight"), read(f"{name}.{SCALE}"), read_float(f"{name}.weight").float())
        for name in sorted(exact.keys() - {f"{layer}.weight" for layer in ranges}):
            came, wanted = read(name), read_float(name)
            if came.dtype != wanted.dtype or not torch.equal(came, wanted):
                raise CheckpointError(f"{folder}: {name}: expected the tensor of {source}, found another")


def _check_input(where: str, scale: torch.Tensor, zero_point: torch.Tensor, given: InputRange) -> None:
    """Refuse numbers that calibration did not find, and those it found if they reach beyond what it saw."""
    if scale.shape or zero_point.shape:
        raise CheckpointError(f"{where}: expected one {INPUT_SCALE} and one {INPUT_ZERO_POINT}, found more")
    value, point = scale.item(), zero_point.item()
    for key, came, found in ((INPUT_SCALE, value, given.scale), (INPUT_ZERO_POINT, point, given.zero_point)):
        if came != found:  # NaN is refused
            raise CheckpointError(f"{where}: {key}: expected {found:.6g}, which calibration found, got {came:.6g}")
    # a range without width has a scale of its own
    least = torch.finfo(torch.float32).eps
    widest = max((given.high - given.low) / MAX_INPUT, least) * (1 + _SLACK)
    if not 0 < value <= widest:
        raise CheckpointError(
            f"{where}: {INPUT_SCALE}: expected a step up to {widest:.4g}, as calibration saw "
            f"{given.low:.4g} to {given.high:.4g}, got {value:.4g}"
        )
    ends, over = (-point * value, (MAX_INPUT - point) * value), max(value, MAX_INPUT * least)
    if not (0 <= point <= MAX_INPUT and given.low - over <= ends[0] and ends[1] <= given.high + over):
        raise CheckpointError(
            f"{where}: {INPUT_ZERO_POINT}: expected steps within {given.low:.4g} to {given.high:.4g}, which "
            f"calibration saw, got {ends[0]:.4g} to {ends[1]:.4g} by a zero point of {point}"
        )


def _check_weight(where: str, weight: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor) -> None:
    if weight.shape != exact.shape or scale.shape != exact.shape[:1]:
        raise CheckpointError(
            f"{where}: expected weights of shape {tuple(exact.shape)} and a scale for each of {len(exact)} channels, "
            f"got {tuple(weight.shape)} and {tuple(scale.shape)}"
        )
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(f"{where}: {SCALE}: expected finite positive scales, got others")
    steps = scale.double()[:, None, None, None]
    errors = ((weight.double() * steps - exact.double()).abs() / steps).flatten(1).amax(1)
    worst = int(errors.argmax())
    if errors[worst] > 0.5 + _SLACK:
        raise CheckpointError(
            f"{where}: expected each weight within half a step of its float value, channel {worst} has one "
            f"{errors[worst]:.2f} steps away: its scale is wrong, or it was rounded otherwise"
        )


def read_coverage(folder: Path, ranges: Mapping[str, InputRange], layers: list[str]) -> tuple[LayerCoverage, ...]:
    """Return the format in which each convolution's weight is stored, by the headers of what was written."""
    tensors = read_tensors(folder)
    return tuple(
        LayerCoverage(
            layer=name,
            format=_FORMATS.get(dtype := tensors[f"{name}.weight"].dtype, dtype),
            num_bytes=_count_bytes(tensors, name),
            asked=name in ranges,
        )
        for name in layers
        if f"{name}.weight" in tensors  # else it is computed from others, and a fallback says so
    )


def _count_bytes(tensors: Mapping[str, TensorInfo], layer: str) -> int:
    return sum(info.num_bytes for name, info in tensors.items() if name.rpartition(".")[0] == layer)
