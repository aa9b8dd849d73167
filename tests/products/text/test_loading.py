"""On a GPU weights go to the card directly, and those of the draft count as well; fakes stand for the GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.errors import CheckpointError, EngineError
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.model_loading import estimate_load_bytes, load_model
from pipeline.products.text.serving import loading
from pipeline.products.text.serving.sizing import DeviceFacts
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculativeConfig
from tests.fakes.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def load_on_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, free_bytes: int, draft_folder: Path | None = None
) -> list[str | None]:
    """Load on a fake GPU; return the devices that weights were loaded to."""
    devices: list[str | None] = []

    def load(folder: Path, *, dtype: str, device: str | None = None) -> Any:
        devices.append(device)
        return load_model(folder, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(loading, "read_device", lambda kind, num_sharing: DeviceFacts(kind, free_bytes))
    monkeypatch.setattr(loading, "load_model", load)
    serving = ServingConfig(
        dtype="float32",
        continuous_batching=False,
        concurrency=1,
        context_length=64,
        max_tokens=8,
        speculative=SpeculativeConfig(method="draft_model", num_tokens=2) if draft_folder else None,
    )
    checkpoint = read_checkpoint(folder, root=folder.parent)
    candidate = Candidate(name="tiny", checkpoint=checkpoint, serving=serving, libraries={})
    loading.load_candidate(candidate, folder, draft_folder=draft_folder)
    return devices


def test_weights_and_a_draft_are_not_copied_through_the_hosts_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_on_gpu(folder, monkeypatch, free_bytes=1 << 40, draft_folder=folder) == ["cuda:0", "cuda:0"]


def test_a_card_with_room_for_the_target_alone_is_refused_a_draft(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = estimate_load_bytes(folder, dtype="float32") * 3 // 2
    with pytest.raises(EngineError, match="free on the GPU for its weights and its draft's"):
        load_on_gpu(folder, monkeypatch, free_bytes=free_bytes, draft_folder=folder)


def test_a_card_that_fills_up_while_weights_load_is_named_and_not_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match=r"/tiny: while it was loaded: out of memory: 2\.00 GiB needed; use a "):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize("error", [AttributeError, AssertionError, TypeError])
def test_any_error_of_transformers_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """GPT-BigCode fails by an AttributeError where its weights are packed, and a traceback came of it."""
    from transformers import AutoModelForCausalLM

    def fail(*_: Any, **__: Any) -> Any:
        raise error("'Linear' object has no attribute 'weight'")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match=rf"/tiny: transformers can't load it: {error.__name__}: 'Linear' object"):
        load_model(folder, dtype="float32")


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "llama"])
def test_a_model_whose_config_names_no_end_has_the_tokenizers(kind: str) -> None:
    """A composite config has no such attribute at all; of some kinds the config of its text has none either."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.for_model(kind)
    config.get_text_config().eos_token_id = None
    model = SimpleNamespace(
        generation_config=GenerationConfig(), config=config, _get_logits_processor=lambda _: [], name_or_path="m"
    )
    assert loading.greedy_config(model, SimpleNamespace(eos_token_id=5, pad_token_id=None)).eos_token_id == 5
