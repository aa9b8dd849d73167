"""Round a layer's inputs to few bits, as compressed-tensors imitates it, in a quarter of its time.

The library takes 25 to 60 operations a layer, most of them on numbers that stay the same or for cases that a layer
does not have, and some copy a number to the GPU, which no CUDA graph can hold. Here are those alone that decide the
result, which is the library's in every bit: each layer is held against it on a sample when a model is loaded, and
keeps the library's own code where one value differs. An input that several layers take, as those of queries, keys and
values do, is rounded once.

Covers symmetric formats whose scales are taken from each input while it runs: a scale a token (INT8, FP8), and a scale
a group (FP8, NVFP4). Not covered: MX formats, whose scales are powers of two, and stored scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear


class ValueFormat(NamedTuple):
    """Values that inputs are rounded to.

    Attributes:
        lowest: of all.
        highest: of all.
        reach: what a scale spreads the largest input over.
        mantissa_bits: of a float; None: integers.
        least_exponent: of a float's normal values; below it values are evenly spaced.
    """

    lowest: float
    highest: float
    reach: float
    mantissa_bits: int | None = None
    least_exponent: int = 0


_INT8 = ValueFormat(-128.0, 127.0, 127.5)
# OCP's E4M3 without infinity, and E2M1 of the Microscaling specification 1.0
_FP8 = ValueFormat(-448.0, 448.0, 448.0, mantissa_bits=3, least_exponent=-6)
_FP4 = ValueFormat(-6.0, 6.0, 6.0, mantissa_bits=1, least_exponent=0)
_FORMATS = {("int", 8): _INT8, ("float", 8): _FP8, ("float", 4): _FP4}
_LEAST_STORED = 0.125  # what a scale that FP8 holds as zero becomes
_EXPONENT, _DIGITS = 0x7F800000, 23  # of float32: the bits of its exponent, and the number of those behind
_ROUNDED = "_quantgate_rounded"  # the attribute of an input that holds it rounded, and how: it goes when the input goes
_GROUPS_OF_SAMPLE = (1.0, 0.0, 1e4, 1e-30)  # sizes of its tokens; of zeros alone a scale has a rule of its own

Round = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class InputRounding:
    """Rounds inputs, (batch, tokens, channels); others are the library's.

    Attributes:
        values: what they are rounded to.
        reach: of the values, without a dimension, where the layer lies: by a number of Python's a GPU does not divide,
            it multiplies with the inverse.
        group_size: channels that share a scale; None: all of a token.
        global_scale: of NVFP4, (1,): scales are kept in FP8 as multiples of its inverse. None: scales are floats.
        multiple: the number in it.
        otherwise: what rounds inputs of other shapes.
    """

    values: ValueFormat
    reach: torch.Tensor
    group_size: int | None
    global_scale: torch.Tensor | None
    multiple: float | None
    otherwise: Round

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x rounded, of its type and shape."""
        if x.ndim != 3 or not x.numel():  # of two dimensions the library has all tokens share a scale
            return self.otherwise(x)
        key, known = getattr(x, _ROUNDED, (None, x))
        if key == self.key:
            return known
        grouped = x if self.group_size is None else x.unflatten(-1, (-1, self.group_size))
        scale = self._choose_scales(grouped)
        scaled = (grouped / scale).clamp_(self.values.lowest, self.values.highest)
        rounded = _round(scaled, self.values).mul_(scale).to(x.dtype).reshape(x.shape)
        setattr(x, _ROUNDED, (self.key, rounded))
        return rounded

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides the result: two that share it round alike."""
        return self.values, self.group_size, self.multiple

    def _choose_scales(self, grouped: torch.Tensor) -> torch.Tensor:
        # two operations, as a CPU takes eight times as long for the norm that is the same
        scale = grouped.abs().amax(-1, keepdim=True) / self.reach
        if self.global_scale is None:
            return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)
        stored = _round((self.global_scale * scale).clamp_(_FP8.lowest, _FP8.highest), _FP8)
        return stored.masked_fill_(stored == 0, _LEAST_STORED) / self.global_scale


def _round(x: torch.Tensor, values: ValueFormat) -> torch.Tensor:
    """Return x, within the limits of a format, rounded to its values, ties to even; x is written over.

    A float is rounded by adding a number whose last digit is the distance between values there, and taking it off
    again: the processor rounds the sum. A CPU takes ten times as long to convert from torch's own type of 8 bits.
    """
    if values.mantissa_bits is None:
        return x.round_()
    wide = x.to(torch.float32)
    power = (wide.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=2.0**values.least_exponent)
    power.mul_(1.5 * 2.0 ** (_DIGITS - values.mantissa_bits))
    return wide.add_(power).sub_(power).to(x.dtype)


@dataclass(frozen=True)
class RoundedLinear:
    """The forward pass of a linear layer whose inputs are rounded, in place of the library's."""

    layer: Any
    round_input: InputRounding

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        return linear(self.round_input(x), self.layer.weight, self.layer.bias)


