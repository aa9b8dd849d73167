"""Tiny random models of the shapes that teams bring: tied heads, grouped queries, sliding windows, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fakes.tiny_llama import build_tokenizer

WINDOW = 16  # tokens, fewer than the prompts of the tests
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# by name: the prefix of transformers' classes, and fields of its config
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False}),
    "llama-without-groups": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
EXPERTS = ("mixtral", "qwen2-moe", "qwen3-moe", "granite-moe")
WINDOWS = ("mistral", "gemma2", "gemma3")


def write_tiny_model(folder: Path, name: str, *, dtype: str = "float32") -> Path:
    """Write a model of two layers and its tokenizer, and return the folder.

    Args:
        folder: created when missing.
        name: one of `ARCHITECTURES`.
        dtype: of the saved weights.
    """
    import torch
    import transformers

    tokenizer = build_tokenizer()
    prefix, fields = ARCHITECTURES[name]
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **({} if name == "granite-moe" else {"head_dim": 16}),
    }
    tokens = {f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    # Gemma 3 has two configs, of which the other is that of a composite model
    config = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config(**shape | tokens | fields))
    model.generation_config = transformers.GenerationConfig(**tokens, do_sample=False)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
