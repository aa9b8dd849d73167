"""Plan which linear layers a quantisation step covers, before any weight is read.

Works on names and shapes alone, so settings are checked against a checkpoint in milliseconds.
A pattern that matches nothing is refused here, and so is a group size that divides nothing. Layers that an
engine fuses into one kernel must end in one format. A head that shares its weights with the embedding
must be excluded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import QuantizationError
from pipeline.products.text.checkpoints import layer_shapes, tied_head
from pipeline.products.text.layer_names import find_attention, name_layer
from pipeline.products.text.model_config import detect_format, find_text, read_config
from pipeline.products.text.schemes import NumberFormat, Scheme
from pipeline.products.text.step_settings import QuantizeStep
from pipeline.running.weight_files import read_tensors
from pipeline.settings.layer_patterns import list_nearest, match_layers

# what is offered, the largest first: the embedded engine runs all, others may have no kernel for the small ones
GROUP_SIZES = (128, 64, 32, 16, 8, 4)
_NUM_OFFERED = 3
_SYNTAX = "write a name, a shell pattern such as '*.down_proj', or re: and a regular expression"
_CONV1D = "transformers' Conv1D (c_attn, c_proj, c_fc)"
# of models whose layers llm-compressor does not quantise, or does not pack: their class
_OWN_LAYERS = {"gpt2": _CONV1D, "openai-gpt": _CONV1D, "imagegpt": _CONV1D, "falcon": "transformers' FalconLinear"}
# vLLM computes each of these as one matrix product, so their weights need one format
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class LayerPlan:
    """The linear layers of a checkpoint, split by what a step asks for; shapes are (out, in)."""

    asked: dict[str, tuple[int, int]]
    excluded: dict[str, tuple[int, int]]
    schemes: dict[str, Scheme]  # of each layer that is asked
    cached: tuple[str, ...] = ()  # the attention layers whose keys and values are stored in `cache`
    cache: NumberFormat | None = None

    @property
    def groups(self) -> list[tuple[Scheme, list[str]]]:
        """Each scheme with its layers."""
        groups: dict[str, tuple[Scheme, list[str]]] = {}
        for layer, scheme in self.schemes.items():
            groups.setdefault(scheme.model_dump_json(), (scheme, []))[1].append(layer)
        return list(groups.values())


def plan_folder(folder: Path, step: QuantizeStep) -> LayerPlan:
    """Plan a step for a checkpoint on disk, from its headers alone."""
    check_source(folder)
    return plan_layers(layer_shapes(folder), step, tied_head=tied_head(folder))


def count_output_bytes(folder: Path, step: QuantizeStep) -> int:
    """Count the bytes of a checkpoint's weights after a step, from headers alone."""
    plan, kind = plan_folder(folder, step), read_config(folder)["model_type"]
    total = 0
    for name, info in read_tensors(folder).items():
        layer = name_layer(name.removesuffix(".weight"), kind)
        scheme = plan.schemes.get(layer)
        # scales have the type of the weights
        total += scheme.count_bytes(plan.asked[layer], float_type=info.dtype) if scheme else info.num_bytes
    return total


def check_source(folder: Path) -> None:
    """Refuse a checkpoint that is already quantised, that mixes experts, or that has no linear layers of torch."""
    config, tensors = read_config(folder), read_tensors(folder)
    weight_format = detect_format(folder, config, tensors)
    if weight_format != "dense":
        raise QuantizationError(
            f"{folder}: already quantised as {weight_format!r}; quantise the original, or use it with `steps: []`"
        )
    # transformers stacks the experts into one tensor, which holds no linear layer for the library to find
    if experts := _find_experts(config, tensors):
        raise QuantizationError(
            f"{folder}: expected a model without experts, got model type {config['model_type']!r} with {experts}: "
            "experts can't be quantised here; serve and compare it with `steps: []`"
        )

    if own := _OWN_LAYERS.get(config["model_type"]):
        raise QuantizationError(
            f"{folder}: expected linear layers, got model type {config['model_type']!r}, whose layers are of {own}, "
            "which llm-compressor does not quantise; serve and compare it with `steps: []`"
        )


