"""Quantise the convolutions of a network to INT8 after training, and write them as safetensors.

    plan = plan_layers(network.module, exclude=["head.*"])
    ranges = observe(network, plan.layers, inputs, observer="histogram")
    write_quantized(folder, source, ranges)

torchao finds the scales: its observers see the input of each layer on calibration pictures, and its weights, as in its
PT2E flow for x86. One setting differs. That flow lets no scale fall below 2^-12. A channel of small weights then keeps
few of its 255 steps, so here the observers' own limit holds, the spacing of float32.

A BatchNorm is not folded into the convolution before it: with a scale for each channel that changes no rounding, and
torch.compile fuses it. Not covered: correction of biases, and equalisation of scales across layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.errors import NumericsError, SettingsError
from pipeline.products.vision.conv_policy import format_miss, list_convolutions, list_others
from pipeline.products.vision.files import CONFIG_FILE
from pipeline.products.vision.int8_conv import (
    INPUT_SCALE,
    INPUT_ZERO_POINT,
    MAX_INPUT,
    SCALE,
    explain_float,
    find_int8,
)
from pipeline.products.vision.loading import Network
from pipeline.records.files import replace_whole
from pipeline.running.weight_files import WEIGHTS_FILE, iterate_weights

Observer = Literal["minmax", "histogram"]

WEIGHT_LIMITS = (-128, 127)


@dataclass(frozen=True)
class QuantizePlan:
    """Which convolutions are quantised, in the network's order, and which can't be though no pattern excludes them."""

    layers: tuple[str, ...]
    fallbacks: tuple[tuple[str, str], ...]  # layer and reason


@dataclass(frozen=True)
class InputRange:
    """How the input of a layer is rounded, and what was seen of it."""

    scale: float
    zero_point: int
    low: float
    high: float  # both with zero between them, which padding is


def plan_layers(module: nn.Module, exclude: Sequence[str]) -> QuantizePlan:
    """Choose the convolutions that are quantised.

    Args:
        module: its layer names are what `named_modules` gives.
        exclude: names of layers that stay as they are, or shell patterns of them.

    Raises:
        SettingsError: a pattern matches no convolution, nothing is left, or some layer is in INT8 already.
    """
    covered, others = list_convolutions(module), list_others(module)
    if done := find_int8(module):
        raise SettingsError(f"expected float weights to quantise, found {done!r} in INT8; name the float checkpoint")
    for i, pattern in enumerate(exclude):
        if not any(fnmatchcase(name, pattern) for name in covered):
            raise SettingsError(f"exclude.{i}: {format_miss(pattern, covered, others)}")
    left = [name for name in covered if not any(fnmatchcase(name, pattern) for pattern in exclude)]
    shared = _list_shared(module)
    reasons = {name: "it has two names" if name in shared else explain_float(covered[name]) for name in left}
    layers = tuple(name for name in left if not reasons[name])
    if not layers:
        why = next((f"{name}: {reason}" for name, reason in reasons.items() if reason), "")
        why = why or (f"exclude names all {len(covered)}" if covered else "this network has no Conv2d")
        raise SettingsError(f"expected convolutions to quantise, found none: {why}; remove the step")
    missed = {name: f"{reason}: it stays float" for name, reason in reasons.items() if reason}
    missed |= {name: f"{type(part).__name__} is not covered: it stays float" for name, part in others.items()}
    return QuantizePlan(layers, tuple(missed.items()))


def _list_shared(module: nn.Module) -> set[str]:
    """Return the first names of modules that have another one, under which their weights are stored again."""
    first: dict[int, str] = {}
    shared = set()
    for name, part in module.named_modules(remove_duplicate=False):
        if first.setdefault(id(part), name) != name:
            shared.add(first[id(part)])
    return shared


def observe(
    network: Network, layers: Sequence[str], inputs: Iterable[tuple[str, torch.Tensor]], *, observer: Observer
) -> dict[str, InputRange]:
    """Run calibration pictures through a network in float32; return how the input of each layer is rounded.

    Args:
        network: in float32.
        layers: that are quantised.
        inputs: the name of each picture, and the module's input of it.
        observer: of torchao.

    Raises:
        NumericsError: NaN or infinity on the way to a layer, or one that never ran.
    """
    watchers = {name: _Watcher(name, _make_observer(observer)) for name in layers}
    with ExitStack() as stack:
        for name, watcher in watchers.items():
            hook = network.module.get_submodule(name).register_forward_pre_hook(partial(_watch, watcher))
            stack.callback(hook.remove)
        for picture, x in inputs:
            network.run(x)
            if broken := next((watcher for watcher in watchers.values() if not watcher.is_finite), None):
                raise NumericsError(
                    f"{broken.name}: expected finite inputs to calibrate on, got NaN or infinity on calibration "
                    f"picture {picture!r}; mend the network, or take the picture out"
                )
    return {name: watcher.read() for name, watcher in watchers.items()}


class _Watcher:
    """What one layer's input ranges over."""

    def __init__(self, name: str, observer: Any) -> None:
        self.name, self.observer = name, observer
        self.low = self.high = 0.0
        self.num_calls, self.is_finite = 0, True

    def add(self, x: torch.Tensor) -> None:
        low, high = (value.item() for value in x.aminmax())
        self.num_calls += 1
        self.is_finite &= abs(low) < float("inf") and abs(high) < float("inf")  # false of NaN, too
        if self.is_finite:
            self.low, self.high = min(self.low, low), max(self.high, high)
            self.observer(x)

    def read(self) -> InputRange:
        if not self.num_calls:
            raise NumericsError(
                f"{self.name}: expected a layer that calibration pictures reach, it never ran; add it to exclude"
            )
        scale, zero_point = self.observer.calculate_qparams()
        return InputRange(scale.item(), int(zero_point.item()), self.low, self.high)


