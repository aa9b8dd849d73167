"""The sizes of a server: what they were on a CPU, and on a GPU no cache beyond what is useful or fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineError
from pipeline.products.text.serving import sizing
from pipeline.products.text.serving.sizing import (
    CacheFacts,
    DeviceFacts,
    EngineSizes,
    choose_sizes,
    read_cache_facts,
)

GIB = 1 << 30
# Llama 3 8B in bfloat16: 32 layers, 8 key-value heads and 32 heads of 128
LARGE = CacheFacts(
    token_bytes=2 * 32 * 8 * 128 * 2,
    num_groups=1,
    page_bytes=8 * 128 * 2,
    query_bytes=32 * 128 * 2,
    vocab_size=128_256,
    itemsize=2,
)
SMALL = CacheFacts(token_bytes=1024, num_groups=1, page_bytes=256, query_bytes=512, vocab_size=512, itemsize=4)


def choose(kind: str, free_gib: float, facts: CacheFacts = LARGE, **changes: Any) -> EngineSizes:
    settings: dict[str, Any] = {"concurrency": 64, "context_length": 1024} | changes
    return choose_sizes(DeviceFacts(kind, int(free_gib * GIB)), facts, **settings)


def test_a_cpu_has_small_batches_and_the_cache_of_two_rounds_of_requests() -> None:
    sizes = choose("cpu", 8, SMALL)
    assert sizes == EngineSizes(16, 2 * 64 * 65, 512, use_cuda_graph=False, max_forward_tokens=1024)


@pytest.mark.parametrize(("kind", "tokens"), [("cpu", (1 << 24) // 128_256), ("cuda", (1 << 29) // 128_256)])
def test_a_large_vocabulary_limits_what_is_scored_at_once(kind: str, tokens: int) -> None:
    assert choose(kind, 60).max_forward_tokens == tokens


def test_a_gpu_replays_graphs_unless_the_settings_say_otherwise() -> None:
    assert choose("cuda", 60).use_cuda_graph
    assert not choose("cuda", 60, options={"use_cuda_graph": False}).use_cuda_graph
    assert not choose("cpu", 60, options={"use_cuda_graph": True}).use_cuda_graph
    assert choose("cuda", 60, options={"max_batch_tokens": 4096}).max_batch_tokens == 4096


def test_a_cache_is_no_larger_than_is_useful_nor_than_fits() -> None:
    block = 16 * LARGE.token_bytes
    useful, scarce = choose("cuda", 60), choose("cuda", 6)
    assert useful.num_blocks == 2 * 64 * 65
    assert choose("cuda", 600).num_blocks == useful.num_blocks
    assert 2 * GIB < scarce.num_blocks * block < 6 * 0.8 * GIB
    assert choose("cuda", 60, context_length=8192).num_blocks * block < 60 * 0.8 * GIB
    assert choose("cuda", 60, kv_cache_gib=2).num_blocks == 2 * GIB // block
    assert choose("cuda", 6, kv_cache_gib=50).num_blocks == scarce.num_blocks


def count_other_bytes(kind: str, facts: CacheFacts, **changes: Any) -> float:
    """Return what is left for logits and masks beside the cache, which takes the rest."""
    device = DeviceFacts(kind, 20 * GIB)
    sizes: dict[str, Any] = {"max_batch_tokens": 512, "max_forward_tokens": 4096, "context_length": 1024} | changes
    mask_bytes = (2 if kind == "cuda" else 1) * sizes["max_batch_tokens"] * facts.itemsize
    per_token = facts.token_bytes + 2 * (facts.page_bytes + facts.query_bytes) + mask_bytes + 16
    return 20 * GIB * sizing.CACHE_FRACTION - per_token * sizing.count_room(device, facts, **sizes)


def test_scoring_has_room_for_a_slice_in_float32_and_for_one_long_sequence() -> None:
    slices = 2 * 4 * sizing.SLICE_LOGITS  # the copy, and its exponentials
    assert count_other_bytes("cuda", LARGE) > 128_256 * (512 * 6 + 4096 * 2) + slices
    longer = count_other_bytes("cuda", LARGE, context_length=32_768) - count_other_bytes("cuda", LARGE)
    assert longer == pytest.approx(128_256 * (32_768 - 4096) * 2, rel=1e-3)
    # no slice holds more than there is
    assert count_other_bytes("cuda", SMALL) < 0.1 * GIB
    assert count_other_bytes("cpu", LARGE) < count_other_bytes("cuda", LARGE) - 0.9 * slices


def test_free_memory_decides_nothing_that_can_change_an_answer() -> None:
    plenty, scarce = choose("cuda", 60), choose("cuda", 6)
    assert vars(plenty) | {"num_blocks": 0} == vars(scarce) | {"num_blocks": 0}


@pytest.mark.parametrize(
    ("free_gib", "changes"), [(1, {}), (6, {"context_length": 65_536}), (60, {"kv_cache_gib": 0.05})]
)
def test_a_context_that_does_not_fit_is_refused_with_what_helps(free_gib: float, changes: dict[str, Any]) -> None:
    with pytest.raises(
        EngineError, match=r"expected room for one context of \d+ tokens, .* lower serving\.context_len"
    ):
        choose("cuda", free_gib, **changes)


def test_facts_of_a_model_follow_its_grouped_heads_and_its_kinds_of_layers() -> None:
    from transformers import LlamaConfig, Qwen2Config

    llama = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256
    )
    assert read_cache_facts(llama, 2) == LARGE
    kinds = ["sliding_attention", "full_attention"] * 2
    mixed = Qwen2Config(num_hidden_layers=4, layer_types=kinds, sliding_window=64, use_sliding_window=True)
    assert read_cache_facts(mixed, 2).num_groups == 2


def test_servers_that_share_a_cpu_share_its_free_memory() -> None:
    alone, shared = (sizing.read_device("cpu", num_sharing).free_bytes for num_sharing in (1, 1000))
    assert 0 < shared < alone / 100


def test_servers_that_share_a_gpu_count_on_their_own_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 17 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 16 * GIB)
    assert sizing.read_device("cuda", 1).free_bytes == 61 * GIB
    # the other one may not have loaded its weights yet
    assert sizing.read_device("cuda", 2).free_bytes == 24 * GIB


def test_weights_that_a_gpu_has_no_room_for_are_refused_before_they_are_loaded() -> None:
    sizing.check_room(Path("m"), 16 * GIB, DeviceFacts("cuda", 17 * GIB))
    with pytest.raises(EngineError, match=r"^m: expected 16.0 GiB free on the GPU for its weights, got 15.0; "):
        sizing.check_room(Path("m"), 16 * GIB, DeviceFacts("cuda", 15 * GIB))
