"""Hold the stored scales of inputs and of the cache against what calibration saw: nothing else shows a wrong one.

The largest value of each input, key and value is noted while the library calibrates, beside its own observers. A scale
that is read back from disk must be the one that just reaches it. A scale of 1, as engines assume where none is stored,
cuts or coarsens most values and may still pass an eval of short texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.products.text.layer_names import name_layer
from pipeline.products.text.model_config import read_config
from pipeline.products.text.optimize.layers import LayerPlan
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.schemes import CACHE_SCALES, NumberFormat
from pipeline.running.weight_files import open_weights, read_tensors

MAX_OFF = 0.02  # relative; scales in bfloat16 are rounded by 0.4 %
# the largest number of a format; integers reach from -128 to 127, and the library takes half of that span
_LARGEST = {("float", 8): 448.0, ("float", 4): 6.0, ("int", 8): 127.5, ("int", 4): 7.5}
_LARGEST_SCALE = 448.0  # of scales that are floats of eight bits themselves


def check_ranges(folder: Path, *, plan: LayerPlan, log: StepLog) -> None:
    """Refuse stored scales of inputs, keys and values that don't fit what calibration saw.

    Args:
        folder: what the step wrote.
        plan: the layers and caches that it was asked to cover.
        log: of the step: the largest values that were seen.

    Raises:
        QuantizationError: names the first such layer, with both numbers.
    """
    kind = read_config(folder)["model_type"]
    with open_weights(folder) as read:
        for stored in read_tensors(folder):
            parent, _, part = stored.rpartition(".")
            layer = name_layer(parent, kind)
            for seen, numbers in _find_range(layer, part, plan, log):
                _check_scale(read(stored).float().flatten(), seen, numbers, part, where=f"{folder}: layer {layer!r}")


def _find_range(layer: str, part: str, plan: LayerPlan, log: StepLog) -> Iterator[tuple[Any, NumberFormat]]:
    """Yield what was seen of the values that a tensor is the scale of, and their format; nothing of other tensors."""
    scheme = plan.schemes.get(layer)
    if part in ("input_scale", "input_global_scale") and scheme and scheme.input_activations:
        yield log.ranges.get(f"{layer}.input"), scheme.input_activations
    if part in CACHE_SCALES and plan.cache:
        yield log.ranges.get(f"{layer}.{part[0]}"), plan.cache


def _check_scale(scale: Any, seen: Any, numbers: NumberFormat, part: str, *, where: str) -> None:
    """Compare a stored scale, (1,) or (heads,), with the largest values seen, of the same shape or one a head."""
    if seen is None:
        raise QuantizationError(
            f"{where}: its {part} is stored, but no text of the calibration came through this layer"
        )
    largest = seen.float().cpu().flatten()
    largest = largest if len(scale) == len(largest) else largest.max().reshape(1)
    if not bool(largest.isfinite().all()):
        raise QuantizationError(
            f"{where}: expected finite values in calibration, found {float(largest.max())}, so that no {part} fits; "
            "use a source whose activations stay in its number format"
        )
    reach = _LARGEST[numbers.type, numbers.num_bits]
    wanted = reach * _LARGEST_SCALE / largest if part == "input_global_scale" else largest / reach
    off = (scale / wanted - 1).abs()
    # where nothing but zeros came, the library's floor is as good as any scale
    off = off.where(largest > 0, (~(scale.isfinite() & (scale > 0))).float())
    worst = int(off.argmax())
    if not bool(off.max() <= MAX_OFF):  # as of NaN
        raise QuantizationError(
            f"{where}: its {part} is {float(scale[worst]):.4g}, expected {float(wanted[worst]):.4g}, as the largest "
            f"value that calibration saw is {float(largest[worst]):.4g}; the scale is wrong"
        )
