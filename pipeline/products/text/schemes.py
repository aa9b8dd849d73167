"""Number formats of quantised layers, by the names and in the fields of compressed-tensors.

A scheme says how the weights of a layer are stored and, where there are any, how its inputs are rounded while it runs.
`PRESETS` are the library's own of 4 and 8 bits (a test holds them against it), so that settings are read without it.
Source: compressed-tensors 0.19, `quantization/quant_scheme.py` and `compressors/`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.products.text.model_config import find_text
from pipeline.settings.base import Settings

_WORD_BITS = 32  # narrow integers are packed into int32
_HALF_BYTE = 4
_LEAST_SHARED = 4  # weights that have a scale: with fewer it takes more room than they do

_ITEM_BYTES = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}

Part = tuple[str, tuple[int, ...]]  # type as safetensors spells it, and shape
CACHE_SCALES = ("k_scale", "v_scale")  # of a calibrated cache, in each layer of attention


class NumberFormat(Settings):
    """Numbers of few bits and what shares a scale: the arguments of compressed-tensors' `QuantizationArgs`."""

    num_bits: Literal[4, 8]
    type: Literal["int", "float"]
    strategy: Literal["tensor", "channel", "token", "group", "tensor_group", "block", "attn_head"]
    symmetric: bool = True  # no zero-point
    dynamic: bool | Literal["local"] = False  # scales are taken from each input while it runs
    group_size: Annotated[int, Field(ge=1)] | None = None  # input channels that share a scale
    block_structure: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)] | None = None
    scale_dtype: Literal["float8_e4m3fn", "uint8"] | None = None  # None: that of the weights

    def find_problems(self) -> Iterator[str]:
        """Yield what contradicts itself, one line each, starting with the key."""
        needs = {"group": "group_size", "tensor_group": "group_size", "block": "block_structure"}.get(self.strategy)
        for name in ("group_size", "block_structure"):
            if (getattr(self, name) is None) == (name == needs):
                wanted = "a value" if name == needs else "none"
                yield f"{name}: expected {wanted} with strategy {self.strategy}, got {getattr(self, name)!r}"
        size = math.prod(self.block_structure) if self.block_structure else self.group_size
        if size is not None and size < _LEAST_SHARED:
            yield f"{needs}: expected {_LEAST_SHARED} weights or more that share a scale, got {size}"
        if self.type == "float" and not self.symmetric:
            yield "symmetric: expected true with type float, got false"
        is_small = self.strategy == "tensor_group" or self.scale_dtype or (self.type, self.num_bits) == ("float", 4)
        if is_small and not self._is_micro_scaled:
            yield (
                "scale_dtype: expected the numbers of NVFP4 (float, 4 bits, strategy tensor_group, group_size 16, "
                "scale_dtype float8_e4m3fn) or of MXFP4 and MXFP8 (float, strategy group, group_size 32, scale_dtype "
                f"uint8), got {self._shown}; there are no others with scales of 8 bits, nor floats of 4 bits"
            )

    @property
    def _is_micro_scaled(self) -> bool:
        """Whether these are floats of a published format whose groups have scales of eight bits."""
        found = (self.type, self.strategy, self.group_size, self.scale_dtype)
        is_nvidia = self.num_bits == _HALF_BYTE and found == ("float", "tensor_group", 16, "float8_e4m3fn")
        return is_nvidia or found == ("float", "group", 32, "uint8")

    @property
    def _shown(self) -> str:
        fields = self.model_dump(include={"type", "num_bits", "strategy", "group_size", "scale_dtype"})
        return ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)

    @property
    def name(self) -> str:
        """Short name, such as "int4-g128-symmetric", "fp8-channel" or "nvfp4"."""
        if self.scale_dtype:
            return f"{'nv' if self.scale_dtype == 'float8_e4m3fn' else 'mx'}fp{self.num_bits}"
        sharing = {"group": f"g{self.group_size}", "block": "x".join(map(str, self.block_structure or ()))}
        name = f"{'int' if self.type == 'int' else 'fp'}{self.num_bits}-{sharing.get(self.strategy, self.strategy)}"
        if self.type == "int":
            name += "-symmetric" if self.symmetric else "-asymmetric"
        return name + ("-dynamic" if self.dynamic else "")


