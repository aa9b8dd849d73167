"""Hold what a step leaves alone against its source: embeddings, norms, all biases, and layers that it excludes.

Such a tensor must be the source's, value by value. Where scales were moved into it from the layers behind, as AWQ and
SmoothQuant do, it must be the source's divided by them. A norm may be stored as its distance from one (Gemma's are).

Not covered: a tensor that the source stores under another name; `load_model` refuses one that is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.products.text.layer_names import name_layer
from pipeline.products.text.model_config import read_config
from pipeline.products.text.optimize.layers import LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.schemes import CACHE_SCALES
from pipeline.running.weight_files import open_weights, read_tensors

_MAX_ROUNDINGS = 4  # of a tensor that scales were moved into, which is rounded with each


def check_kept(folder: Path, *, source: Path, plan: LayerPlan, log: StepLog) -> None:
    """Refuse a quantised folder that changed what its step does not quantise.

    Args:
        folder: what the step wrote.
        source: the dense checkpoint it was made from.
        plan: the layers it was asked to cover.
        log: of the step: the scales that it moved.

    Raises:
        QuantizationError: names the first such tensor, and by how much it is off.
    """
    kind, known = read_config(folder)["model_type"], read_tensors(source)
    with open_weights(folder) as read, open_weights(source) as read_source:
        for name in read_tensors(folder):
            stored, _, part = name.rpartition(".")
            layer = name_layer(stored, kind)
            is_quantised = layer in plan.asked and part != "bias"
            if is_quantised or part in CACHE_SCALES or name not in known:
                continue
            found = read(name)
            expected = read_source(name).to(found.dtype)  # a file may hold several types, and a model is loaded in one
            is_norm = part == "weight" and found.ndim == 1
            off = (
                _measure_moved(found, expected, layer, log, is_norm=is_norm)
                if log.is_moved(layer)
                else _measure(found, expected)
            )
            if off:
                raise QuantizationError(
                    f"{folder}: tensor {name!r}: expected the values of {source}, as the step does not quantise it, "
                    f"found others, which are off by up to {off:.3g}"
                )


def _measure(found: Any, expected: Any) -> float:
    """Return the largest difference of two tensors of one type; 0 for equal bytes."""
    if found.shape != expected.shape:
        return float("inf")
    if _as_words(found).equal(_as_words(expected)):
        return 0.0
    # equal but for the sign of zero is equal
    return float((found.float() - expected.float()).abs().max())


def _as_words(values: Any) -> Any:
    """Return the bytes of a tensor in the widest integers that hold them: fewer are compared faster."""
    import torch

    octets = values.contiguous().flatten().view(torch.uint8)
    return octets.view(torch.int64) if octets.numel() % 8 == 0 and octets.data_ptr() % 8 == 0 else octets


def _measure_moved(found: Any, expected: Any, layer: str, log: StepLog, *, is_norm: bool) -> float:
    """Return how far a tensor is from the source's divided by the scales that were moved; 0 within rounding."""
    import torch

    if found.shape != expected.shape:
        return float("inf")
    numbers = torch.finfo(found.dtype)
    room, floor = _MAX_ROUNDINGS * numbers.eps, _MAX_ROUNDINGS * numbers.smallest_normal * numbers.eps
    differences = []
    for distance in (0.0, 1.0) if is_norm else (0.0,):  # that the stored values are from what multiplies
        wanted = log.scale_as_moved(layer, expected.float() + distance)
        off = (found.float() + distance - wanted).abs()
        if bool((off <= room * (wanted.abs() + distance) + floor).all()):
            return 0.0
        differences.append(float(off.max()))
    return min(differences)
