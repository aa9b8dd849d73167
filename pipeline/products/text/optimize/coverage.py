"""Read back a quantised folder and hold it against the settings of its step.

Only headers and config.json are read: the files that a server will open are checked, not the tensors
that the quantiser had in memory.
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
from pipeline.products.text.schemes import CACHE_SCALES, NumberFormat, format_parts, shape_cache_scales
from pipeline.records.digests import TEXT_FILES, digest_file
from pipeline.records.evaluations import LayerCoverage
from pipeline.running.weight_files import TensorInfo, read_tensors

_FLOAT_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTISED = ("weight_packed", "weight_scale")  # a layer that has one of them is not dense


def check_coverage(folder: Path, *, source: Path, plan: LayerPlan, log: StepLog) -> tuple[LayerCoverage, ...]:
    """Check a quantised folder and list the format each linear layer ended in.

    Args:
        folder: what the step wrote.
        source: the checkpoint it was made from.
        plan: the layers that the step was asked to cover, and their schemes.
        log: losses of the step, by layer.

    Raises:
        QuantizationError: a layer has another format or size than asked, or was quantised unasked. Or config.json
            declares something else, or a tokenizer, chat template or generation config differs from the source's.
    """
    _check_text_files(folder, source)
    _check_config(folder, plan)
    tensors, kind = read_tensors(folder), read_config(folder)["model_type"]
    parts: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        layer, _, part = name.rpartition(".")
        parts.setdefault(name_layer(layer, kind), {})[part] = info
    for layer, layer_parts in parts.items():
        is_unasked = any(part in layer_parts for part in _QUANTISED) and layer not in plan.asked
        if is_unasked or (any(part in layer_parts for part in CACHE_SCALES) and layer not in plan.cached):
            raise QuantizationError(f"{folder}: layer {layer!r} was quantised, but the step did not ask for it")
    return tuple(_cover_layers(folder, plan, parts, log))


def _cover_layers(
    folder: Path, plan: LayerPlan, parts: dict[str, dict[str, TensorInfo]], log: StepLog
) -> Iterator[LayerCoverage]:
    for layer, shape in plan.asked.items():
        scheme, found = plan.schemes[layer], parts.get(layer, {})
        stored = {part: info for part, info in found.items() if part.startswith(("weight", "input"))}
        scale = stored.get("weight_scale")
        float_type = scale.dtype if scale and scale.dtype in _FLOAT_NAMES else "BF16"
        wanted = scheme.list_parts(shape, float_type=float_type)
        if {part: (info.dtype, info.shape) for part, info in stored.items()} != wanted:
            raise QuantizationError(
                f"{folder}: layer {layer!r}: expected {scheme.name} as {format_parts(wanted)}, "
                f"found {format_parts({part: (info.dtype, info.shape) for part, info in stored.items()})}"
            )
        yield LayerCoverage(
            layer=layer,
            format=scheme.name,
            num_bytes=sum(info.num_bytes for info in stored.values()),
            asked=True,
            loss=log.losses.get(layer),
        )
    yield from _cover_caches(folder, plan, parts)
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


def _cover_caches(folder: Path, plan: LayerPlan, parts: dict[str, dict[str, TensorInfo]]) -> Iterator[LayerCoverage]:
    if plan.cache is None:
        return
    shape = shape_cache_scales(plan.cache.model_dump(), read_config(folder))
    wanted = {} if plan.cache.dynamic else dict.fromkeys(CACHE_SCALES, shape)
    for layer in plan.cached:
        found = {part: info for part, info in parts.get(layer, {}).items() if part in CACHE_SCALES}
        if (shapes := {part: info.shape for part, info in found.items()}) != wanted:
            raise QuantizationError(
                f"{folder}: layer {layer!r}: expected scales of keys and values of shapes {wanted}, found {shapes}"
            )
        yield LayerCoverage(
            layer=layer,
            format=f"kv-{plan.cache.name}",
            num_bytes=sum(info.num_bytes for info in found.values()),
            asked=True,
        )


def _check_config(folder: Path, plan: LayerPlan) -> None:
    """Refuse a config.json that declares other schemes than those of the plan, or other ways of storing them."""
    settings: dict[str, Any] = read_config(folder).get("quantization_config") or {}
    groups = list((settings.get("config_groups") or {}).values())
    declared = sorted(_describe(group, group.get("format") or settings.get("format")) for group in groups)
    wanted = sorted(_describe(scheme.model_dump(), scheme.storage) for scheme, _ in plan.groups)
    declared += [_describe({"kv_cache": cache}) for cache in (settings.get("kv_cache_scheme"),) if cache]
    wanted += [_describe({"kv_cache": plan.cache.model_dump()})] if plan.cache else []
    if (settings.get("quant_method"), declared) != ("compressed-tensors", wanted):
        raise QuantizationError(
            f"{folder}/config.json: quantization_config: expected {'; '.join(wanted)} of compressed-tensors, "
            f"found {'; '.join(declared) or 'no group'} of {settings.get('quant_method')}"
        )


def _describe(group: dict[str, Any], storage: Any = "") -> str:
    """Write a scheme as config.json has it in one line: its storage, and the fields of its numbers that are set."""
    shown = [str(storage)]
    for part in ("weights", "input_activations", "kv_cache"):
        numbers = group.get(part) or {}
        fields = {name: numbers.get(name) for name in NumberFormat.model_fields}
        fields["scale_dtype"] = str(fields["scale_dtype"] or "").removeprefix("torch.") or None
        shown.append(", ".join(f"{name} {value}" for name, value in fields.items() if value not in (None, False)))
    return " | ".join(filter(None, shown))


def _check_text_files(folder: Path, source: Path) -> None:
    for name in TEXT_FILES:
        before, after = (_digest_if_there(place / name) for place in (source, folder))
        if before != after:
            raise QuantizationError(f"{folder / name}: differs from {source / name}; it must be copied byte by byte")


def _digest_if_there(path: Path) -> str | None:
    return digest_file(path) if path.is_file() else None
