"""Checkpoints of real sizes without their weights: config and headers, and files that are holes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.language_models import write_header

# layers, hidden size, MLP width, heads, key-value heads
SHAPES = {
    "8b": (32, 4096, 14_336, 32, 8),
    "14b": (48, 5120, 13_824, 40, 8),
    "70b": (80, 8192, 28_672, 64, 8),
}
VOCABULARY = 128_256


def write_hollow_llama(folder: Path, shape: str, **config: Any) -> Path:
    """Write config.json and one file of headers in bfloat16, and return the folder."""
    num_layers, hidden, width, num_heads, num_kv_heads = SHAPES[shape]
    kv = hidden // num_heads * num_kv_heads
    sizes: dict[str, list[int]] = {f"{name}.weight": [VOCABULARY, hidden] for name in ("model.embed_tokens", "lm_head")}
    for i in range(num_layers):
        layers = {"self_attn.q_proj": [hidden, hidden], "self_attn.o_proj": [hidden, hidden]}
        layers |= {f"self_attn.{name}_proj": [kv, hidden] for name in "kv"}
        layers |= {"mlp.gate_proj": [width, hidden], "mlp.up_proj": [width, hidden], "mlp.down_proj": [hidden, width]}
        sizes |= {f"model.layers.{i}.{name}.weight": size for name, size in layers.items()}
    folder.mkdir(parents=True)
    write_header(folder / "model.safetensors", sizes)
    settings = {
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder
