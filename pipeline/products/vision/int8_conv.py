"""A convolution in INT8: how it is stored, how it runs, and which kernels ran it.

    set_up_layers(module, tensors)                # before its weights are loaded
    pack_layers(module)                           # once it is where it runs
    read_kernels(module, lambda: network.run(x))

A layer is in INT8 where its stored weight is. Beside it lie a scale for each output channel, and scale and zero point
of its input:

    weight  ~ weight_scale[channel] * weight              int8
    input   ~ input_scale * (input - input_zero_point)    uint8

The input is rounded, oneDNN's INT8 convolution multiplies, and what comes out is float32. It is the operator that
torchao's PT2E flow ends in on x86 (`onednn::qconv2d_pointwise`). Here it stands in the module instead of in an exported
graph, so that layers keep their names, and torch.compile fuses the rounding with what is before it.

Where there is no such kernel, as on a GPU, the layer is emulated: weights and input are rounded and multiplied in
float32. Not covered: INT8 between layers, transposed, 1d and 3d convolutions, and linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from pipeline.errors import CheckpointError
from pipeline.products.vision.conv_policy import list_convolutions
from pipeline.running.memory_format import log_onednn
from pipeline.running.quiet import silence_profiler

SCALE, INPUT_SCALE, INPUT_ZERO_POINT = "weight_scale", "input_scale", "input_zero_point"
MAX_INPUT = 255  # uint8
_KERNEL = "onednn::qconv2d_pointwise"
# each float convolution is one of these, eager or compiled
_FLOAT_KERNELS = ("aten::convolution", "mkldnn::_convolution_pointwise")
_IMPLEMENTATION = re.compile(r"exec,cpu,convolution,([^,]+),.*wei:s8")  # of oneDNN's log


class Int8Conv2d(nn.Conv2d):
    """A Conv2d that multiplies in INT8; `set_up_layers` makes it out of one that is there."""

    weight_scale: torch.Tensor
    input_scale: torch.Tensor
    input_zero_point: torch.Tensor
    _packed: torch.Tensor | None  # as oneDNN wants it; None: emulated
    _scale: float
    _zero_point: int

    def pack(self) -> None:
        """Lay the weights out for oneDNN, where it has a kernel here."""
        self._scale, self._zero_point = float(self.input_scale), int(self.input_zero_point)
        self._weight_zero_points = torch.zeros(len(self.weight), dtype=torch.int32)
        self._packed = None
        if self.weight.device.type == "cpu" and has_kernel():
            self._packed = torch.ops.onednn.qconv_prepack(
                self.weight.contiguous(), self.weight_scale, self._scale, self._zero_point, *self._geometry(), None
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32; x is (images, channels, rows, columns), or one image."""
        images = x if x.dim() == 4 else x[None]
        output = self._emulate(images) if self._packed is None else self._multiply(images)
        return output if x.dim() == 4 else output[0]

    def dequantize_weight(self) -> torch.Tensor:
        """Return the weights that are multiplied, float32."""
        return self.weight.float() * self.weight_scale[:, None, None, None]

    def extra_repr(self) -> str:
        """Say what torch says, and the format."""
        return f"{super().extra_repr()}, int8"

    def _geometry(self) -> tuple[list[int], list[int], list[int], int]:
        return list(self.stride), find_padding(self), list(self.dilation), self.groups

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        # in place on the product: each copy of a picture costs about what a small convolution does
        return (x * (1 / self._scale)).round_().add_(self._zero_point).clamp_(0, MAX_INPUT)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.onednn.qconv2d_pointwise(
            self._round(x).to(torch.uint8),
            self._scale,
            self._zero_point,
            self._packed,
            self.weight_scale,
            self._weight_zero_points,
            self.bias,
            *self._geometry(),
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return output

    def _emulate(self, x: torch.Tensor) -> torch.Tensor:
        rounded = (self._round(x) - self._zero_point) * self._scale
        return F.conv2d(rounded, self.dequantize_weight(), self.bias, *self._geometry())


def has_kernel() -> bool:
    """Say whether this torch has an INT8 convolution for a CPU; one that was built without oneDNN has none."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qconv_prepack")


def explain_float(conv: nn.Conv2d) -> str:
    """Return why a convolution can't run in INT8 ("padding mode reflect"), or an empty text if it can."""
    if conv.padding_mode != "zeros":
        return f"padding mode {conv.padding_mode}"
    if conv.padding == "same" and any(
        dilation * (size - 1) % 2 for size, dilation in zip(conv.kernel_size, conv.dilation, strict=True)
    ):
        return "padding that differs from side to side"
    if "weight" not in conv._parameters and not isinstance(conv, Int8Conv2d):
        return "a weight that is computed from others, as by weight_norm"
    return ""


def find_padding(conv: nn.Conv2d) -> list[int]:
    """Return the zeros above and below, and left and right, of a convolution that can run in INT8."""
    if conv.padding == "same":
        return [d * (k - 1) // 2 for k, d in zip(conv.kernel_size, conv.dilation, strict=True)]
    return [0, 0] if isinstance(conv.padding, str) else list(conv.padding)


def list_stored(dtypes: Mapping[str, Any]) -> list[str]:
    """Return the layers whose weights are stored in INT8, of the types of tensors by name."""
    layers = [name.removesuffix(f".{SCALE}") for name in dtypes if name.endswith(f".{SCALE}")]
    return [layer for layer in layers if dtypes.get(f"{layer}.weight") in (torch.int8, "I8")]


def set_up_layers(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give the layers that are stored in INT8 room for it, in place; names and hooks stay as they are.

    Raises:
        CheckpointError: such a layer is no convolution that can run so.
    """
    convolutions = list_convolutions(module)
    for name in list_stored({key: tensor.dtype for key, tensor in tensors.items()}):
        conv = convolutions.get(name)
        if conv is None or explain_float(conv):
            raise CheckpointError(
                f"{name}: expected a Conv2d that can run in INT8, as its weights are stored so, found none in what "
                "the adapter builds; correct the adapter, or build the candidate again"
            )
        conv.__class__ = Int8Conv2d
        del conv.weight
        for key in ("weight", SCALE, INPUT_SCALE, INPUT_ZERO_POINT):
            like = tensors.get(f"{name}.{key}")
            if like is None:
                raise CheckpointError(f"{name}.{key}: expected a tensor beside the INT8 weights, found none")
            conv.register_buffer(key, torch.empty_like(like))


def find_int8(module: nn.Module) -> str | None:
    """Return the first layer of a network that is in INT8; None where there is none."""
    return next((name for name, part in module.named_modules() if isinstance(part, Int8Conv2d)), None)


def pack_layers(module: nn.Module) -> None:
    """Make the INT8 layers of a loaded network ready to run where it is."""
    for part in module.modules():
        if isinstance(part, Int8Conv2d):
            part.pack()


def read_kernels(module: nn.Module, run: Callable[[], Any]) -> dict[str, Any] | None:
    """Return which kernels ran the INT8 layers of a network in one run, as torch's profiler and oneDNN say.

    None for a network without such layers.
    """
    num_layers = sum(isinstance(part, Int8Conv2d) for part in module.modules())
    if not num_layers:
        return None
    silence_profiler()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    counts = {event.key: event.count for event in profiler.key_averages()}
    return {
        "num_layers": num_layers,
        "num_kernel_calls": counts.get(_KERNEL, 0),
        "num_float_calls": sum(counts.get(kernel, 0) for kernel in _FLOAT_KERNELS),
        "implementations": _list_implementations(log_onednn(run).splitlines()),
    }


def _list_implementations(lines: Iterable[str]) -> list[str]:
    """Return oneDNN's names of the kernels that multiplied INT8 weights, such as "brg_conv_fwd:avx512_core_vnni"."""
    return sorted({match[1] for line in lines if (match := _IMPLEMENTATION.search(line))})
