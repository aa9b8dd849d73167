"""The shipped people detector, whole and layer by layer, as networks of ncnn: float32, one thread.

ncnn reads text, a line per operation (type, name, how many blobs in and out, their names, parameters), and the weights
behind one another. Which algorithm runs 3x3 convolutions of stride 1 is set for the whole network (`ALGORITHMS`); an
operation with `31=64` is kept from any Winograd algorithm. Not covered: other networks, other number formats than
float32, several threads, GPUs.
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

LEVELS = ("small", "medium", "large")  # outputs of the detector
MAGIC = "7767517"  # the first line of the text format
NO_WINOGRAD = 1 << 6  # of an operation's feature mask, parameter 31
# ncnn's options, one set for each network; F(6,3), which a conv_policy doesn't know, is off
ALGORITHMS = {
    "direct": {"use_winograd_convolution": False},
    "winograd_f23": {"use_winograd43_convolution": False, "use_winograd63_convolution": False},
    "winograd_f43": {"use_winograd23_convolution": False, "use_winograd63_convolution": False},
}
OFF = (
    "use_fp16_packed",
    "use_fp16_storage",
    "use_fp16_arithmetic",
    "use_bf16_packed",
    "use_bf16_storage",
    "use_int8_inference",
    "use_vulkan_compute",
)

Run = Callable[[], list[Any]]


@dataclass(frozen=True)
class Layer:
    """A convolution of the detector, and what one image feeds it."""

    name: str  # of the module: "stages.0.1.0"
    conv: nn.Conv2d
    has_relu: bool  # right behind it
    x: torch.Tensor  # (1, channels in, rows, columns)

    @property
    def takes_winograd(self) -> bool:
        """Tell whether a Winograd algorithm can compute it."""
        return self.conv.kernel_size == (3, 3) and self.conv.stride == (1, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels in and out, side of the kernel, stride, rows and columns of the input: what its time hangs on."""
        return (
            self.conv.in_channels,
            self.conv.out_channels,
            self.conv.kernel_size[0],
            self.conv.stride[0],
            *self.x.shape[2:],
        )


@dataclass(frozen=True)
class Operation:
    """A line of ncnn's text."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: str = ""

    def __str__(self) -> str:
        counts = f"{len(self.inputs)} {len(self.outputs)}"
        return " ".join([self.kind, self.name, counts, *self.inputs, *self.outputs, self.parameters]).rstrip()


@torch.no_grad()
def list_layers(model: nn.Module, x: torch.Tensor) -> list[Layer]:
    """Return every convolution that an image runs through, in the order of running.

    Args:
        model: the detector of `models/people/detector.py`.
        x: (1, 3, rows, columns), from its `preprocess`.
    """
    layers: list[Layer] = []
    modules = dict(model.named_modules())
    convs = {name: module for name, module in modules.items() if isinstance(module, nn.Conv2d)}

    def keep(name: str, conv: nn.Conv2d, given: tuple[torch.Tensor]) -> None:
        block, _, index = name.rpartition(".")
        has_relu = index == "0" and isinstance(modules.get(f"{block}.1"), nn.ReLU)
        layers.append(Layer(name, conv, has_relu, given[0]))

    handles = [conv.register_forward_pre_hook(functools.partial(keep, name)) for name, conv in convs.items()]
    model(x)
    for handle in handles:
        handle.remove()
    return layers


def describe_convolution(
    layer: Layer, source: str, target: str, *, is_direct: bool = False, relu: bool = True
) -> Operation:
    """Return a convolution from one blob to another.

    Args:
        layer: the convolution.
        source: the blob that it reads.
        target: the blob that it makes.
        is_direct: keep it from any Winograd algorithm.
        relu: with the ReLU that is right behind it, if there is one.
    """
    conv = layer.conv
    settings = {
        0: conv.out_channels,
        1: conv.kernel_size[0],
        3: conv.stride[0],
        4: conv.padding[0],
        5: 1,
        6: conv.weight.numel(),
    }
    settings |= {9: 1} if relu and layer.has_relu else {}
    settings |= {31: NO_WINOGRAD} if is_direct else {}
    parameters = " ".join(f"{key}={value}" for key, value in settings.items())
    return Operation("Convolution", layer.name, (source,), (target,), parameters)


def describe_layer(layer: Layer) -> list[Operation]:
    """Return a network of one convolution without its ReLU, from `in` to `out`."""
    return [Operation("Input", "in", (), ("in",)), describe_convolution(layer, "in", "out", relu=False)]


def describe_detector(layers: Sequence[Layer], *, direct: Collection[str] = ()) -> list[Operation]:
    """Return the whole detector, from `in` to `small`, `medium` and `large`.

    Args:
        layers: from `list_layers`.
        direct: names of layers that no Winograd algorithm may compute.
    """
    operations = [Operation("Input", "in", (), ("in",))]

    def run(part: str, source: str, target: str) -> None:
        chain = [layer for layer in layers if layer.name.startswith(f"{part}.") or layer.name == part]
        blobs = [source, *(f"{part}_{i}" for i in range(1, len(chain))), target]
        operations.extend(
            describe_convolution(layer, blobs[i], blobs[i + 1], is_direct=layer.name in direct)
            for i, layer in enumerate(chain)
        )

    run("stem", "in", "stem")
    for i in range(3):
        run(f"stages.{i}", f"stage{i - 1}" if i else "stem", f"stage{i}")
        run(f"laterals.{i}", f"stage{i}", "pyramid2" if i == 2 else f"lateral{i}")
    for i in (1, 0):
        operations.append(Operation("Interp", f"up{i}", (f"pyramid{i + 1}",), (f"up{i}",), "0=1 1=2.0 2=2.0"))
        operations.append(Operation("BinaryOp", f"add{i}", (f"lateral{i}", f"up{i}"), (f"pyramid{i}",), "0=0"))
    for i, level in enumerate(LEVELS):
        run(f"branches.{level}", f"pyramid{i}", level)
    return operations


def write_network(operations: Sequence[Operation]) -> str:
    """Return ncnn's text, with a Split behind each blob that several operations read."""
    readers = Counter(blob for operation in operations for blob in operation.inputs)
    copies = {blob: iter([f"{blob}_{i}" for i in range(count)]) for blob, count in readers.items() if count > 1}
    lines = []
    for operation in operations:
        inputs = tuple(next(copies[blob]) if blob in copies else blob for blob in operation.inputs)
        lines.append(replace(operation, inputs=inputs))
        for blob in set(operation.outputs) & set(copies):
            outputs = tuple(f"{blob}_{i}" for i in range(readers[blob]))
            lines.append(Operation("Split", f"split_{blob}", (blob,), outputs))
    num_blobs = sum(len(line.outputs) for line in lines)
    return "\n".join([MAGIC, f"{len(lines)} {num_blobs}", *map(str, lines)]) + "\n"


