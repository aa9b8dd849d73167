"""Measure that a VAE whose range was fixed is the same model with room to spare, or say which module is not.

Three things can go wrong with a range fix: the output changes (GroupNorm's epsilon is felt when a space is
scaled too far), a module that can't be scaled still overflows, or the scaled weights become subnormal in
the smaller dtype and lose digits. Each is measured in float32 and refused by module. A proof vouches for
the samples it was given and no others: an image decoded in the smaller dtype is still to be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from pipeline.errors import NumericsError
from pipeline.numerics.activation_watch import ActivationWatch
from pipeline.numerics.range_fix import (
    RangeFixPlan,
    read_weight,
    run_half,
)
from pipeline.numerics.residual_spaces import Part

Vae = TypeVar("Vae", bound=nn.Module)


@dataclass(frozen=True)
class RangeFixProof:
    """What was measured in float32 on the samples given; mappings are by module name."""

    dtype: torch.dtype
    max_difference: float  # of the output: for a decoder an image in [-1, 1]
    headroom_bits_before: Mapping[str, float]  # doublings left under the limit of `dtype`
    headroom_bits_after: Mapping[str, float]
    subnormal_fraction_before: Mapping[str, float]  # of a rescaled layer's weights, in `dtype`
    subnormal_fraction_after: Mapping[str, float]


def prove_range_fix(
    original: nn.Module,
    fixed: nn.Module,
    samples: torch.Tensor,
    *,
    plan: RangeFixPlan,
    dtype: torch.dtype = torch.float16,
    tolerance: float = 1e-3,
    min_headroom_bits: float = 1.0,
    max_subnormal_fraction: float = 0.25,
) -> RangeFixProof:
    """Measure that a fixed VAE is the same model with room to spare, or say which module is not.

    Args:
        original: the VAE before, in float32.
        fixed: the VAE after, in float32.
        samples: better others than those that the plan was made from.
        plan: what was applied.
        dtype: what the VAE will run in.
        tolerance: largest difference of the output; 1e-3 is an eighth of a grey level of a decoded image.
        min_headroom_bits: doublings that each module's largest magnitude must stay below the dtype's limit.
        max_subnormal_fraction: of any rescaled layer's weights; subnormals have fewer digits than the others.

    Raises:
        NumericsError: equality, headroom, weight range or subnormal fraction is not held; names the module.
    """
    with ActivationWatch(original) as before, ActivationWatch(fixed) as after:
        difference = (run_half(original, samples, plan.part) - run_half(fixed, samples, plan.part)).abs().max().item()
    if not difference <= tolerance:
        raise NumericsError(
            f"range fix: expected equal outputs within {tolerance:g}, got a difference of "
            f"{difference:.3g}, first at {_find_first_change(original, fixed, samples, plan.part)!r}; "
            "raise the target, since GroupNorm's epsilon is felt"
        )
    headrooms = [{name: r.headroom_bits(dtype) for name, r in watch.read().items()} for watch in (before, after)]
    for name, headroom in headrooms[1].items():
        if headroom < min_headroom_bits:
            raise NumericsError(
                f"range fix: expected {min_headroom_bits:g} doublings of headroom in {dtype}, "
                f"got {headroom:.2f} at {name!r}, which can't be scaled or has too high a target; "
                "lower the target or run this VAE in bfloat16 or float32"
            )
    names = [rescale.module for rescale in plan.rescales]
    shares = [{name: _subnormal_fraction(read_weight(vae, name), dtype) for name in names} for vae in (original, fixed)]
    for name in names:
        _check_weights(name, read_weight(fixed, name), shares[1][name], dtype, max_subnormal_fraction)
    return RangeFixProof(dtype, difference, headrooms[0], headrooms[1], shares[0], shares[1])


def _subnormal_fraction(weight: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the fraction of weights that are not zero but below the dtype's smallest normal number."""
    return ((weight != 0) & (weight.abs() < torch.finfo(dtype).smallest_normal)).double().mean().item()


def _check_weights(name: str, weight: torch.Tensor, share: float, dtype: torch.dtype, max_share: float) -> None:
    largest = weight.abs().max().item()
    if largest > torch.finfo(dtype).max:
        raise NumericsError(
            f"range fix: expected weights within {dtype}, got {largest:.3g} at {name!r}, between two "
            "spaces of very different scale; run this VAE in bfloat16 or float32"
        )
    if share > max_share:
        raise NumericsError(
            f"range fix: expected at most {max_share:.0%} of a layer's weights to be subnormal in "
            f"{dtype}, got {share:.0%} at {name!r}; raise the target"
        )


def _find_first_change(original: nn.Module, fixed: nn.Module, samples: torch.Tensor, part: Part) -> str:
    """Name the first GroupNorm whose output changed by a thousandth of its size, or else by most."""
    outputs: list[dict[str, torch.Tensor]] = []
    for vae in (original, fixed):
        kept: dict[str, torch.Tensor] = {}
        norms = [(name, module) for name, module in vae.named_modules() if isinstance(module, nn.GroupNorm)]
        handles = [
            m.register_forward_hook(lambda _m, _i, out, name=name, kept=kept: kept.update({name: out}))
            for name, m in norms
        ]
        run_half(vae, samples[:1], part)
        outputs.append(kept)
        for handle in handles:
            handle.remove()
    changes = {name: ((a - outputs[1][name]).abs().max() / a.abs().max()).item() for name, a in outputs[0].items()}
    worst = max(changes, key=lambda name: changes[name])
    return next((name for name, change in changes.items() if not change <= 1e-3), worst)
