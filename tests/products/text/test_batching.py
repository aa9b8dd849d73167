"""The library's config follows the device, and the fingerprint follows what can change an answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers import LlamaConfig, MixtralConfig

from pipeline.products.text.serving import varlen_attention
from pipeline.products.text.serving.batching import Batching, plan_batching
from pipeline.products.text.serving.sizing import DeviceFacts
from pipeline.records.serving import ServingConfig

GIB = 1 << 30


def plan(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    *,
    config: Any = None,
    scheme: Any = None,
    has_kernel: bool = True,
    gib: float = 40,
    is_batched: bool = True,
    **asked: Any,
) -> Batching:
    monkeypatch.setattr(varlen_attention, "supports", lambda model: has_kernel)
    config = config or LlamaConfig(attn_implementation="sdpa")
    layer = SimpleNamespace(quantization_scheme=scheme) if scheme else SimpleNamespace()
    facts = {"config": config, "dtype": torch.bfloat16, "device": torch.device(kind)}
    model = SimpleNamespace(modules=lambda: [SimpleNamespace(), layer], **facts)
    serving = ServingConfig(concurrency=8, continuous_batching=is_batched, options=asked)
    return plan_batching(model, serving, DeviceFacts(kind, int(gib * GIB)))


def test_a_cpu_keeps_its_own_attention_and_replays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batching = plan(monkeypatch, "cpu")
    assert batching.attention == "paged|per_request"
    config = batching.config
    assert (config.block_size, config.max_batch_tokens, config.use_cuda_graph) == (16, 512, False)
    assert (config.max_requests_per_batch, config.use_async_batching) == (None, None)


def test_batches_overlap_on_a_gpu_where_no_mask_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, masked = (plan(monkeypatch, "cuda", has_kernel=each) for each in (True, False))
    assert (packed.attention, masked.attention) == ("paged|varlen", "paged|sdpa")
    assert (packed.config.use_async_batching, masked.config.use_async_batching) == (True, False)
    assert all(each.config.use_cuda_graph and each.config.max_requests_per_batch == 8 for each in (packed, masked))


def test_a_mixture_of_experts_replays_no_graph_unless_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = MixtralConfig(attn_implementation="sdpa")
    assert not plan(monkeypatch, "cuda", config=mixture).config.use_cuda_graph
    assert plan(monkeypatch, "cuda", config=mixture, use_cuda_graph=True).config.use_cuda_graph


@pytest.mark.parametrize(("part", "dynamic"), [("weights", False), ("inputs", True), ("inputs", False)])
def test_scales_that_the_library_takes_from_inputs_replay_no_graph(
    monkeypatch: pytest.MonkeyPatch, part: str, *, dynamic: bool
) -> None:
    """It copies numbers to the GPU in each pass: every server of W8A8 ended on its first request."""
    numbers = QuantizationArgs(num_bits=8)
    inputs = QuantizationArgs(num_bits=8, dynamic=dynamic, strategy="token" if dynamic else "tensor")
    scheme = QuantizationScheme(
        targets=["Linear"], weights=numbers, input_activations=None if part == "weights" else inputs
    )
    assert plan(monkeypatch, "cuda", scheme=scheme).config.use_cuda_graph == (not dynamic)
    assert plan(monkeypatch, "cuda", scheme=scheme, use_cuda_graph=True).config.use_cuda_graph


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_server_that_answers_one_by_one_plans_no_cache(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A cache that is never made must not be refused, nor an attention that never runs be in the fingerprint."""
    serial, batched = plan(monkeypatch, kind, gib=0.01, is_batched=False), plan(monkeypatch, kind)
    assert serial.config is None
    assert serial.facts == {"attention": "sdpa", "max_forward_tokens": batched.max_forward_tokens}


def test_the_fingerprint_follows_settings_and_not_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plenty, scarce = plan(monkeypatch, "cuda"), plan(monkeypatch, "cuda", gib=4)
    assert plenty.config.num_blocks > scarce.config.num_blocks
    assert plenty.facts == scarce.facts
    changed = plan(monkeypatch, "cuda", use_cuda_graph=False, max_batch_tokens=2048).facts
    assert (changed["use_cuda_graph"], changed["max_batch_tokens"]) == (False, 2048)
    assert {"attention", "block_size", "max_forward_tokens"} <= changed.keys()