def _find_experts(config: Mapping[str, Any], tensors: Iterable[str]) -> str | None:
    """Name the setting or the tensor that shows a mixture of experts; None: there is none."""
    for part in (config, find_text(config)):
        for key, value in part.items():
            if "experts" in key and "per_tok" not in key and isinstance(value, int) and value > 1:
                return f"{key} {value}"
    return next((repr(name) for name in tensors if ".experts." in name), None)


def plan_layers(
    shapes: Mapping[str, tuple[int, int]], step: QuantizeStep, *, tied_head: str | None = None
) -> LayerPlan:
    """Split layers into asked and excluded, and refuse what can't be done.

    Args:
        shapes: (out_features, in_features) of each linear layer.
        step: the settings of the step.
        tied_head: name of a head that shares its weights with the embedding, if there is one.

    Raises:
        QuantizationError: a pattern matches no layer, nothing is left, or no layer has a cache. Or a rule is for an
            excluded layer, groups or blocks don't divide a layer, a fused group disagrees, or the tied head is asked
            for.
    """
    excluded = match_patterns(shapes, step.exclude)
    asked = {} if step.is_cache_alone else {name: shape for name, shape in shapes.items() if name not in excluded}
    plan = LayerPlan(
        asked=asked,
        excluded={name: shape for name, shape in shapes.items() if name not in asked},
        schemes=_choose_schemes(asked, step, excluded) if asked else {},
        cached=_find_caches(shapes) if step.kv_cache else (),
        cache=step.kv_cache.resolve() if step.kv_cache else None,
    )
    if not plan.asked and not step.is_cache_alone:
        raise QuantizationError(f"exclude: {step.exclude!r} leaves none of {len(shapes)} linear layers to quantise")
    if tied_head in plan.asked:
        raise QuantizationError(
            f"exclude: {tied_head!r} shares its weights with the embedding, which stays as it is; add it to `exclude`"
        )
    _check_widths(plan)
    _check_fused_groups(plan)
    return plan


def _find_caches(layers: Iterable[str]) -> tuple[str, ...]:
    found = find_attention(layers)
    if not found:
        raise QuantizationError(
            "kv_cache: expected attention layers with a projection to keys and values, found none; this model has no "
            "cache that llm-compressor can quantise: remove kv_cache"
        )
    return found


def _choose_schemes(asked: Iterable[str], step: QuantizeStep, excluded: set[str]) -> dict[str, Scheme]:
    """Return the scheme of each layer: of the first rule that matches it, else the step's own."""
    schemes, ruled = dict.fromkeys(asked, step.resolve()), set[str]()
    for i, rule in enumerate(step.rules):
        matched = match_patterns([*schemes, *excluded], rule.layers, key=f"rules.{i}.layers")
        if both := matched & excluded:
            raise QuantizationError(
                f"rules.{i}.layers: expected layers that are quantised, got {min(both)!r}, which `exclude` names; "
                "remove it from one of both"
            )
        if matched <= ruled:
            raise QuantizationError(
                f"rules.{i}.layers: expected a layer that no earlier rule matches, as the first one counts, got "
                f"{rule.layers!r}; put it before them, or remove it"
            )
        schemes |= dict.fromkeys(matched - ruled, rule.resolve())
        ruled |= matched
    return schemes


def check_rank(plan: LayerPlan, step: QuantizeStep, num_tokens: int) -> None:
    """Refuse fewer calibration tokens than the widest layer has input features, where they determine its weights."""
    if step.algorithm == "rtn":
        return
    widest = max(plan.asked, key=lambda name: plan.asked[name][1])
    if num_tokens < (width := plan.asked[widest][1]):
        raise QuantizationError(
            f"calibration: {num_tokens} tokens can't determine the {width} input features of {widest}; "
            "raise num_samples or max_tokens"
        )


