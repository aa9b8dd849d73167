"""Read back a quantised folder and hold it against the settings of its step.

Only headers and config.json are read: the files that a server will open are checked, not the tensors
that the quantiser had in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.products.text.checkpoints import name_layer, read_config
from pipeline.products.text.optimize.layers import Int4Step, LayerPlan, format_name
from pipeline.products.text.optimize.progress import StepLog
from pipeline.records.digests import TEXT_FILES, digest_file
from pipeline.records.evaluations import LayerCoverage
from pipeline.running.weight_files import TensorInfo, read_tensors

_FLOAT_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_WORD_BITS = 32  # quantised values are packed into int32
_SHAPE_BYTES = 16  # weight_shape: two int64


def check_coverage(
    folder: Path, *, source: Path, step: Int4Step, plan: LayerPlan, log: StepLog
) -> tuple[LayerCoverage, ...]:
    """Check a quantised folder and list the format each linear layer ended in.

    Args:
        folder: what the step wrote.
        source: the checkpoint it was made from.
        step: the settings of the step.
        plan: the layers it was asked to cover.
        log: losses of the step, by layer.

    Raises:
        QuantizationError: a layer has another format or size than asked, or was packed unasked. Or config.json
            declares something else, or a tokenizer, chat template or generation config differs from the source's.
    """
    _check_text_files(folder, source)
    _check_config(folder, step)
    tensors, kind = read_tensors(folder), read_config(folder)["model_type"]
    parts: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        layer, _, part = name.rpartition(".")
        parts.setdefault(name_layer(layer, kind), {})[part] = info
    for layer, layer_parts in parts.items():
        if "weight_packed" in layer_parts and layer not in plan.asked:
            raise QuantizationError(f"{folder}: layer {layer!r} was packed, but the step did not ask for it")
    return tuple(_cover_layers(folder, step, plan, parts, log))


def expected_bytes(shape: tuple[int, int], step: Int4Step, *, scale_bytes: int) -> dict[str, int]:
    """Return the size in bytes of each tensor of a packed layer of shape (out, in)."""
    num_out, num_in = shape
    num_groups = num_in // step.group_size
    sizes = {
        "weight_packed": num_out * math.ceil(num_in * step.bits / _WORD_BITS) * 4,
        "weight_scale": num_out * num_groups * scale_bytes,
        "weight_shape": _SHAPE_BYTES,
    }
    if not step.symmetric:
        sizes["weight_zero_point"] = math.ceil(num_out * step.bits / _WORD_BITS) * 4 * num_groups
    return sizes


def _cover_layers(
    folder: Path, step: Int4Step, plan: LayerPlan, parts: dict[str, dict[str, TensorInfo]], log: StepLog
) -> Iterator[LayerCoverage]:
    for layer, shape in plan.asked.items():
        weight_parts = {part: info for part, info in parts.get(layer, {}).items() if part.startswith("weight")}
        scale = weight_parts.get("weight_scale")
        wanted = expected_bytes(shape, step, scale_bytes=_FLOAT_BYTES.get(scale.dtype, 0) if scale else 0)
        sizes = {part: info.num_bytes for part, info in weight_parts.items()}
        if sizes != wanted:
            raise QuantizationError(
                f"{folder}: layer {layer!r}: expected {format_name(step)} as {_format_sizes(wanted)}, "
                f"found {_format_sizes(sizes)}"
            )
        yield LayerCoverage(
            layer=layer, format=format_name(step), num_bytes=sum(sizes.values()), asked=True, loss=log.losses.get(layer)
        )
    for layer, shape in plan.excluded.items():
        weight = parts.get(layer, {}).get("weight")
        if weight is not None and weight.shape != shape:
            raise QuantizationError(f"{folder}: layer {layer!r}: expected shape {shape}, found {weight.shape}")
        # a head that shares the embedding's weights has no tensor of its own
        yield LayerCoverage(
            layer=layer,
            format=_FLOAT_NAMES.get(weight.dtype, weight.dtype) if weight else "tied",
            num_bytes=weight.num_bytes if weight else 0,
            asked=False,
        )


def _check_config(folder: Path, step: Int4Step) -> None:
    settings: dict[str, Any] = read_config(folder).get("quantization_config") or {}
    groups = list((settings.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
    declared = (
        settings.get("quant_method"),
        settings.get("format"),
        weights.get("num_bits"),
        weights.get("group_size"),
        weights.get("symmetric"),
    )
    wanted = ("compressed-tensors", "pack-quantized", step.bits, step.group_size, step.symmetric)
    if declared != wanted:
        raise QuantizationError(f"{folder}/config.json: quantization_config: expected {wanted}, found {declared}")


def _check_text_files(folder: Path, source: Path) -> None:
    for name in TEXT_FILES:
        before, after = (_digest_if_there(place / name) for place in (source, folder))
        if before != after:
            raise QuantizationError(f"{folder / name}: differs from {source / name}; it must be copied byte by byte")


def _digest_if_there(path: Path) -> str | None:
    return digest_file(path) if path.is_file() else None


def _format_sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{part} {size} B" for part, size in sorted(sizes.items())) or "no tensors"
