"""How far each layer of a candidate's network is from the reference's, and how near to overflow, on real inputs.

    runs = [(lambda: reference(x), lambda: candidate(x))]
    numerics = compare_layers(reference, candidate, runs, dtypes={"branches.small.0.0": torch.float16})
    build_layer_notes(numerics)["branches.small.0.0"]["relative_error"]

Both networks run whole, one input at a time, and the outputs of their convolutions and linear layers are compared. So
an error is all that was accumulated from the input to that layer, not what the layer adds: a layer with the reference's
own arithmetic shows the error of those before it. What one layer adds on the reference's inputs, and the numbers inside
a Winograd convolution, are `proposal.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeline.errors import NumericsError
from pipeline.numerics.activation_watch import ActivationWatch

Run = Callable[[], object]
Call = tuple[str, int]  # a layer, and which of its calls in a run
Shapes = dict[str, list[tuple[int, ...]]]  # of each output, by layer

_MAX_HELD = 512 << 20  # bytes
_LAYERS = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


@dataclass(frozen=True)
class LayerNumerics:
    """What one layer of the candidate wrote, over all inputs."""

    relative_error: float | None  # rms of the difference over rms of the reference's output; None: nothing finite
    absmax: float  # infinite after NaN or infinity
    nonfinite_count: int  # elements that are NaN or infinite
    headroom_bits: float  # doublings of the largest output before the layer's dtype overflows

    def as_json(self) -> dict[str, float | int | None]:
        """Return the numbers to five significant digits; None for what is not finite."""
        return {name: shorten(value) for name, value in asdict(self).items()}


class RunningError:
    """The error of one layer over many tensors: rms of the difference over rms of what was expected."""

    def __init__(self) -> None:
        self.difference = self.reference = 0.0  # sums of squares
        self.num_finite = 0

    def add(self, expected: torch.Tensor, actual: torch.Tensor) -> None:
        """Take in what a layer should have written and what it wrote; values finite in both count."""
        expected, actual = expected.double(), actual.double()
        is_finite = expected.isfinite() & actual.isfinite()
        expected, actual = expected[is_finite], actual[is_finite]
        self.num_finite += len(actual)
        self.difference += (actual - expected).square().sum().item()
        self.reference += expected.square().sum().item()

    def read(self) -> float | None:
        """Return the error: None where nothing was finite, infinite where zero was expected and not found."""
        if not self.num_finite:
            return None
        if not self.reference:
            return math.inf if self.difference else 0.0
        return math.sqrt(self.difference / self.reference)


@torch.no_grad()
def compare_layers(
    reference: nn.Module, candidate: nn.Module, runs: Iterable[tuple[Run, Run]], *, dtypes: Mapping[str, torch.dtype]
) -> dict[str, LayerNumerics]:
    """Run both networks on each input and compare every Conv2d, ConvTranspose2d and Linear.

    The outputs of the reference's layers are held for one input at a time, until the candidate has written its own.
    Where they are more than 512 MiB, both networks run again for those that are left.

    Args:
        reference: in float32.
        candidate: with layers of the same names, which run in the same order on tensors of the same shapes.
        runs: what runs the reference, and the candidate, on one input, the same at each call.
        dtypes: the candidate's, by layer, for the headroom; float32 where a layer is not named.

    Returns:
        By layer name, in the network's order; layers that never ran are left out. The error is accumulated from the
        input on, and taken over values that are finite in both.

    Raises:
        NumericsError: there is no input, or the layers of the two networks or what they write can't be paired.
    """
    expected_names, names = (_list_layers(network) for network in (reference, candidate))
    if set(expected_names) != set(names):
        odd = min(set(expected_names) ^ set(names))
        raise NumericsError(f"layer numerics: expected two networks with the same layers, {odd!r} is in one only")
    errors, watch, num_inputs = {name: RunningError() for name in names}, ActivationWatch(candidate), 0
    for run_reference, run_candidate in runs:
        start, num_calls = 0, 1
        while start < num_calls:  # once, but for networks that write much
            held = _Held(start)
            expected = _hear(expected_names, run_reference, held.hold)
            with nullcontext() if start else watch:  # it adds up over runs
                actual = _hear(names, run_candidate, partial(held.compare, errors))
            _check_shapes(expected, actual)
            start, num_calls = held.end, held.num_calls
        num_inputs += 1
    if not num_inputs:
        raise NumericsError("layer numerics: expected one input or more, got none")
    ranges = watch.read()
    return {
        name: LayerNumerics(
            errors[name].read(), seen.absmax, seen.nonfinite_count, seen.headroom_bits(dtypes.get(name, torch.float32))
        )
        for name in names
        if (seen := ranges.get(name))
    }


def build_layer_notes(numerics: Mapping[str, LayerNumerics]) -> dict[str, Any]:
    """Return the numbers of `compare_layers` as JSON, by layer."""
    return {name: layer.as_json() for name, layer in numerics.items()}


def _list_layers(network: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in network.named_modules() if isinstance(module, _LAYERS)}


def _hear(layers: Mapping[str, nn.Module], run: Run, take: Callable[[Call, torch.Tensor], None]) -> Shapes:
    """Run a network, hand on what its layers write as they write it, and return the shapes of each layer's outputs."""
    shapes: Shapes = {name: [] for name in layers}

    def hear(name: str, output: torch.Tensor) -> None:
        take((name, len(shapes[name])), output)
        shapes[name].append(tuple(output.shape))

    with ExitStack() as stack:
        for name, module in layers.items():
            handle = module.register_forward_hook(lambda _m, _i, out, name=name: hear(name, out))
            stack.callback(handle.remove)
        run()
    return shapes


class _Held:
    """What the reference's layers wrote in one run, until the candidate has written its own.

    Calls are counted over all layers: those from `start` up to `end` are held, as many as `_MAX_HELD` allows.
    """

    def __init__(self, start: int) -> None:
        self.outputs: dict[Call, torch.Tensor] = {}
        self.end, self.num_calls, self.num_bytes = start, 0, 0

    def hold(self, call: Call, output: torch.Tensor) -> None:
        """Take an output in where it comes next and there is room; one always has."""
        is_next, num_bytes = self.num_calls == self.end, self.num_bytes + output.numel() * output.element_size()
        self.num_calls += 1
        if is_next and (not self.outputs or num_bytes <= _MAX_HELD):
            self.outputs[call] = output.clone()  # as an activation may write over the output in place
            self.end, self.num_bytes = self.num_calls, num_bytes

    def compare(self, errors: Mapping[str, RunningError], call: Call, output: torch.Tensor) -> None:
        """Take in the error of an output, and let go of what was expected."""
        expected = self.outputs.pop(call, None)
        if expected is not None and expected.shape == output.shape:  # others are refused once the networks have run
            errors[call[0]].add(expected, output)


def _check_shapes(expected: Shapes, actual: Shapes) -> None:
    for name, shapes in actual.items():
        if expected[name] != shapes:
            raise NumericsError(
                f"{name}: expected the reference's output shapes {expected[name]}, got {shapes}; layers "
                "are compared on whole inputs, without tiles"
            )


def shorten(value: float | int | None) -> float | int | None:
    """Return a number to five significant digits for JSON, None where it is not finite."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None