class Scheme(Settings):
    """How a layer's weights are stored, and how its inputs are rounded (None: not at all)."""

    weights: NumberFormat
    input_activations: NumberFormat | None = None

    def find_problems(self) -> Iterator[str]:
        """Yield what contradicts itself, one line each, starting with the key."""
        weights, inputs = self.weights, self.input_activations
        yield from (f"weights.{problem}" for problem in weights.find_problems())
        if weights.dynamic or weights.strategy in ("token", "attn_head"):
            yield "weights: expected scales that are stored with the weights, got dynamic ones or strategy token"
        if not weights.symmetric and weights.strategy in ("tensor", "block"):
            yield (  # no storage of the library has one
                f"weights.symmetric: expected true with strategy {weights.strategy}, whose values would share a "
                "zero-point, got false; set it, or strategy channel or group"
            )
        if inputs is not None:
            yield from (f"input_activations.{problem}" for problem in inputs.find_problems())
            yield from (f"input_activations.{problem}" for problem in _find_input_problems(inputs))

    @property
    def name(self) -> str:
        """Short name of the format: of the weights, and behind a slash of the inputs."""
        return self.weights.name + (f"/{self.input_activations.name}" if self.input_activations else "")

    @property
    def needs_calibration(self) -> bool:
        """Whether inputs must be seen before: a scale of theirs is stored."""
        return self.input_activations is not None and self.input_activations.dynamic is not True

    @property
    def needs_bfloat16(self) -> bool:
        """Whether transformers unpacks the weights into bfloat16 alone: those whose scales are of eight bits."""
        return self.weights.scale_dtype is not None

    @property
    def storage(self) -> str:
        """The format as config.json calls it, which says how values are laid out."""
        if self.weights.scale_dtype:
            return f"{self.weights.name}-{'pack-quantized' if self.weights.num_bits == _HALF_BYTE else 'quantized'}"
        if self.weights.type == "float":
            return "float-quantized" if self.input_activations else "naive-quantized"
        return "int-quantized" if self.input_activations else "pack-quantized"

    @property
    def storages(self) -> tuple[str, ...]:
        """All formats of config.json that can hold these weights, the one that llm-compressor chooses first."""
        if self.weights.scale_dtype:
            return (self.storage,)
        others = ("pack-quantized", "int-quantized") if self.weights.type == "int" else ("float-quantized",)
        return tuple(dict.fromkeys((self.storage, *others, "naive-quantized")))

    def list_parts(
        self, shape: tuple[int, int], *, float_type: str = "BF16", storage: str | None = None
    ) -> dict[str, Part]:
        """Return what is stored of a layer of shape (out, in): type and shape of each tensor.

        Args:
            shape: of the weight.
            float_type: of the checkpoint's other weights, as safetensors spells it; scales have it too.
            storage: one of `storages`; None: the first.
        """
        weights, (num_out, num_in), storage = self.weights, shape, storage or self.storage
        scales = scale_shape(weights, shape)
        scale_type = {"float8_e4m3fn": "F8_E4M3", "uint8": "U8", None: float_type}[weights.scale_dtype]
        parts: dict[str, Part] = {"weight_scale": (scale_type, scales)}
        if storage == "pack-quantized":
            parts["weight_packed"] = ("I32", (num_out, math.ceil(num_in * weights.num_bits / _WORD_BITS)))
            parts["weight_shape"] = ("I64", (2,))
            if not weights.symmetric:
                parts["weight_zero_point"] = ("I32", (math.ceil(num_out * weights.num_bits / _WORD_BITS), scales[1]))
        elif weights.scale_dtype and weights.num_bits == _HALF_BYTE:
            parts["weight_packed"] = ("U8", (num_out, num_in // 2))
        else:
            parts["weight"] = ("I8" if weights.type == "int" else "F8_E4M3", shape)
            if not weights.symmetric:
                parts["weight_zero_point"] = ("I8", scales)
        if weights.strategy == "tensor_group":
            parts["weight_global_scale"] = ("F32", (1,))
        if self.needs_calibration:
            is_local = self.input_activations is not None and self.input_activations.dynamic == "local"
            parts["input_global_scale" if is_local else "input_scale"] = ("F32" if is_local else float_type, (1,))
        return parts

    def count_bytes(self, shape: tuple[int, int], *, float_type: str = "BF16") -> int:
        """Count the bytes that are stored of a layer; see `list_parts`."""
        parts = self.list_parts(shape, float_type=float_type)
        return sum(_ITEM_BYTES[dtype] * math.prod(size) for dtype, size in parts.values())


def _find_input_problems(inputs: NumberFormat) -> Iterator[str]:
    """Yield what the library can't round inputs by, though weights may have it."""
    ways: dict[str, tuple[bool | str, ...]] = {
        "tensor": (False, True),
        "token": (True,),
        "group": (True,),
        "tensor_group": ("local",),
    }
    if inputs.strategy not in ways:
        hint = ", which kv_cache has" if inputs.strategy == "attn_head" else ""
        yield f"strategy: expected one of {', '.join(ways)}, got {inputs.strategy!r}{hint}"
    elif inputs.dynamic not in ways[inputs.strategy]:
        wanted = " or ".join(str(way).lower() for way in ways[inputs.strategy])
        yield f"dynamic: expected {wanted} with strategy {inputs.strategy}, got {str(inputs.dynamic).lower()}"
    if not (inputs.symmetric or inputs.dynamic):
        yield "symmetric: expected true where scales are stored, got false"


def build_cache_format(strategy: str) -> NumberFormat:
    """Return how a cache of 8-bit floats is stored: a calibrated scale a layer or a head, or one from each token."""
    return NumberFormat.model_validate(_float(8, strategy, dynamic=strategy == "token"))


def shape_cache_scales(cache: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of each of `CACHE_SCALES`: a number a layer, or one a head.

    Args:
        cache: its numbers, in the fields of `NumberFormat`.
        config: config.json, of a composite model too.
    """
    text = find_text(config)
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or 0
    return (heads, 1, 1) if cache.get("strategy") == "attn_head" else (1,)


def format_parts(parts: Mapping[str, Part]) -> str:
    """Write what is stored of a layer in one line: name, type and shape of each tensor."""
    shown = (f"{name} {dtype} {'x'.join(map(str, shape))}".strip() for name, (dtype, shape) in sorted(parts.items()))
    return ", ".join(shown) or "no tensors"


def scale_shape(weights: NumberFormat, shape: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight of shape (out, in)."""
    num_out, num_in = shape
    if weights.block_structure:
        rows, columns = weights.block_structure
        return (math.ceil(num_out / rows), math.ceil(num_in / columns))
    if weights.group_size:
        return (num_out, num_in // weights.group_size)
    return (1,) if weights.strategy == "tensor" else (num_out, 1)


def _int(num_bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": "int", "strategy": strategy, **more}


def _float(num_bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": "float", "strategy": strategy, **more}


def _build(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> Scheme:
    return Scheme.model_validate({"weights": weights, "input_activations": inputs})


_INT4, _INT8_TOKEN = _int(4, "group", group_size=128), _int(8, "token", dynamic=True)
_FP8_TOKEN = _float(8, "token", dynamic=True)
_NVFP4 = _float(4, "tensor_group", group_size=16, scale_dtype="float8_e4m3fn")
_MXFP4, _MXFP8 = (_float(bits, "group", group_size=32, scale_dtype="uint8") for bits in (4, 8))
PRESETS: dict[str, Scheme] = {
    "W4A16": _build(_INT4),
    "W4A16_ASYM": _build(_INT4 | {"symmetric": False}),
    "W8A16": _build(_int(8, "group", group_size=128)),
    "W8A8": _build(_int(8, "channel"), _INT8_TOKEN),
    "W4A8": _build(_INT4, _INT8_TOKEN),
    "W4AFP8": _build(_INT4, _FP8_TOKEN),
    "FP8": _build(_float(8, "tensor"), _float(8, "tensor")),
    "FP8_DYNAMIC": _build(_float(8, "channel"), _FP8_TOKEN),
    "FP8_BLOCK": _build(
        _float(8, "block", block_structure=[128, 128]), _float(8, "group", group_size=128, dynamic=True)
    ),
    "NVFP4": _build(_NVFP4, _NVFP4 | {"dynamic": "local"}),
    "NVFP4A16": _build(_NVFP4),
    "MXFP4": _build(_MXFP4, _MXFP4 | {"dynamic": True}),
    "MXFP4A16": _build(_MXFP4),
    "MXFP8": _build(_MXFP8, _MXFP8 | {"dynamic": True}),
    "MXFP8A16": _build(_MXFP8),
}


def read_format(fields: Mapping[str, Any]) -> NumberFormat:
    """Return the numbers that config.json or the library describes, of any width: unchecked, to be named."""
    known = {name: fields[name] for name in NumberFormat.model_fields if fields.get(name) is not None}
    known["scale_dtype"] = str(known.get("scale_dtype") or "").removeprefix("torch.") or None
    return NumberFormat.model_construct(**known)


def list_rounded(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the formats that a checkpoint has inputs and cache rounded to while it runs, by compressed-tensors.

    Args:
        quantization: `quantization_config` of config.json.
    """
    groups = (quantization.get("config_groups") or {}).values()
    inputs = {f"{read_format(g['input_activations']).name} inputs" for g in groups if g.get("input_activations")}
    cache = quantization.get("kv_cache_scheme")
    return (*sorted(inputs), *([f"{read_format(cache).name} keys and values"] if cache else []))


class StoredGroups:
    """The groups of config.json that quantised layers are in, by their names: exactly, by a regex, or all of them."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        """Take `quantization_config` of config.json, by any quantiser.

        Raises:
            re.error: a target is no regular expression.
        """
        self._bits = quantization.get("bits")
        groups = list((quantization.get("config_groups") or {}).values())
        targets = [(target, group) for group in groups for target in group.get("targets") or ()]
        self._first: Mapping[str, Any] = groups[0] if groups else {}
        self._ignored = _index([(entry, True) for entry in quantization.get("ignore") or ()])
        self._groups = _index(targets)

    def find(self, layer: str) -> Mapping[str, Any] | None:
        """Return the group of a linear layer, in the library's order: by name, by regex, by class; None: of none."""
        return None if _look_up(self._ignored, layer) else _look_up(self._groups, layer)

    def find_bits(self, layer: str) -> int:
        """Return the bits of a weight of a packed layer: of one in no group those of the first; 4 if none are given."""
        group = self.find(layer) or self._first
        return int(self._bits or (group.get("weights") or {}).get("num_bits") or 4)

    def find_size(self, layer: str) -> int | None:
        """Return how many weights of a layer's row share a scale; None: not a fixed number, or of no group."""
        size = ((self.find(layer) or {}).get("weights") or {}).get("group_size")
        return size if isinstance(size, int) and size > 0 else None


_Index = tuple[dict[str, Any], list[tuple[re.Pattern[str], Any]]]


def _index(entries: Iterable[tuple[str, Any]]) -> _Index:
    """Sort what targets stand for by how they name layers; the first of equal ones counts."""
    names: dict[str, Any] = {}
    patterns = []
    for target, value in entries:
        if target.startswith("re:"):
            patterns.append((re.compile(target[3:]), value))
        else:
            names.setdefault(target, value)
    return names, patterns


def _look_up(index: _Index, layer: str) -> Any:
    names, patterns = index
    if layer in names:
        return names[layer]
    return next((value for pattern, value in patterns if pattern.match(layer)), names.get("Linear"))


def unpacks_to_bfloat16(quantization: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has weights that are unpacked into bfloat16 alone, see `Scheme.needs_bfloat16`."""
    groups = (quantization.get("config_groups") or {}).values()
    return any((group.get("weights") or {}).get("scale_dtype") for group in groups)


def has_free_groups(scheme: Scheme) -> bool:
    """Whether the groups of the weights may have another size than the scheme's own."""
    return scheme.weights.strategy == "group" and scheme.weights.scale_dtype is None


def find_preset(name: str, group_size: int | None) -> Scheme:
    """Return one of `PRESETS`, with groups of another size where one is given."""
    preset = PRESETS[name]
    if group_size is None:
        return preset
    weights = preset.weights.model_copy(update={"group_size": group_size})
    return preset.model_copy(update={"weights": weights})
