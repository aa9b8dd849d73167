"""Hold the tensors of a quantised checkpoint against its own config.json, from headers alone.

Loaders trust both. A scale of another shape is spread over its row and a layer without one is read as it is, so a wrong
checkpoint answers, only worse. Whoever made it: what a step wrote is held against the step's settings besides
(`optimize/coverage.py`).

Source: compressed-tensors 0.19, `quantization/quant_config.py`.

Not covered: values, as there is no source to compare with; sparse layouts; a layer of a format that `Scheme` does not
know; names of composite models, which loaders change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.errors import CheckpointError
from pipeline.products.text.layer_names import find_attention, is_embedding, name_layer
from pipeline.products.text.schemes import (
    CACHE_SCALES,
    Part,
    Scheme,
    StoredGroups,
    format_parts,
    read_format,
    shape_cache_scales,
)
from pipeline.running.weight_files import TensorInfo

_FLOATS = ("F32", "F16", "BF16")
_NOT_KNOWN = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")  # layouts of sparse weights
_MARKS = ("weight_packed", "weight_scale")  # a layer that has one of them is quantised, as one of small numbers is
_SMALL = ("I8", "U8", "F8_E4M3")
_PER_LAYER = ((), (1,))  # shapes of a scale that a whole layer shares

Parts = dict[str, TensorInfo]  # the tensors of a layer by the last part of their name


def check_stored_schemes(path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a checkpoint of compressed-tensors whose layers are stored otherwise than its config.json says.

    Args:
        path: of config.json, for messages.
        config: what it holds.
        tensors: by name, from the headers.

    Raises:
        CheckpointError: weights are floats that each forward pass would have to round, or outputs are rounded. A layer
            lacks a tensor, has one of another shape or type, is quantised unsaid, or is not though others of its name
            are. Or a scale of keys or values is missing.
    """
    quantization = config["quantization_config"]
    groups = _read_groups(path, quantization)
    layers = _collect_layers(config, tensors)
    stored = any(group.get("weights") for group in (quantization.get("config_groups") or {}).values())
    if not stored and (quantization.get("kv_cache_scheme") or quantization.get("config_groups")):
        _check_cache(path, config, layers)  # only what attention keeps or reads is rounded
        return
    _check_floats(path, quantization, layers)
    if not any(map(_is_quantised, layers.values())):
        raise CheckpointError(f"{path}: quantization_config: expected quantised layers, found none; remove it")
    if "text_config" not in config:
        quantised = {layer.rpartition(".")[2] for layer, parts in layers.items() if _is_quantised(parts)}
        for layer, parts in layers.items():
            group, is_like_others = groups.find(layer), layer.rpartition(".")[2] in quantised
            group = group if group and group.get("weights") else None
            _check_group(path, layer, parts, group, is_like_others=is_like_others)
            if group is not None and _is_quantised(parts):
                _check_parts(path, layer, parts, group, storage=group.get("format") or quantization.get("format"))
        _check_cache(path, config, layers)


def _read_groups(path: Path, quantization: Mapping[str, Any]) -> StoredGroups:
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"{path}: expected config_groups with a mapping for each group, got another form")
    if outputs := next((name for name, group in groups.items() if group.get("output_activations")), None):
        raise CheckpointError(
            f"{path}: expected schemes of weights and inputs, got output_activations in {outputs}: nothing here sees "
            "whether outputs are rounded; quantise without them"
        )
    try:
        return StoredGroups(quantization)
    except (re.error, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path}: quantization_config: expected names or regular expressions in targets and ignore: {error}"
        ) from None