def match_patterns(names: Iterable[str], patterns: Iterable[str], *, key: str = "exclude") -> set[str]:
    """Return the layers that any pattern matches: a name, a shell pattern, or "re:" and a regex from the start.

    Args:
        names: of all linear layers.
        patterns: of the setting `key`, which messages name.

    Raises:
        QuantizationError: a pattern matches no layer (the nearest are named) or is no regex.
    """
    known = list(names)
    matched: set[str] = set()
    for pattern in patterns:
        try:
            matching = match_layers(pattern, known)
        except re.error as error:
            raise QuantizationError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
        if not matching:
            nearest = ", ".join(list_nearest(pattern, known))
            raise QuantizationError(f"{key}: {pattern!r} matches no linear layer; the nearest are {nearest}; {_SYNTAX}")
        matched |= matching
    return matched


def _check_widths(plan: LayerPlan) -> None:
    """Refuse layers that the groups or blocks of their scheme don't divide."""
    wrong = {name: shape for name, shape in plan.asked.items() if not _divides(plan.schemes[name], shape)}
    if not wrong:
        return
    scheme = plan.schemes[next(iter(wrong))]
    wrong = {name: shape for name, shape in wrong.items() if plan.schemes[name] == scheme}
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    if blocks := scheme.weights.block_structure:
        shown = ", ".join(f"{name} ({rows} x {columns})" for name, (rows, columns) in list(wrong.items())[:3])
        raise QuantizationError(
            f"scheme: blocks of {blocks[0]} x {blocks[1]} do not divide {len(wrong)} layers: {shown}{more}; "
            "exclude them, or give them another scheme by a rule"
        )
    key, size, inputs = "group_size", scheme.weights.group_size, scheme.input_activations
    if inputs and (not size or all(width % size == 0 for _, width in wrong.values())):
        key, size = "input_activations.group_size", inputs.group_size
    sizes = GROUP_SIZES if key == "group_size" and not scheme.weights.scale_dtype else ()
    fits = [g for g in sizes if all(shape[1] % g == 0 for shape in plan.asked.values())][:_NUM_OFFERED]
    offer = f"use group_size {' or '.join(map(str, fits))}, or exclude them" if fits else "exclude them"
    shown = ", ".join(f"{name} ({width})" for name, (_, width) in list(wrong.items())[:3])
    raise QuantizationError(
        f"{key}: {size} does not divide the input features of {len(wrong)} layers: {shown}{more}; {offer}"
    )


def _divides(scheme: Scheme, shape: tuple[int, int]) -> bool:
    inputs = scheme.input_activations
    blocks = scheme.weights.block_structure or (1, scheme.weights.group_size or 1)
    by_input = inputs.group_size or 1 if inputs else 1
    return shape[0] % blocks[0] == 0 and shape[1] % blocks[1] == 0 and shape[1] % by_input == 0


def _check_fused_groups(plan: LayerPlan) -> None:
    parents = dict.fromkeys(name.rpartition(".")[0] for name in plan.asked)
    for parent in parents:
        for members in _FUSED:
            layers = {m: f"{parent}.{m}" for m in members}
            excluded = [m for m, layer in layers.items() if layer in plan.excluded]
            schemes = {m: plan.schemes[layer] for m, layer in layers.items() if layer in plan.asked}
            if excluded and schemes:
                raise QuantizationError(
                    f"exclude: {parent}: {', '.join(members)} are fused by vLLM and need one format, but "
                    f"{', '.join(excluded)} would be excluded and {', '.join(schemes)} quantised; exclude all or none"
                )
            first = next(iter(schemes), "")
            if other := next((m for m in schemes if schemes[m] != schemes[first]), None):
                raise QuantizationError(
                    f"rules: {parent}: {', '.join(members)} are fused by vLLM and need one format, but {first} "
                    f"would be {schemes[first].name} and {other} {schemes[other].name}; give all of them one scheme"
                )
