"""Language models of the shapes that teams ship, with random weights: speed and memory need no trained ones.

Writes a checkpoint folder as the hub has it: sharded safetensors in bfloat16 with an index, config, chat template, and
a tokenizer of as many tokens as the model has rows. The tokenizer is the shipped agent's, with tokens of no text added.
Answers are noise, so nothing here says anything about quality.

    python -m benchmarks.language_models SHAPE FOLDER [--layers N] [--seed 0] [--hollow]

A hollow folder has config, tokenizer and the headers of all shards, and no weights: its files have their size and take
no space. `make plan` plans with it.

Not covered: architectures other than Llama's.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

AGENT = Path("models/agent")
TEXT_FILES = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")
MAX_SHARD_SIZE = "5GB"

_LLAMA: dict[str, Any] = {"vocab_size": 128_256, "head_dim": 128, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _LLAMA
    | {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": _LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


def build_config(shape: str, num_layers: int | None = None) -> Any:
    """Return the transformers config of a shape, with the special tokens of the agent's tokenizer."""
    from transformers import LlamaConfig

    agent = json.loads((AGENT / "config.json").read_text(encoding="utf-8"))
    special = {key: agent[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings = {"tie_word_embeddings": False, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5} | SHAPES[shape]
    settings |= {"num_hidden_layers": num_layers} if num_layers is not None else {}
    return LlamaConfig(**settings, **special, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})


def make_model(shape: str, folder: Path, *, num_layers: int | None = None, seed: int = 0) -> None:
    """Write a checkpoint of a shape to a new folder; the weights are drawn on the GPU where there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(build_config(shape, num_layers), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    write_texts(shape, folder)


def make_hollow(shape: str, folder: Path, *, num_layers: int | None = None) -> None:
    """Write a checkpoint of a shape without its weights: headers, and files of the right size that hold nothing."""
    import torch
    from transformers import AutoModelForCausalLM

    config = build_config(shape, num_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(folder)
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    shards: list[dict[str, list[int]]] = [{}]
    for name, size in shapes.items():
        if sum(map(math.prod, [*shards[-1].values(), size])) * 2 > 5e9:
            shards.append({})
        shards[-1][name] = size
    files = {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}
    for file, shard in files.items():
        write_header(folder / file, shard)
    weight_map = {name: file for file, shard in files.items() for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_texts(shape, folder)


def write_header(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file of bfloat16 tensors that is a header, and then a hole."""
    entries, end = {}, 0
    for name, size in shapes.items():
        start, end = end, end + 2 * math.prod(size)
        entries[name] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


def write_texts(shape: str, folder: Path) -> None:
    """Write tokenizer, chat template and generation config."""
    for name in TEXT_FILES:
        shutil.copyfile(AGENT / name, folder / name)
    write_tokenizer(folder / "tokenizer.json", SHAPES[shape]["vocab_size"])


def write_tokenizer(path: Path, num_tokens: int) -> None:
    """Write the agent's tokenizer with tokens added that no text gives, so that every id can be decoded."""
    tokenizer = json.loads((AGENT / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    tokenizer["model"]["vocab"] = vocabulary | {f"Ġ<{i}>": i for i in range(num_tokens) if i not in taken}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    """Make one model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="so many of them, where the shape alone matters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hollow", action="store_true", help="headers alone, without weights")
    arguments = parser.parse_args()
    if arguments.hollow:
        make_hollow(arguments.shape, arguments.folder, num_layers=arguments.layers)
        return
    make_model(arguments.shape, arguments.folder, num_layers=arguments.layers, seed=arguments.seed)


if __name__ == "__main__":
    main()
