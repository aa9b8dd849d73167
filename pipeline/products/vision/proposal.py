"""Propose a convolution policy from a network's own numbers on calibration images.

    proposals = propose_policy(network, images, dtype="float16")
    apply_policy(network, make_policy(proposals))

The float32 network runs on each image; every convolution is tried with each algorithm on the very input it gets there,
the one with fewest multiplications first. The first that fits is kept: the largest number it stores (transformed
inputs, sums of products, output) lies some doublings below the dtype's end. It gives no NaN or infinity, and is near
enough to the float32 result. Where even the direct sum lacks the range, bfloat16 has it.

The images must not be those that the candidate is evaluated on. What they do not show, a proposal does not know:
`min_headroom_bits` is for pictures that excite a layer more. Each error is of one layer; the evaluation shows the error
of the network's result. How long an algorithm takes is not looked at: multiplications are counted from shapes, without
the transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.errors import NumericsError
from pipeline.numerics.winograd import store_winograd
from pipeline.products.vision.conv_policy import (
    TILES,
    TORCH_DTYPES,
    Algorithm,
    ConvArithmetic,
    Dtype,
    convolve,
    explain_no_winograd,
    find_padding,
    list_convolutions,
)
from pipeline.products.vision.layer_numerics import RunningError, shorten

NAMES = {"winograd_f43": "F(4,3)", "winograd_f23": "F(2,3)", "direct": "direct"}
_ORDER: tuple[Algorithm, ...] = ("winograd_f43", "winograd_f23", "direct")  # fewest multiplications first
_MAX_OVER_DIRECT = 2.0  # an algorithm's error over that of the direct sum, where that is beyond the limit itself


@dataclass(frozen=True)
class LayerProposal:
    """What one convolution should run, and why."""

    layer: str
    algorithm: Algorithm
    dtype: Dtype
    reason: str  # one line, with the numbers
    numbers: dict[str, dict[str, Any]]  # as JSON, by what was tried: "winograd_f43 float16"
    can_run_winograd: bool
    multiplications: int  # over all calibration images
    direct_multiplications: int


class _Trial:
    """One arithmetic of one layer over all images."""

    def __init__(self, arithmetic: ConvArithmetic) -> None:
        self.arithmetic, self.error = arithmetic, RunningError()
        self.largest, self.step = 0.0, "input"
        self.nonfinite_count = self.multiplications = 0

    @property
    def headroom_bits(self) -> float:
        if not 0 < self.largest < math.inf:
            return -math.inf if self.largest else math.inf
        return math.log2(torch.finfo(TORCH_DTYPES[self.arithmetic.dtype]).max / self.largest)

    def run(self, conv: nn.Conv2d, x: torch.Tensor, expected: torch.Tensor) -> None:
        actual = convolve(conv, x, self.arithmetic)
        self.error.add(expected, actual)
        self.nonfinite_count += actual.numel() - int(actual.isfinite().sum())
        self.multiplications += _count_multiplications(conv, expected, self.arithmetic.algorithm)
        for step, values in _list_stored(conv, x, expected, self.arithmetic.algorithm):
            if (largest := torch.linalg.vector_norm(values, math.inf).item()) > self.largest:
                self.largest, self.step = largest, step

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as JSON, to five significant digits; None for what is not finite."""
        return {
            "largest": shorten(self.largest),
            "largest_at": self.step,
            "headroom_bits": shorten(self.headroom_bits),
            "nonfinite_count": self.nonfinite_count,
            "relative_error": shorten(self.error.read()),
        }


@torch.no_grad()
def propose_policy(
    network: nn.Module,
    inputs: Iterable[torch.Tensor],
    *,
    dtype: Dtype,
    max_relative_error: float = 0.01,
    min_headroom_bits: float = 1.0,
    run: Callable[[torch.Tensor], object] | None = None,
) -> list[LayerProposal]:
    """Try every algorithm on every convolution and keep the cheapest that is sound.

    Args:
        network: in float32, without a policy.
        inputs: what it takes, one by one, made from calibration images; each is held only while it runs.
        dtype: of the arithmetic: of all layers that have the range for it.
        max_relative_error: rms of the difference from float32 over rms of the float32 result, both of the layer alone.
            Where the direct sum's is larger, twice that is allowed.
        min_headroom_bits: times that the largest stored number can double before the dtype overflows.
        run: runs an input, if more is to be done than to call the network.

    Returns:
        One per convolution that a policy covers, in the network's order. A layer that can't run Winograd is proposed
        direct, and one that no image reached direct in float32.

    Raises:
        NumericsError: there is no input, or a layer gives NaN or infinity in float32.
        SettingsError: an unknown dtype.
    """
    layers = list_convolutions(network)
    trials = {name: _list_trials(conv, dtype) for name, conv in layers.items()}
    num_inputs = 0
    with ExitStack() as stack:
        for name, conv in layers.items():
            stack.callback(conv.register_forward_hook(_make_hook(name, trials[name])).remove)
        for x in inputs:
            (run or network)(x)
            num_inputs += 1
    if not num_inputs:
        raise NumericsError("a proposal: expected one calibration image or more, got none")
    return [
        _propose(name, layers[name], tried, max_relative_error, min_headroom_bits) for name, tried in trials.items()
    ]


