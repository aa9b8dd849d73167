"""Does channels-last survive a network? What each module wrote, and what oneDNN had to copy.

A module may write another format: a view in the wrong order, an operation without a kernel for it. Its followers then
run as before, and copies between formats, oneDNN's reorders, eat the gain. Hooks see each module of an eager
network; oneDNN's log also shows a compiled one. Copies that torch makes itself are not in that log, and a GPU writes
none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from pipeline.running.quiet import catch_output


def count_reorders(log: str, weights: Collection[tuple[int, ...]]) -> int:
    """Count the reorders of activations in a log that oneDNN wrote with ONEDNN_VERBOSE=1.

    Args:
        log: its lines, among others; fields are separated by commas: "onednn_verbose", version, "primitive", "exec",
            engine, kind of primitive, ..., shape such as 4x32x16x16, milliseconds.
        weights: shapes of the model's parameters. Weights are reordered too, whatever the activations' format, and so
            are matrices, which no memory format concerns: neither is counted.
    """
    known = {"x".join(map(str, shape)) for shape in weights}
    fields = [line.split(",") for line in log.splitlines() if line.startswith("onednn_verbose,")]
    shapes = [line[-2] for line in fields if "exec" in line and "reorder" in line]
    return sum(shape.count("x") == 3 and shape not in known for shape in shapes)


def log_onednn(call: Callable[[], Any]) -> str:
    """Return what oneDNN logs of a call in this process; nothing on a machine without it."""
    lines: list[bytes] = []
    with catch_output(1, lines), torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        call()
    return b"".join(lines).decode(errors="replace")


def list_other_formats(network: nn.Module, call: Callable[[], Any]) -> list[str]:
    """Return the modules without children that write channels first while a call runs the network.

    A tensor of one channel, or of one pixel, is in both formats and counts as channels last.
    """
    names: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if (
                isinstance(output, torch.Tensor)
                and output.ndim == 4
                and name not in names
                and not output.is_contiguous(memory_format=torch.channels_last)
            ):
                names.append(name)

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in network.named_modules()
        if not list(module.children())
    ]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return names