def find_rounding(layer: Any) -> Round | None:
    """Return what compressed-tensors does to a layer's inputs, in fewer operations where that gives the same; or None.

    Args:
        layer: whose weights are decompressed; it lies where it will run.
    """
    scheme = getattr(layer, "quantization_scheme", None)
    if scheme is None or scheme.input_activations is None:
        return None
    if isinstance(layer.forward, RoundedLinear):
        return layer.forward.round_input  # found before, as `use_own_rounding` comes before packing
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    library = partial(forward_quantize, layer, base_name="input", args=scheme.input_activations)
    own = _build(layer, scheme.input_activations, library)
    return own if own is not None and _is_equal(own, library, layer) else library


def use_own_rounding(models: list[Any]) -> None:
    """Have linear layers round their inputs in few operations, which a CUDA graph can hold.

    Args:
        models: copies of one model over the same tensors, settled (`loading.settle_weights`).
    """
    for modules in zip(*(model.modules() for model in models), strict=True):
        if isinstance(modules[0], torch.nn.Linear) and isinstance(rounding := find_rounding(modules[0]), InputRounding):
            for module in modules:
                module.forward = RoundedLinear(module, rounding)


def leaves_the_gpu(module: Any) -> bool:
    """Whether a module rounds by the library's code where that copies numbers to the GPU: for scales of each input."""
    scheme = getattr(module, "quantization_scheme", None)
    if (
        scheme is None
        or scheme.input_activations is None
        or isinstance(getattr(module, "forward", None), RoundedLinear)
    ):
        return False
    return bool(scheme.input_activations.dynamic)


def _build(layer: Any, numbers: Any, library: Round) -> InputRounding | None:
    """Return the rounding of a format that is covered."""
    values = _FORMATS.get((numbers.type, numbers.num_bits))
    if values is None or not numbers.dynamic or not numbers.symmetric or numbers.scale_dtype == torch.uint8:
        return None
    reach = torch.tensor(values.reach, device=layer.weight.device)
    if numbers.strategy == "token":
        return InputRounding(values, reach, None, None, None, library)
    if numbers.strategy not in ("group", "tensor_group") or layer.in_features % numbers.group_size:
        return None
    global_scale = getattr(layer, "input_global_scale", None)
    if (global_scale is None) != (numbers.scale_dtype is None):
        return None
    scale = None if global_scale is None else global_scale.data
    multiple = None if scale is None else scale.item()
    return InputRounding(values, reach, numbers.group_size, scale, multiple, library)


@torch.no_grad()
def _is_equal(own: InputRounding, library: Round, layer: Any) -> bool:
    """Whether both round a sample alike: of usual values, ties among them, zeros, and large and tiny ones."""
    weight = layer.weight
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, 2 * len(_GROUPS_OF_SAMPLE), layer.in_features, generator=generator)
    sample[:, ::2] = (sample[:, ::2] * 4).round() / 4
    sizes = torch.tensor(_GROUPS_OF_SAMPLE).repeat_interleave(2)
    sample = (sample * sizes[:, None]).to(weight.dtype).to(weight.device)
    return torch.equal(own(sample), library(sample))