def _watch(watcher: _Watcher, _module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    watcher.add(given[0])


def _make_observer(name: Observer) -> Any:
    from torchao.quantization.pt2e import observer as library

    made = {"minmax": library.MinMaxObserver, "histogram": library.HistogramObserver}[name]
    return made(dtype=torch.uint8, quant_min=0, quant_max=MAX_INPUT, qscheme=torch.per_tensor_affine)


def write_quantized(folder: Path, source: Path, ranges: Mapping[str, InputRange]) -> None:
    """Write config and weights of a network whose layers are quantised; all other tensors are copied.

    Args:
        folder: what is written; there is none yet.
        source: the network's folder.
        ranges: of the layers that are quantised.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in iterate_weights(source):
        layer = name.removesuffix(".weight")
        if layer == name or layer not in ranges:
            tensors[name] = tensor
            continue
        given = ranges[layer]
        tensors[name], tensors[f"{layer}.{SCALE}"] = quantize_weight(tensor.float())
        tensors[f"{layer}.{INPUT_SCALE}"] = torch.tensor(given.scale, dtype=torch.float32)
        tensors[f"{layer}.{INPUT_ZERO_POINT}"] = torch.tensor(given.zero_point, dtype=torch.int32)
    folder.mkdir(parents=True)
    shutil.copyfile(source / CONFIG_FILE, folder / CONFIG_FILE)
    with replace_whole(folder / WEIGHTS_FILE) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 weights and the scale of each output channel, of float32 (outputs, inputs, rows, columns)."""
    from torchao.quantization.pt2e.observer import PerChannelMinMaxObserver

    low, high = WEIGHT_LIMITS
    observer = PerChannelMinMaxObserver(
        ch_axis=0, dtype=torch.int8, quant_min=low, quant_max=high, qscheme=torch.per_channel_symmetric
    )
    observer(weight)
    scale, _ = observer.calculate_qparams()
    rounded = (weight / scale[:, None, None, None]).round().clamp(low, high)
    return rounded.to(torch.int8), scale.float()
