"""Hold the weights of a quantised folder against its source: a difference that rounding can't explain is refused.

An eval of a few thousand cases may not show one wrong scale, so the numbers themselves are looked at. Each packed
layer is read back from disk and unpacked, and the scales that AWQ moved from layer to layer are undone. What is left
is the error of rounding, in steps of the group that a weight is in. Two things are known of it:

- rounding raises as often as it lowers. So over a layer the mean error is near 0, and it is one step where a
  zero-point is off by one. GPTQ, which makes up for errors by others, keeps the mean small as well (0.007 steps on
  the shipped checkpoint).
- rounded to nearest, no weight is further off than half a step, so no group's root mean square is larger. A wrong
  scale, or a bit less, makes it about 1 (0.39 at most on the shipped checkpoint, where a uniform error makes 0.29).

Not covered: a single group of a GPTQ layer, in which a weight may be several steps off for good reason. Nor is a
scale that is wrong by a tenth or less, nor are tensors that are not packed, such as norms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.products.text.checkpoints import name_layer, read_config
from pipeline.products.text.optimize.layers import Int4Step, LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.running.weight_files import iterate_weights

MAX_MEAN_STEPS = 0.25  # of a layer: a quarter of what a zero-point that is off by one makes
_HALF_STEP = 0.5


def check_reconstruction(folder: Path, *, source: Path, step: Int4Step, plan: LayerPlan, log: StepLog) -> None:
    """Refuse a quantised folder whose weights are not those of its source, rounded.

    Args:
        folder: what the step wrote.
        source: the dense checkpoint it was made from.
        step: the settings of the step.
        plan: the layers it was asked to cover.
        log: of the step: the scales that it moved. A layer that the source calls otherwise becomes a fallback.

    Raises:
        QuantizationError: names the first such layer, its group where there is one, and the error in steps.
    """
    packed, dense = (_collect(place, plan) for place in (folder, source))
    for layer in plan.asked:
        if layer not in dense:
            log.record_fallback(layer, f"not compared with its source: no tensor of that name in {source}")
            continue
        weight = log.scale_as_moved(layer, dense[layer]["weight"].float())
        errors = _measure_errors(packed[layer], weight, step)
        where = f"{folder}: layer {layer!r}"
        if abs(mean := float(errors.mean())) > MAX_MEAN_STEPS:
            raise QuantizationError(
                f"{where}: its weights are {mean:+.2f} steps from the source's on average, "
                f"expected at most {MAX_MEAN_STEPS}; the zero-point is wrong, or not the one used"
            )
        if step.rounds_to_nearest:
            _check_groups(errors, where, step, dtype=packed[layer]["weight_scale"].dtype)


def _collect(folder: Path, plan: LayerPlan) -> dict[str, dict[str, Any]]:
    """Return the tensors of the planned layers, by layer and by their part in it."""
    kind, tensors = read_config(folder)["model_type"], dict[str, dict[str, Any]]()
    for name, tensor in iterate_weights(folder):
        layer, _, part = name.rpartition(".")
        if (layer := name_layer(layer, kind)) in plan.asked:
            tensors.setdefault(layer, {})[part] = tensor
    return tensors


def _measure_errors(parts: dict[str, Any], weight: Any, step: Int4Step) -> Any:
    """Return how far each weight is off, in steps, as (out, groups, group_size)."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    scale = parts["weight_scale"].float()
    values = unpack_from_int32(parts["weight_packed"], step.bits, weight.shape).float()
    grouped = values.reshape(*scale.shape, step.group_size)
    if not step.symmetric:
        zero = unpack_from_int32(parts["weight_zero_point"], step.bits, torch.Size(scale.shape), packed_dim=0)
        grouped = grouped - zero.float()[..., None]
    return grouped - weight.reshape(grouped.shape) / scale[..., None]


def _check_groups(errors: Any, where: str, step: Int4Step, *, dtype: Any) -> None:
    import torch

    # weight and scale are stored in this format, and so is the value that is up to 2^bits steps from zero
    limit = _HALF_STEP + 2**step.bits * torch.finfo(dtype).eps
    sizes = errors.square().mean(dim=2).sqrt()
    if (worst := float(sizes.max())) > limit:
        row, group = divmod(int(sizes.argmax()), sizes.shape[1])
        raise QuantizationError(
            f"{where}: group {group} of row {row} is {worst:.2f} steps from the source's weights "
            f"(root mean square), expected at most {limit:.2f} of {step.bits} bits; its scale or "
            "its values are wrong"
        )
