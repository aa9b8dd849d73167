"""Hold the weights of a quantised folder against its source: a difference that rounding can't explain is refused.

An eval of a few thousand cases may not show one wrong scale, so the numbers themselves are looked at. The values of
each layer are read back from disk, and the scales that AWQ moved from layer to layer are undone. What is left is the
error of rounding, in steps: of an integer the scale of the group that a weight is in, of a float the distance to the
next value of its format there, which grows with the value. Layers come one at a time, and only some rows of one are in
float32, so that a CPU works in its cache. Two things are known of the error:

- rounding raises as often as it lowers. So over a layer the mean error is near 0, and it is one step where a
  zero-point is off by one. GPTQ, which makes up for errors by others, keeps the mean small as well (0.007 steps on
  the shipped checkpoint). Of floats it is held against the mean step, as GPTQ moves small values by many of theirs.
- rounded to nearest, no weight is further off than half a step, so no group's root mean square is larger. A wrong
  scale, or a bit less, makes it about 1 (0.39 at most on the shipped checkpoint, where a uniform error makes 0.29).

GPTQ may move single weights by several steps, and a whole layer could be another's. So its root mean square error is
held against the size of its weights as well.

Steps say nothing of a scale that is far too large, as values that were rounded by it fit it. So the largest weight
that shares a scale must reach at least two thirds as far as the format does. float16 can't hold a scale below 6e-8: the
library then takes 0.001, which makes every weight zero. Scales of eight bits may be as coarse by their own format.

Not covered: a single group of a GPTQ layer, in which a weight may be several steps off for good reason. Nor is a
scale that is wrong by a tenth or less. `kept_tensors.py` has what is not quantised, and `ranges.py` scales of inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import QuantizationError
from pipeline.products.text.layer_names import name_layer
from pipeline.products.text.model_config import read_config
from pipeline.products.text.optimize.layers import LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.schemes import NumberFormat, Scheme
from pipeline.products.text.step_settings import QuantizeStep
from pipeline.running.weight_files import open_weights, read_tensors

MAX_MEAN_STEPS = 0.25  # of a layer: a quarter of what a zero-point that is off by one makes
_HALF_STEP = 0.5
MAX_COARSE = 1.5  # how much larger than its weights need a scale may be
# of a layer by GPTQ: 0.25 at most on the shipped checkpoint, and 1 or more of zeros and of another layer
MAX_RELATIVE_ERROR = 0.6
_CHUNK_WEIGHTS = {"cpu": 1 << 19, "cuda": 1 << 26}  # in float32 at a time: a CPU's cache holds them

Parts = dict[str, Any]  # the tensors of a layer by the last part of their name


class FloatLayout(NamedTuple):
    """What decides the distance between neighbouring values of a float format."""

    mantissa_bits: int
    least_exponent: int  # of its normal numbers; below it values are evenly spaced
    largest: float


# OCP's E4M3 without infinity, and E2M1 of the Microscaling specification 1.0
_FLOATS = {8: FloatLayout(3, -6, 448.0), 4: FloatLayout(1, 0, 6.0)}
_FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by the lowest three bits; the fourth is the sign
_EXPONENT_BIAS = 127  # of a power of two in eight bits


def check_reconstruction(
    folder: Path, *, source: Path, step: QuantizeStep, plan: LayerPlan, log: StepLog, device: str = "cpu"
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
            weight, scheme = log.scale_as_moved(layer, weight), plan.schemes[layer]
            _check_layer(packed, weight, scheme, is_nearest=step.rounds_to_nearest, where=f"{folder}: layer {layer!r}")


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


def _check_layer(packed: Parts, weight: Any, scheme: Scheme, *, is_nearest: bool, where: str) -> None:
    limit = _HALF_STEP + _count_steps(scheme.weights) * _read_precision(packed["weight_scale"])
    total, num_steps, squares = 0.0, 0.0, 0.0
    scale = _read_scales(packed, scheme.weights, len(weight))
    worst = (0.0, 0, 0)  # steps, row, group
    for first, errors, steps in _iterate_errors(packed, weight, scheme):
        total += float(errors.sum())
        num_steps += errors.numel() if steps is None else float(steps.sum())
        squares += float((errors * scale[first : first + len(errors), :, None]).square().sum())
        if is_nearest:
            if steps is not None:
                errors /= steps
            sizes = errors.square_().mean(dim=2).sqrt()
            row, group = divmod(int(sizes.argmax()), sizes.shape[1])
            worst = max(worst, (float(sizes[row, group]), first + row, group))
    mean = total / num_steps
    if not abs(mean) <= MAX_MEAN_STEPS:  # as of NaN
        raise QuantizationError(
            f"{where}: its weights are {mean:+.2f} steps from the source's on average, "
            f"expected at most {MAX_MEAN_STEPS}; the zero-point is wrong, or not the one used"
        )
    if worst[0] > limit:
        raise QuantizationError(
            f"{where}: group {worst[2]} of row {worst[1]} is {worst[0]:.2f} steps from the source's weights "
            f"(root mean square), expected at most {limit:.2f} of {scheme.weights.num_bits} bits; its scale or "
            "its values are wrong"
        )
    _check_fineness(packed, weight, scheme.weights, where=where)
    size = float(weight.float().square().sum())
    if not is_nearest and not squares <= MAX_RELATIVE_ERROR**2 * size:  # as of NaN
        share = (squares / size) ** 0.5 if size else float("inf")
        raise QuantizationError(
            f"{where}: its error is {share:.2f} of the size of the source's weights, expected at most "
            f"{MAX_RELATIVE_ERROR}; they are another layer's, or their scales are wrong"
        )


def _check_fineness(packed: Parts, weight: Any, numbers: NumberFormat, *, where: str) -> None:
    """Refuse a scale that is far larger than the weights that share it need."""
    if numbers.scale_dtype:
        return
    scale = _read_scales(packed, numbers, len(weight))
    groups = weight.reshape(len(weight), scale.shape[1], -1)
    # a symmetric format reaches as far on both sides, another one from the lowest to the highest
    top, bottom = groups.amax(2).float().clamp(min=0), groups.amin(2).float().clamp(max=0)
    span = top.maximum(-bottom) if numbers.symmetric else top - bottom
    span = _share_out(span, numbers)
    used = span / (scale * _count_reach(numbers))
    used = used.where(span > 0, 1.0)  # of zeros alone any scale is fine
    worst = int(used.argmin())
    if not float(used.flatten()[worst]) * MAX_COARSE >= 1:  # as of NaN
        row, group = divmod(worst, used.shape[1])
        raise QuantizationError(
            f"{where}: group {group} of row {row}: expected a scale of about "
            f"{float((span / _count_reach(numbers)).flatten()[worst]):.3g}, as its weights reach up to "
            f"{float(span.flatten()[worst]):.3g}, found {float(scale.expand_as(used).flatten()[worst]):.3g}: most are "
            "rounded to zero; where the source is in float16, which holds no scale below 6e-8, store it in bfloat16"
        )


def _share_out(span: Any, numbers: NumberFormat) -> Any:
    """Return for each row and group the largest span of all that have its scale."""
    if numbers.strategy == "tensor":
        return span.max().expand_as(span)
    if numbers.block_structure:
        height = numbers.block_structure[0]
        return span.reshape(-1, height, span.shape[1]).amax(1).repeat_interleave(height, dim=0)
    return span


def _count_reach(numbers: NumberFormat) -> float:
    """Return how many scales a format reaches: from zero on one side, or from end to end of one with a zero-point."""
    if numbers.type == "float":
        return _FLOATS[numbers.num_bits].largest
    return 2.0 ** (numbers.num_bits - 1) if numbers.symmetric else 2.0**numbers.num_bits - 1


def _count_steps(weights: NumberFormat) -> int:
    """Return how many steps a value may be from zero, which is how often an error of its scale counts.

    From a zero-point it may be twice as far, and dividing and adding err by half of a type's precision each.
    """
    return 2 ** (weights.num_bits - 1 if weights.type == "int" else _FLOATS[weights.num_bits].mantissa_bits + 1)


def _read_precision(scale: Any) -> float:
    """Return the relative error of a scale as stored; scales of eight bits were rounded before they were used."""
    import torch

    return float(torch.finfo(scale.dtype).eps) if scale.dtype.is_floating_point and scale.itemsize > 1 else 0.0


def _iterate_errors(packed: Parts, weight: Any, scheme: Scheme) -> Iterator[tuple[int, Any, Any | None]]:
    """Yield the first row of each part of a layer, and how far its weights are off, in scales.

    Errors are (rows, groups, group_size). With them come the steps of a float format there; None: a step is a scale.
    """
    numbers, (num_out, num_in) = scheme.weights, weight.shape
    scale = _read_scales(packed, numbers, num_out)
    num_groups = scale.shape[1]
    zero = _read_zero_points(packed, scheme, scale)
    num_rows = max(1, _CHUNK_WEIGHTS[weight.device.type] // num_in)
    for first in range(0, num_out, num_rows):
        rows = slice(first, first + num_rows)
        values = _read_values(packed, rows, scheme)[:, :num_in].reshape(-1, num_groups, num_in // num_groups).float()
        exact = weight[rows].reshape(values.shape) / scale[rows][..., None]
        if numbers.type == "int":
            values -= zero[rows][..., None]
        values -= exact
        yield first, values, None if numbers.type == "int" else _measure_steps(exact, _FLOATS[numbers.num_bits])


def _read_scales(packed: Parts, numbers: NumberFormat, num_out: int) -> Any:
    """Return the scales in float32 as (rows, groups); what shares one over several rows has it in each."""
    scale = packed["weight_scale"]
    if numbers.scale_dtype == "uint8":  # a power of two, by its exponent
        return (scale.float() - _EXPONENT_BIAS).exp2()
    scale = scale.float()
    if numbers.strategy == "tensor_group":
        return scale / packed["weight_global_scale"]
    if numbers.block_structure:
        return scale.repeat_interleave(numbers.block_structure[0], dim=0)
    return scale.reshape(-1, 1).expand(num_out, 1) if scale.numel() == 1 else scale


def _read_zero_points(packed: Parts, scheme: Scheme, scale: Any) -> Any:
    """Return the value that stands for zero as (rows, groups)."""
    bits, is_packed = scheme.weights.num_bits, scheme.storage == "pack-quantized"
    if scheme.weights.symmetric:  # packed values count from 0 on
        return scale.new_full((1, 1), 2.0 ** (bits - 1) if is_packed else 0.0).expand(scale.shape)
    if not is_packed:
        return packed["weight_zero_point"].float()
    return _unpack(packed["weight_zero_point"].T, bits).T[: len(scale)].float()


def _read_values(packed: Parts, rows: slice, scheme: Scheme) -> Any:
    """Return the stored values of some rows as (rows, in): whole numbers, or floats of few bits in a wider type."""
    if "weight" in packed:
        return packed["weight"][rows]
    values = _unpack(packed["weight_packed"][rows], scheme.weights.num_bits)
    if scheme.weights.type == "int":
        return values
    import torch

    table = torch.tensor(_FP4_VALUES + [-value for value in _FP4_VALUES], device=values.device)
    return table[values.long()]


def _measure_steps(values: Any, layout: FloatLayout) -> Any:
    """Return the distance between neighbours of a float format at each value, (x,) of any shape."""
    import torch

    exponents = values.abs().clamp(max=layout.largest).frexp().exponent - 1
    return torch.ldexp(torch.ones_like(values), exponents.clamp(min=layout.least_exponent) - layout.mantissa_bits)


def _unpack(words: Any, bits: int) -> Any:
    """Return the unsigned values in rows of integers, the first value in a word's lowest bits."""
    import torch

    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
