"""Decompressed INT4 weights are plain ones: no hook fetches them, and the logits are the same to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.products.text.model_loading import load_model
from pipeline.products.text.serving.loading import load_candidate
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig
from tests.fakes.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """INT4 by rounding to nearest, which needs no texts."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    from pipeline.products.text.optimize.llm_compressor import quiet_library, save_compressed

    source = write_tiny_llama(tmp_path_factory.mktemp("offload") / "tiny")
    destination = source.with_name("int4")
    model = load_model(source, dtype="float32")
    with quiet_library():
        oneshot(model=model, recipe=[QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])])
    save_compressed(model, destination)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (source / name).is_file():
            (destination / name).write_bytes((source / name).read_bytes())
    return destination


def test_no_hook_is_left_on_decompressed_weights(folder: Path) -> None:
    from pipeline.products.text.checkpoints import read_checkpoint

    torch.set_num_threads(1)
    checkpoint = read_checkpoint(folder, root=folder.parent)
    serving = ServingConfig(dtype="bfloat16", concurrency=2, context_length=64, max_tokens=8)
    loaded = load_candidate(Candidate(name="tiny", checkpoint=checkpoint, serving=serving, libraries={}), folder)
    plain = load_model(folder, dtype="bfloat16")
    ids = torch.arange(20, 40)[None]
    with torch.inference_mode():
        plain(ids, use_cache=False)  # decompresses
        expected = plain(ids, use_cache=False).logits
        assert all(torch.equal(model(ids, use_cache=False).logits, expected) for model in (loaded.model, loaded.scorer))
    assert is_offloaded(plain)
    assert not any(is_offloaded(model) for model in (loaded.model, loaded.scorer))


def is_offloaded(model: Any) -> bool:
    from compressed_tensors.offload.cache.base import OffloadCache

    return any(
        isinstance(module._parameters, OffloadCache) or hasattr(module, "_original_forward_func")
        for module in model.modules()
    )
