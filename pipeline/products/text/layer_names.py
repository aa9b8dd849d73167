"""What the name of a tensor says of its layer: an embedding, attention, and what transformers calls it.

Headers of safetensors hold names and shapes alone, so a name tells an embedding from a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterable

_TOKEN_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings")
_EMBEDDINGS = (*_TOKEN_EMBEDDINGS, "wpe", "embed_positions")
# (model_type, name in the file) -> name in memory; transformers renames when it loads and back when it saves
_RENAMED_LAYERS = {("gpt_neox", "embed_out"): "lm_head"}
# projections to keys and values, by which llm-compressor knows the layers that keep them
_KEYS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")


def name_layer(stored: str, model_type: str) -> str:
    """Return the name that transformers gives to a layer of the file; settings, messages and records use it too."""
    return _RENAMED_LAYERS.get((model_type, stored), stored)


def is_embedding(tensor: str) -> bool:
    """Whether a tensor is the weight of an embedding, of tokens or positions."""
    return _is_weight_of(tensor, _EMBEDDINGS)


def is_token_embedding(tensor: str) -> bool:
    """Whether a tensor is the weight of the embedding of tokens."""
    return _is_weight_of(tensor, _TOKEN_EMBEDDINGS)


def find_attention(layers: Iterable[str]) -> tuple[str, ...]:
    """Return the layers that keep keys and values, of the names of linear ones."""
    return tuple(dict.fromkeys(parent for parent, _, last in (n.rpartition(".") for n in layers) if last in _KEYS))


def _is_weight_of(tensor: str, layers: tuple[str, ...]) -> bool:
    return tensor.endswith(".weight") and tensor.split(".")[-2] in layers
