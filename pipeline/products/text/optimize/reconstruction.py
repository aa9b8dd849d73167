"""Hold the weights of a quantised folder against its source: a difference that rounding can't explain is refused.

An eval of a few thousand cases may not show one wrong scale, so the numbers themselves are looked at. Each packed
layer is read back from disk and unpacked, and the scales that AWQ moved from layer to layer are undone. What is left
is the error of rounding, in steps of the group that a weight is in. Layers come one at a time, and only some rows of
one are in float32, so that a CPU works in its cache. Two things are known of the error:

- rounding raises as often as it lowers. So over a layer the mean error is near 0, and it is one step where a
  zero-point is off by one. GPTQ, which makes up for errors by others, keeps the mean small as well (0.007 steps on
  the shipped checkpoint).
- rounded to nearest, no weight is further off than half a step, so no group's root mean square is larger. A wrong
  scale, or a bit less, makes it about 1 (0.39 at most on the shipped checkpoint, where a uniform error makes 0.29).

Not covered: a single group of a GPTQ layer, in which a weight may be several steps off for good reason. Nor is a
scale that is wrong by a tenth or less, nor are tensors that are not packed, such as norms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.products.text.checkpoints import name_layer, read_config
from pipeline.products.text.optimize.layers import Int4Step, LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.running.weight_files import open_weights, read_tensors

MAX_MEAN_STEPS = 0.25  # of a layer: a quarter of what a zero-point that is off by one makes
_HALF_STEP = 0.5
_CHUNK_WEIGHTS = {"cpu": 1 << 19, "cuda": 1 << 26}  # in float32 at a time: a CPU's cache holds them

Parts = dict[str, Any]  # the tensors of a layer by the last part of their name


def check_reconstruction(
    folder: Path, *, source: Path, step: Int4Step, plan: LayerPlan, log: StepLog, device: str = "cpu"
) -> None:
    """Refuse a quantised folder whose weights are not those of its source, rounded.

    Args:
        folder: what the step wrote.
        source: the dense checkpoint it was made from.
        step: the settings of the step.
        plan: the layers it was asked to cover.
        log: of the step: the scales that it moved. A layer that the source calls otherwise becomes a fallback.
        device: that computes: "cpu" or "cuda".

    Raises:
        QuantizationError: names the first such layer, its group where there is one, and the error in steps.
    """
    packed_names, dense_names = (_index_layers(place, plan) for place in (folder, source))
    with open_weights(folder) as read_packed, open_weights(source) as read_dense, _limit_threads(device):
        for layer in plan.asked:
            if layer not in dense_names:
                log.record_fallback(layer, f"not compared with its source: no tensor of that name in {source}")
                continue
            packed = _read_layer(packed_names[layer], read_packed, device)
            weight = _move(read_dense(dense_names[layer]["weight"]), device)
            _check_layer(packed, log.scale_as_moved(layer, weight), step, where=f"{folder}: layer {layer!r}")


@contextlib.contextmanager
def _limit_threads(device: str) -> Iterator[None]:
    """Let torch compute with one thread of a CPU: so few rows at a time keep two waiting for each other, tenfold."""
    import torch

    num_threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _index_layers(folder: Path, plan: LayerPlan) -> dict[str, dict[str, str]]:
    """Return the names of the tensors of the planned layers, by layer and by their part in it."""
    kind, names = read_config(folder)["model_type"], dict[str, dict[str, str]]()
    for name in read_tensors(folder):
        layer, _, part = name.rpartition(".")
        if (layer := name_layer(layer, kind)) in plan.asked:
            names.setdefault(layer, {})[part] = name
    return names


def _read_layer(names: dict[str, str], read: Callable[[str], Any], device: str) -> Parts:
    return {part: _move(read(name), device) for part, name in names.items() if part.startswith("weight")}


def _move(tensor: Any, device: str) -> Any:
    # through pinned memory, which all of torch's threads fill: the driver alone takes four times as long
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _check_layer(packed: Parts, weight: Any, step: Int4Step, *, where: str) -> None:
    import torch

    # weight and scale are stored in this format, and so is the value that is up to 2^bits steps from zero
    limit = _HALF_STEP + 2**step.bits * torch.finfo(packed["weight_scale"].dtype).eps
    total = 0.0
    worst = (0.0, 0, 0)  # steps, row, group
    for first, errors in _iterate_errors(packed, weight, step):
        total += float(errors.sum())
        if step.rounds_to_nearest:
            sizes = errors.square_().mean(dim=2).sqrt()
            row, group = divmod(int(sizes.argmax()), sizes.shape[1])
            worst = max(worst, (float(sizes[row, group]), first + row, group))
    mean = total / weight.numel()
    if not abs(mean) <= MAX_MEAN_STEPS:  # as of NaN
        raise QuantizationError(
            f"{where}: its weights are {mean:+.2f} steps from the source's on average, "
            f"expected at most {MAX_MEAN_STEPS}; the zero-point is wrong, or not the one used"
        )
    if worst[0] > limit:
        raise QuantizationError(
            f"{where}: group {worst[2]} of row {worst[1]} is {worst[0]:.2f} steps from the source's weights "
            f"(root mean square), expected at most {limit:.2f} of {step.bits} bits; its scale or "
            "its values are wrong"
        )


def _iterate_errors(packed: Parts, weight: Any, step: Int4Step) -> Iterator[tuple[int, Any]]:
    """Yield the first row of each part of a layer, and how far its weights are off as (rows, groups, group_size)."""
    scale = packed["weight_scale"].float()
    if step.symmetric:
        zero = scale.new_full((1, 1), 2.0 ** (step.bits - 1)).expand(scale.shape)  # packed values count from 0 on
    else:
        zero = _unpack(packed["weight_zero_point"].T, step.bits).T[: len(scale)].float()
    num_rows = max(1, _CHUNK_WEIGHTS[weight.device.type] // weight.shape[1])
    for first in range(0, len(weight), num_rows):
        rows = slice(first, first + num_rows)
        values = _unpack(packed["weight_packed"][rows], step.bits)[:, : weight.shape[1]]
        errors = values.reshape(*scale[rows].shape, step.group_size).float()
        errors -= zero[rows][..., None]
        errors -= weight[rows].reshape(errors.shape) / scale[rows][..., None]
        yield first, errors


def _unpack(words: Any, bits: int) -> Any:
    """Return the unsigned values in rows of int32, the first value in a word's lowest bits."""
    import torch

    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