def _collect_layers(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> dict[str, Parts]:
    layers: dict[str, Parts] = {}
    for name, info in tensors.items():
        layer, _, part = name.rpartition(".")
        if not is_embedding(name):
            layers.setdefault(name_layer(layer, config["model_type"]), {})[part] = info
    return layers


def _check_floats(path: Path, quantization: Mapping[str, Any], layers: Mapping[str, Parts]) -> None:
    """Refuse weights that are not stored in few bits: engines serve them as they are, unrounded."""
    scaled = (layer for layer, parts in layers.items() if "weight_scale" in parts)
    floats = next((layer for layer in scaled if _is_float(layers[layer].get("weight"))), None)
    if quantization.get("format") == "dense" or floats:
        raise CheckpointError(
            f"{path}: expected weights that are stored in few bits, found float ones ({floats or 'format dense'}): "
            "each forward pass would have to round them, and no engine here does; save it with save_compressed=True"
        )


def _is_quantised(parts: Parts) -> bool:
    weight = parts.get("weight")
    return any(mark in parts for mark in _MARKS) or (weight is not None and weight.dtype in _SMALL)


def _is_float(weight: TensorInfo | None) -> bool:
    return weight is not None and weight.dtype in _FLOATS


def _check_group(
    path: Path, layer: str, parts: Parts, group: Mapping[str, Any] | None, *, is_like_others: bool
) -> None:
    """Refuse a layer that is quantised and in no group, or in one and not quantised."""
    is_quantised = _is_quantised(parts)
    if is_quantised and group is None:
        raise CheckpointError(
            f"{path}: expected each quantised layer in one of config_groups and not in ignore, found {layer!r} "
            f"({format_parts(_describe(parts))}); correct the groups, or copy both files from one source"
        )
    # routers and the like are no linear layers, and no name shows it: only one that others are like can be missing
    if (
        group is not None
        and group.get("weights")
        and not is_quantised
        and is_like_others
        and _is_float(parts.get("weight"))
    ):
        raise CheckpointError(
            f"{path}: expected the layer {layer!r} quantised, as config_groups say and others of its name are, "
            f"found {format_parts(_describe(parts))}; name it in ignore, or copy both files from one source"
        )


def _check_parts(path: Path, layer: str, parts: Parts, group: Mapping[str, Any], *, storage: str | None) -> None:
    """Refuse tensors that the layer's scheme does not have, or has in another shape or type."""
    scheme = _read_scheme(group)
    if scheme is None or storage in _NOT_KNOWN:
        return
    if storage == "mixed-precision":  # of all groups together, where none has its own
        storage = scheme.storage
    if storage not in scheme.storages:
        raise CheckpointError(
            f"{path}: layer {layer!r}: expected format {' or '.join(scheme.storages)} for {scheme.name}, found "
            f"{storage!r}: its values would be read as other numbers; copy weights and config from one source"
        )
    found, wanted = _describe(parts), list(_list_wanted(scheme, parts, storage))
    if not wanted:
        raise CheckpointError(
            f"{path}: layer {layer!r}: expected a width that the groups of {scheme.name} divide, found "
            f"{format_parts(found)}; name it in ignore when it is quantised"
        )
    if not any(_agree(found, one) for one in wanted):
        raise CheckpointError(
            f"{path}: layer {layer!r}: expected {format_parts(wanted[0])}, as {scheme.name} has them, found "
            f"{format_parts(found)}; copy weights and config from one source"
        )


def _read_scheme(group: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a group; None: not one that is known here."""
    formats = {
        part: read_format(numbers).model_dump(exclude_none=True)
        for part in ("weights", "input_activations")
        if (numbers := group.get(part))
    }
    try:
        scheme = Scheme.model_validate(formats)
    except ValidationError:
        return None
    return None if any(scheme.find_problems()) else scheme


def _list_wanted(scheme: Scheme, parts: Parts, storage: str) -> Iterator[dict[str, Part]]:
    """Yield what may be stored of a layer, the likeliest first; nothing where groups don't divide its width."""
    weight = parts.get("weight_packed") or parts.get("weight")
    if weight is None or len(weight.shape) != 2:
        yield {"weight_packed" if "pack" in storage else "weight": ("", ())}
        return
    num_out, columns = weight.shape
    per_item = {"I32": 32, "U8": 8}.get(weight.dtype, scheme.weights.num_bits) // scheme.weights.num_bits
    # the last word may be filled up, and a width that its groups don't divide is none
    inputs = scheme.input_activations
    for width in range(columns * per_item, (columns - 1) * per_item, -1):
        if all(width % (numbers.group_size or 1) == 0 for numbers in (scheme.weights, inputs) if numbers):
            yield scheme.list_parts((num_out, width), storage=storage)


def _describe(parts: Parts) -> dict[str, Part]:
    return {name: (info.dtype, info.shape) for name, info in parts.items() if name.startswith(("weight", "input"))}


def _agree(found: Mapping[str, Part], wanted: Mapping[str, Part]) -> bool:
    """Whether a layer has the tensors that it must have: floats of any width, and perhaps an order of its channels."""
    return found.keys() - {"weight_g_idx"} == wanted.keys() and all(
        (found[name][0] == dtype or {found[name][0], dtype} <= set(_FLOATS))
        and (found[name][1] == shape or (found[name][1] in _PER_LAYER and shape in _PER_LAYER))
        for name, (dtype, shape) in wanted.items()
    )


def _check_cache(path: Path, config: Mapping[str, Any], layers: Mapping[str, Parts]) -> None:
    """Refuse a calibrated cache whose scales are missing: engines take 1 for them."""
    cache = config["quantization_config"].get("kv_cache_scheme")
    if not isinstance(cache, dict) or cache.get("dynamic"):
        return
    shape = shape_cache_scales(cache, config)
    shapes = _PER_LAYER if shape in _PER_LAYER else (shape,)
    for layer in find_attention(layers):
        for part in CACHE_SCALES:
            if "output_scale" in layers.get(f"{layer}.{part[0]}_proj", {}):  # as releases before 0.10 wrote it
                continue
            info = layers.get(layer, {}).get(part)
            if info is None or info.shape not in shapes:
                found = "none" if info is None else f"shape {info.shape}"
                raise CheckpointError(
                    f"{path}: kv_cache_scheme: expected {layer}.{part} of shape {shapes[-1]}, found {found}; copy "
                    "weights and config from one source"
                )
