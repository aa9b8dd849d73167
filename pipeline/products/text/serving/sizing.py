"""How large the embedded engine's batches and its key-value cache are: the device decides, params.yaml may override.

A number that can change an answer is a constant of the kind of device. Free memory decides the size of the cache
alone, so that two starts of one server have one fingerprint. In float32 a smaller one changes no answer. In half
precision it may turn a near tie, as any other batch may: fewer prefixes are found there, and more requests wait.

Not covered: the memory of weights, and of the activations of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import EngineError
from pipeline.running.environment import count_memory_mib, read_available_mib

CACHE_FRACTION = 0.8  # of the memory that is free after loading: the rest is for activations and CUDA graphs
SLICE_LOGITS = 1 << 27  # elements of logits that scoring has in float32 at a time: 512 MiB
_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceSizes:
    """What suits a kind of device, whatever its memory."""

    block_size: int  # tokens: prefixes are shared in whole blocks, so small ones share more of a short prompt
    max_batch_tokens: int  # new tokens per forward: bounds how long a prefill delays requests that are decoding
    use_cuda_graph: bool
    max_forward_tokens: int  # of a batch that is scored
    max_logits: int  # elements of one logits tensor that is scored


DEVICE_SIZES = {
    # larger batches fall out of a CPU's cache; 64 MiB of logits in float32
    "cpu": DeviceSizes(16, 512, use_cuda_graph=False, max_forward_tokens=1024, max_logits=1 << 24),
    # a few thousand tokens keep a GPU busy; 1 GiB of logits in half precision
    "cuda": DeviceSizes(16, 512, use_cuda_graph=True, max_forward_tokens=16_384, max_logits=1 << 29),
}


@dataclass(frozen=True)
class DeviceFacts:
    """The device of one server."""

    kind: str  # "cpu" or "cuda"
    free_bytes: int  # that this server may still take


@dataclass(frozen=True)
class CacheFacts:
    """What a model keeps of each token, and computes with it."""

    token_bytes: int  # of keys and values in one group of layers
    num_groups: int  # of layers: a token takes a place in each
    page_bytes: int  # of the keys of one layer
    query_bytes: int  # of the queries of one layer
    vocab_size: int
    itemsize: int  # bytes of one number


@dataclass(frozen=True)
class EngineSizes:
    """The sizes of one server."""

    block_size: int
    num_blocks: int
    max_batch_tokens: int
    use_cuda_graph: bool
    max_forward_tokens: int


def choose_sizes(
    device: DeviceFacts,
    cache: CacheFacts,
    *,
    concurrency: int,
    context_length: int,
    options: Mapping[str, Any] | None = None,
    kv_cache_gib: float | None = None,
) -> EngineSizes:
    """Choose the sizes of a server: a cache no larger than is useful, and no larger than fits.

    Args:
        device: of the server.
        cache: facts of the model.
        concurrency: requests in flight.
        context_length: tokens of one request at most.
        options: `use_cuda_graph` and `max_batch_tokens` where params.yaml sets them.
        kv_cache_gib: size of the cache; None: as much as is useful, and fits.

    Raises:
        EngineError: not even one context fits.
    """
    usual, asked = DEVICE_SIZES[device.kind], options or {}
    max_batch_tokens = asked.get("max_batch_tokens", usual.max_batch_tokens)
    max_forward_tokens = count_forward_tokens(device.kind, cache.vocab_size)
    blocks_per_request = (-(-context_length // usual.block_size) + 1) * cache.num_groups
    # twice what the requests in flight can hold: the rest keeps finished prefixes for reuse
    useful = 2 * concurrency * blocks_per_request
    block_bytes = usual.block_size * cache.token_bytes
    if kv_cache_gib is not None:
        useful = int(kv_cache_gib * _GIB) // block_bytes
    room = count_room(
        device,
        cache,
        max_batch_tokens=max_batch_tokens,
        max_forward_tokens=max_forward_tokens,
        context_length=context_length,
    )
    num_blocks = min(useful, room // usual.block_size)
    if num_blocks < blocks_per_request:
        needed, given = (n * block_bytes / _GIB for n in (blocks_per_request, max(0, num_blocks)))
        raise EngineError(
            f"key-value cache: expected room for one context of {context_length} tokens, {needed:.2f} GiB, got "
            f"{given:.2f} GiB ({device.free_bytes / _GIB:.2f} GiB are free, {device.kind}); lower "
            "serving.context_length, serving.max_batch_tokens or resources.num_servers, or raise resources.kv_cache_gib"
        )
    return EngineSizes(
        block_size=usual.block_size,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        use_cuda_graph=device.kind == "cuda" and asked.get("use_cuda_graph", usual.use_cuda_graph),
        max_forward_tokens=max_forward_tokens,
    )


def count_forward_tokens(kind: str, vocab_size: int) -> int:
    """Count the tokens of a batch that is scored on a kind of device."""
    usual = DEVICE_SIZES[kind]
    return min(usual.max_forward_tokens, max(1, usual.max_logits // vocab_size))


def count_room(
    device: DeviceFacts, cache: CacheFacts, *, max_batch_tokens: int, max_forward_tokens: int, context_length: int
) -> int:
    """Count the tokens that may be cached, beside all that grows with them.

    Args:
        device: of the server.
        cache: facts of the model.
        max_batch_tokens: new tokens of a forward pass; their logits are kept in float32 as well.
        max_forward_tokens: of a forward pass that scores.
        context_length: of the longest sequence, which is scored in a pass of its own.
    """
    scored_tokens = max(max_forward_tokens, context_length)
    # batches that overlap on a GPU have their inputs twice; the library plans a mask of batch by cache on any device
    mask_bytes = (2 if device.kind == "cuda" else 1) * max_batch_tokens * cache.itemsize
    logits_bytes = cache.vocab_size * (max_batch_tokens * (cache.itemsize + 4) + scored_tokens * cache.itemsize)
    if device.kind == "cuda":  # a slice of what is scored, in float32, and its exponentials
        logits_bytes += 2 * 4 * min(SLICE_LOGITS, scored_tokens * cache.vocab_size)
    room = CACHE_FRACTION * device.free_bytes - logits_bytes - max_batch_tokens * mask_bytes
    # a cached token's keys and values, those of one layer as gathered for all heads, its mask, and its places
    gathered = 2 * (cache.page_bytes + cache.query_bytes)
    return int(room / (cache.token_bytes + gathered + mask_bytes + 16 * cache.num_groups))


def check_room(folder: Path, num_bytes: int, device: DeviceFacts, *, draft_bytes: int = 0) -> None:
    """Refuse weights that a GPU has no room for, before they are loaded.

    Args:
        folder: the checkpoint.
        num_bytes: of its weights.
        device: of the server.
        draft_bytes: of the weights of its draft; 0: it has none.

    Raises:
        EngineError: with what would help.
    """
    if num_bytes + draft_bytes > device.free_bytes:
        draft = " and its draft's" if draft_bytes else ""
        raise EngineError(
            f"{folder}: expected {(num_bytes + draft_bytes) / _GIB:.1f} GiB free on the GPU for its weights{draft}, "
            f"got {device.free_bytes / _GIB:.1f}; end other processes there, lower resources.num_servers, or serve it "
            "by vLLM over several GPUs"
        )


def read_cache_facts(config: Any, itemsize: int) -> CacheFacts:
    """Read what a model keeps of a token from its text config.

    Args:
        config: of a transformers model.
        itemsize: bytes of one number in the cache.
    """
    from transformers.generation.continuous_batching.cache import (
        find_head_dim,
        find_num_kv_heads,
        group_layers_by_attn_type,
    )

    groups, _ = group_layers_by_attn_type(config)
    head_dim = find_head_dim(config)
    page_bytes = find_num_kv_heads(config) * head_dim * itemsize
    return CacheFacts(
        token_bytes=2 * len(groups[0]) * page_bytes,
        num_groups=len(groups),
        page_bytes=page_bytes,
        query_bytes=config.num_attention_heads * head_dim * itemsize,
        vocab_size=config.vocab_size,
        itemsize=itemsize,
    )


def read_device(kind: str, num_sharing: int) -> DeviceFacts:
    """Read how much memory one server may still take.

    Args:
        kind: "cpu" or "cuda".
        num_sharing: servers of ours on the device. They start together, so each counts on its own part alone.
    """
    if kind == "cpu":
        return DeviceFacts(kind, (read_available_mib(count_memory_mib()) << 20) // num_sharing)
    import torch

    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    unused = reserved - torch.cuda.memory_allocated()  # held by torch, and given to whoever of us asks next
    return DeviceFacts(kind, min(free + unused, total // num_sharing - torch.cuda.memory_allocated()))