def pack_weights(operations: Sequence[Operation], layers: Sequence[Layer]) -> bytes:
    """Return the weights and biases of the convolutions, in the order of the text."""
    convs = {layer.name: layer.conv for layer in layers}
    parts = []
    for conv in (convs[operation.name] for operation in operations if operation.kind == "Convolution"):
        parts += [bytes(4), *(value.detach().numpy().tobytes() for value in (conv.weight, conv.bias))]  # 0: float32
    return b"".join(parts)


def load_network(operations: Sequence[Operation], layers: Sequence[Layer], algorithm: str) -> Any:
    """Return a network of ncnn, whose 3x3 convolutions of stride 1 run by an algorithm.

    Raises:
        ValueError: ncnn can't read it.
    """
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = 1
    for name, value in (dict.fromkeys(OFF, False) | ALGORITHMS[algorithm]).items():
        setattr(net.opt, name, value)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.bin"
        weights.write_bytes(pack_weights(operations, layers))
        if net.load_param_mem(write_network(operations)) or net.load_model(str(weights)):
            raise ValueError(f"ncnn: expected a network that it can read, got {write_network(operations)}")
    return net


def bind_run(net: Any, x: torch.Tensor, outputs: Sequence[str], *, is_raw: bool) -> Run:
    """Return what runs a network and returns the blobs that are asked for.

    Args:
        net: from `load_network`; what a run returns lives as long as it.
        x: (1, channels, rows, columns), handed over with channels interleaved as they are between layers.
        outputs: names of blobs.
        is_raw: leave them as they are between layers; else channels come out one behind another.
    """
    import ncnn

    values = x[0].contiguous().numpy()
    given = ncnn.convert_packing(ncnn.Mat(values), count_interleaved(len(values)))

    def run(_alive: np.ndarray = values) -> list[Any]:  # ncnn does not keep the array whose memory it may share
        extractor = net.create_extractor()
        extractor.input("in", given)
        return [extractor.extract(name, int(is_raw))[1] for name in outputs]

    return run


@functools.cache
def count_interleaved(channels: int) -> int:
    """Ask ncnn how many channels it interleaves between layers on this CPU."""
    import ncnn

    net = load_network(
        [Operation("Input", "in", (), ("in",)), Operation("Pooling", "pool", ("in",), ("out",), "0=0 1=1 2=1")],
        [],
        "direct",
    )
    values = np.zeros((channels, 4, 4), np.float32)
    extractor = net.create_extractor()
    extractor.input("in", ncnn.Mat(values))
    return int(extractor.extract("out", 1)[1].elempack)


def unpack(mats: Sequence[Any]) -> list[torch.Tensor]:
    """Return outputs that are not raw as tensors, (channels, rows, columns)."""
    return [torch.from_numpy(np.array(mat)) for mat in mats]