def make_policy(proposals: Sequence[LayerProposal]) -> dict[str, ConvArithmetic]:
    """Return what `apply_policy` takes."""
    return {p.layer: ConvArithmetic(algorithm=p.algorithm, dtype=p.dtype) for p in proposals}


def find_saved_fraction(proposals: Sequence[LayerProposal]) -> float:
    """Return the share of the multiplications of all these convolutions that is saved, by shapes, in [0, 1]."""
    direct = sum(p.direct_multiplications for p in proposals)
    return 1 - sum(p.multiplications for p in proposals) / direct if direct else 0.0


def _list_trials(conv: nn.Conv2d, dtype: Dtype) -> list[_Trial]:
    """Return what is tried, in the order of preference; the last is for a layer that nothing else has the range for."""
    algorithms: tuple[Algorithm, ...] = ("direct",) if explain_no_winograd(conv) else _ORDER
    wide: Dtype = "bfloat16" if dtype == "float16" else "float32"
    tried: list[tuple[Algorithm, Dtype]] = [*((algorithm, dtype) for algorithm in algorithms), ("direct", wide)]
    return [_Trial(ConvArithmetic(algorithm=algorithm, dtype=held)) for algorithm, held in dict.fromkeys(tried)]


def _make_hook(name: str, trials: Sequence[_Trial]) -> Callable[[nn.Module, Any, torch.Tensor], None]:
    def hook(conv: nn.Module, given: Any, output: torch.Tensor) -> None:
        x, output = (values if values.dim() == 4 else values[None] for values in (given[0], output))
        if not output.isfinite().all():
            raise NumericsError(
                f"{name}: expected finite numbers in float32 on a calibration image, got NaN or "
                "infinity; correct the network or the image first"
            )
        for trial in trials:
            trial.run(conv, x, output)

    return hook


def _list_stored(
    conv: nn.Conv2d, x: torch.Tensor, output: torch.Tensor, algorithm: Algorithm
) -> Iterable[tuple[str, torch.Tensor]]:
    """Return what an algorithm stores, as large as float32 has it, which does not overflow."""
    if algorithm == "direct":
        return ("input", x), ("output", output)
    return store_winograd(
        x, conv.weight, conv.bias, tile=TILES[algorithm], dtype=torch.float32, padding=find_padding(conv)
    )


def _count_multiplications(conv: nn.Conv2d, output: torch.Tensor, algorithm: Algorithm) -> int:
    """Count the multiplications of a channel's numbers by weights; transforms are left out."""
    images, channels_out, rows, columns = output.shape
    per_output = channels_out * conv.in_channels // conv.groups
    if algorithm == "direct":
        return images * rows * columns * per_output * math.prod(conv.kernel_size)
    tile = TILES[algorithm]
    return images * math.ceil(rows / tile) * math.ceil(columns / tile) * per_output * (tile + 2) ** 2


def _propose(
    name: str, conv: nn.Conv2d, trials: Sequence[_Trial], max_relative_error: float, min_headroom_bits: float
) -> LayerProposal:
    by_name = {f"{t.arithmetic.algorithm} {t.arithmetic.dtype}": t for t in trials}
    direct = next(t for t in trials if t.arithmetic.algorithm == "direct")
    why_direct = explain_no_winograd(conv)
    if not direct.multiplications:
        return LayerProposal(
            name, "direct", "float32", "no calibration image reached it, so float32", {}, not why_direct, 0, 0
        )
    error = direct.error.read()
    limit = max_relative_error
    if error is None or error > max_relative_error:
        limit = math.inf if error is None else _MAX_OVER_DIRECT * error
    reasons, kept = [why_direct] if why_direct else [], trials[-1]
    for trial in trials[:-1]:
        if not (objection := _object(trial, limit, min_headroom_bits)):
            kept = trial
            break
        reasons.append(objection)
    return LayerProposal(
        name,
        kept.arithmetic.algorithm,
        kept.arithmetic.dtype,
        "; ".join([*reasons, _praise(kept)]),
        {key: trial.as_json() for key, trial in by_name.items()},
        not why_direct,
        kept.multiplications,
        direct.multiplications,
    )


def _object(trial: _Trial, limit: float, min_headroom_bits: float) -> str:
    """Say why a trial is not kept, or nothing."""
    name, dtype = NAMES[trial.arithmetic.algorithm], trial.arithmetic.dtype
    end, error = torch.finfo(TORCH_DTYPES[dtype]).max, trial.error.read()
    reaches = f"{name}'s {trial.step} reaches {_format_number(trial.largest)}"
    if trial.largest > end:
        return f"{reaches}, {dtype} ends at {_format_number(end)}"
    if trial.headroom_bits < min_headroom_bits:
        return f"{reaches}, {trial.headroom_bits:.1f} doublings below {dtype}'s end of {_format_number(end)}"
    if trial.nonfinite_count or error is None:
        return f"{name} gives NaN or infinity in {dtype}"
    return f"{name}'s error is {_percent(error)}, over {_percent(limit)}" if error > limit else ""


def _praise(trial: _Trial) -> str:
    error = trial.error.read()
    wide = f" in {trial.arithmetic.dtype}" if trial.arithmetic.algorithm == "direct" else ""
    return (
        f"{NAMES[trial.arithmetic.algorithm]}{wide} leaves {trial.headroom_bits:.1f} doublings, "
        f"error {'unknown' if error is None else _percent(error)}"
    )


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
