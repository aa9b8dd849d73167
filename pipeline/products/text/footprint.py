"""How many bytes a checkpoint takes in memory, from its headers and config.json alone.

Tensors are counted one by one, as a file may hold several types. Not covered: models whose cache is compressed, which
take less, and what an engine needs beside weights and cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeline.products.text.model_config import find_text
from pipeline.products.text.schemes import StoredGroups
from pipeline.running.weight_files import TensorInfo

TYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# eight-bit floats are served in a wider type where the engine has no kernels for them
STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 2, "F8_E5M2": 2}
_PACKED = ".weight_packed"  # of compressed-tensors: INT4 or INT8 weights in int32; `qweight` of others stays packed
_SCALES = (".weight_scale", ".scales")
# of a model whose config.json lists no `layer_types`: each such layer attends to all tokens, those between to a window
_FULL_LAYERS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
_BLOCK = re.compile(r".*?\.\d+\.")  # the start of a name in a numbered block


def count_load_bytes(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], *, dtype: str = "auto", keeps_packed: bool = False
) -> int:
    """Count the bytes that stored tensors take once they are loaded.

    Args:
        tensors: by name, from the headers.
        config: of config.json.
        dtype: that floats are loaded in, or "auto" for the one that each is stored in.
        keeps_packed: quantised weights stay as stored; else those of compressed-tensors are unpacked into `dtype`, or
            into the type of their scales.
    """
    groups, total = StoredGroups(config.get("quantization_config") or {}), 0
    for name, info in tensors.items():
        if name.endswith(_PACKED) and not keeps_packed:
            scale = tensors.get(name.removesuffix(_PACKED) + ".weight_scale", info)
            bits = groups.find_bits(name.removesuffix(_PACKED))
            total += info.num_bytes * 8 // bits * TYPE_BYTES.get(dtype, STORED_BYTES.get(scale.dtype, 2))
        elif info.dtype == "I8" and f"{name}_scale" in tensors and not keeps_packed:
            total += info.num_elements * TYPE_BYTES.get(dtype, STORED_BYTES.get(tensors[f"{name}_scale"].dtype, 2))
        elif info.dtype not in STORED_BYTES or name.endswith(_SCALES) or (keeps_packed and "F8" in info.dtype):
            total += info.num_bytes
        else:
            total += info.num_elements * TYPE_BYTES.get(dtype, STORED_BYTES[info.dtype])
    return total


def count_cache_bytes(config: Mapping[str, Any], *, num_requests: int, context_length: int, item_bytes: int = 2) -> int:
    """Count the bytes of the keys and values of requests at their longest; 0 for an unknown architecture."""
    text = find_text(config)
    num_layers, num_heads = text.get("num_hidden_layers", 0), text.get("num_attention_heads", 0)
    head_dim = text.get("head_dim") or (text.get("hidden_size", 0) // num_heads if num_heads else 0)
    token_bytes = 2 * (text.get("num_key_value_heads") or num_heads) * head_dim * item_bytes
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    kinds = text.get("layer_types") or _list_kinds(text, num_layers)
    lengths = [min(context_length, window) if window and "sliding" in kind else context_length for kind in kinds]
    return num_requests * token_bytes * sum(lengths)


def _list_kinds(text: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return the kinds of layers of a model with a window, as its architecture has them."""
    every = text.get("sliding_window_pattern") or _FULL_LAYERS.get(text.get("model_type", ""))
    is_full = [isinstance(every, int) and every > 0 and i % every == 0 for i in range(1, num_layers + 1)]
    return ["full_attention" if full else "sliding_attention" for full in is_full]


def find_block_linears(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the two-dimensional tensors of a model's numbered blocks: not the embedding, nor the head."""
    return {name: info for name, info in tensors.items() if len(info.shape) == 2 and _BLOCK.match(name)}


def max_of_blocks(sizes: Mapping[str, int]) -> int:
    """Return the sum of the block that has the largest, of numbers by the name of a tensor in a block."""
    blocks: dict[str, int] = {}
    for name, size in sizes.items():
        block = _BLOCK.match(name)
        key = block[0] if block else name
        blocks[key] = blocks.get(key, 0) + size
    return max(blocks.values(), default=0)
