"""A tiny Llama checkpoint with random weights and a real tokenizer, for tests that need files on disk.

The weights mean nothing and the text it writes is noise; what is real is the layout of the folder:
safetensors, config, generation config, a byte-level BPE tokenizer and a chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEXTS = (
    "The courier takes the parcel to the north gate before the market opens.",
    'Call {"name": "book", "arguments": {"room": "blue", "people": 4}} and wait for its result.',
    "A list of items: apples, pears, plums. The total is 42 and the budget is 50.",
    "When the stock of paper is below 12 reams, order more; otherwise do nothing at all.",
)


def write_tiny_llama(
    folder: Path, *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "5GB", **overrides: Any
) -> Path:
    """Write a tiny random Llama and its tokenizer to `folder`, and return the folder.

    Args:
        folder: created when missing.
        seed: of the random weights.
        dtype: of the saved weights.
        max_shard_size: small values ("300KB") give sharded safetensors with an index.
        overrides: fields of `LlamaConfig`, for example `num_hidden_layers=1`.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**settings | overrides))
    model = model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def build_tokenizer() -> Any:
    """Train a byte-level BPE tokenizer on `TEXTS`; it puts no special tokens round a text by itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_documents(folder: Path, texts: dict[str, list[str]]) -> Path:
    """Write an evalset of kind "documents" (bucket -> texts) with a matching card, and return the folder."""
    import hashlib
    import json

    cases = [
        {"id": f"{bucket}-{i}", "cluster": f"{bucket}-{i}", "buckets": [bucket], "text": text}
        for bucket, found in texts.items()
        for i, text in enumerate(found)
    ]
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    card = {
        "name": folder.name,
        "version": "1",
        "licence": "CC0-1.0",
        "kind": "documents",
        "description": "for tests",
        "made_by": "tests",
        "num_cases": len(cases),
        "sha256": hashlib.sha256(lines.encode()).hexdigest(),
        "cluster": "document",
        "num_clusters": len(cases),
        "buckets": {b: len(found) for b, found in texts.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.jsonl").write_text(lines, encoding="utf-8")
    (folder / "card.yaml").write_text(json.dumps(card, indent=2), encoding="utf-8")  # JSON is YAML
    return folder
