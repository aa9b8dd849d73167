"""Rescale a diffusers AutoencoderKL so that its activations fit in float16 and its output stays what it was.

A decoder's residual stream may grow beyond 65,504, where float16 ends, although every GroupNorm on the
way takes the size out again. So the stream can be smaller by any factor: what writes it is scaled by s,
the next GroupNorm absorbs it, and a layer between two spaces (`residual_spaces`) is scaled by the ratio.
Scales are powers of two, which are exact in float32, and never above 1.

What can't be scaled: the input of conv2 and whatever else lies between a norm and the next layer, since
SiLU is not homogeneous, and an attention's queries and keys. And GroupNorm adds an epsilon to the
variance, so a scale that is far too small gives another model. So nothing here is believed until
`range_proof` has measured it. Ranges come from `activation_watch`, the one implementation of the hooks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.errors import NumericsError
from pipeline.numerics.activation_watch import ActivationWatch, ModuleRange
from pipeline.numerics.residual_spaces import UNSCALED, Part, trace_spaces

TARGET_ABSMAX = 4096.0  # four doublings under float16's limit; much smaller, and GroupNorm's epsilon is felt


@dataclass(frozen=True)
class Rescale:
    """What one layer's parameters are multiplied with; powers of two."""

    module: str
    weight_scale: float
    bias_scale: float
    weight_absmax: float  # of the layer that was planned for, so that a plan is applied once and to that model


@dataclass(frozen=True)
class RangeFixPlan:
    """The scale of each space, and what to multiply for it. Without rescales nothing needs a fix."""

    part: Part
    scales: Mapping[str, float]
    rescales: tuple[Rescale, ...]


def measure_activations(vae: nn.Module, samples: torch.Tensor, *, part: Part = "decoder") -> dict[str, ModuleRange]:
    """Run half a VAE in float32, one sample at a time, and return the range of what each module wrote.

    Args:
        vae: an AutoencoderKL in float32.
        samples: latents of shape (n, channels, height, width) as `vae.decode` takes them; images for the encoder.
        part: which half to run.

    Raises:
        NumericsError: the VAE is not in float32.
    """
    with ActivationWatch(vae) as watch:
        run_half(vae, samples, part)
    return watch.read()


def plan_range_fix(
    vae: nn.Module, ranges: Mapping[str, ModuleRange], *, part: Part = "decoder", target: float = TARGET_ABSMAX
) -> RangeFixPlan:
    """Choose the largest power of two, at most 1, that brings each space to the target.

    Args:
        vae: the model that was measured.
        ranges: from `measure_activations` on the same model and part.
        part: which half.
        target: largest magnitude wanted in a scaled space.

    Raises:
        NumericsError: an unknown layout, a module that was not measured, or one that overflows even in float32.
    """
    spaces = trace_spaces(vae, part)
    scales = {UNSCALED: 1.0}
    for space, members in spaces.members.items():
        absmax = max(_read_absmax(ranges, name) for name in members)
        scales[space] = min(1.0, 2.0 ** math.floor(math.log2(target / absmax))) if absmax > 0 else 1.0
    rescales = []
    for edge in spaces.edges:
        weight_scale, bias_scale = scales[edge.target] / scales[edge.source], scales[edge.target]
        if (weight_scale, bias_scale) != (1.0, 1.0):
            absmax = read_weight(vae, edge.module).abs().max().item()
            rescales.append(Rescale(edge.module, weight_scale, bias_scale, absmax))
    return RangeFixPlan(part, {k: v for k, v in scales.items() if k != UNSCALED}, tuple(rescales))


@torch.no_grad()
def apply_range_fix(vae: nn.Module, plan: RangeFixPlan) -> None:
    """Multiply the planned layers in place; all or, on an error, none.

    Raises:
        NumericsError: not in float32, or a layer's weights are not those that were planned for.
    """
    _require_float32(vae)
    for rescale in plan.rescales:
        absmax = read_weight(vae, rescale.module).abs().max().item()
        if absmax != rescale.weight_absmax:
            raise NumericsError(
                f"range fix: expected {rescale.module!r} with a largest weight of "
                f"{rescale.weight_absmax!r}, found {absmax!r}; this plan is for another model "
                "or was applied already: plan again"
            )
    for rescale in plan.rescales:
        layer: Any = vae.get_submodule(rescale.module)
        layer.weight.mul_(rescale.weight_scale)
        if layer.bias is not None:
            layer.bias.mul_(rescale.bias_scale)


@torch.no_grad()
def run_half(vae: Any, samples: torch.Tensor, part: Part) -> torch.Tensor:
    """Run one half in float32 on one sample after the other, past the VAE's own slicing and tiling.

    Raises:
        NumericsError: the VAE is not in float32.
    """
    _require_float32(vae)
    first = getattr(vae, "post_quant_conv", None) if part == "decoder" else None
    last = getattr(vae, "quant_conv", None) if part == "encoder" else None
    half = vae.decoder if part == "decoder" else vae.encoder
    outputs = []
    for sample in samples.float().split(1):
        output = half(sample if first is None else first(sample))
        outputs.append(output if last is None else last(output))
    return torch.cat(outputs)


def read_weight(vae: nn.Module, name: str) -> torch.Tensor:
    """Return a layer's weights, detached."""
    weight: Any = vae.get_submodule(name).weight
    return weight.detach()


def _require_float32(vae: nn.Module) -> None:
    dtypes = {parameter.dtype for parameter in vae.parameters()} - {torch.float32}
    if dtypes:
        raise NumericsError(f"range fix: expected a VAE in torch.float32, found {dtypes.pop()}; load it in float32")


def _read_absmax(ranges: Mapping[str, ModuleRange], name: str) -> float:
    if name not in ranges:
        raise NumericsError(f"range fix: expected a measured range of {name!r}, found none; measure this part first")
    if math.isinf(ranges[name].absmax):
        raise NumericsError(
            f"range fix: expected finite activations in float32, found NaN or infinity at {name!r}; "
            "check the weights and the latents"
        )
    return ranges[name].absmax
