"""Attention for continuous batching on a GPU: torch's own kernels over packed requests.

The library's paged attention without the package flash-attn is one attention of all requests with a mask. It multiplies
each query with the keys of all other requests, and the mask keeps batches from overlapping. Torch ships kernels that
take the lengths of packed sequences instead: flash attention in half precision, memory-efficient attention in float32.

Covers models whose layers all attend to the full past, on GPUs from Ampere on. Before it is used, it is checked against
plain attention on random inputs; where it fails, the caller keeps the library's implementation.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeline.running.gpu_failures import describe_gpu_failure

NAME = "paged|varlen"
MAX_HEAD_DIM = 256  # of the flash kernel
_MIN_CAPABILITY = (8, 0)
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 5e-5}  # of the largest output
_BOTTOM_RIGHT = 2  # kind of causal mask: the last query sees all keys
_QUERY_LENGTHS, _KEY_LENGTHS = (3, 1, 20), (3, 17, 40)  # a prefill, a decoding request, the second part of a prefill


def supports(model: Any) -> bool:
    """Return whether a model on a GPU can be served with this attention."""
    if model.device.type != "cuda" or model.dtype not in _TOLERANCE:
        return False
    config = model.config.get_text_config()
    head_dim = _read_head_dim(config)
    # no kernel caps scores, or knows keys and values of different width
    plain = not getattr(config, "attn_logit_softcapping", None) and not getattr(config, "kv_lora_rank", None)
    fits = head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM
    return plain and fits and torch.cuda.get_device_capability(model.device) >= _MIN_CAPABILITY and is_right(model)


def register() -> None:
    """Make the implementation known to transformers under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys to the cache, gather those of each request, and attend within each request.

    Args:
        module: the attention layer; its `layer_idx` names the cache.
        query: [1, heads, tokens, head_dim], the new tokens of all requests, packed.
        key: [1, key_value_heads, tokens, head_dim].
        value: like `key`.
        attention_mask: None; the structure comes from the cumulative lengths in `kwargs`.
        scaling: factor of the scores; None is 1 / sqrt(head_dim).
        kwargs: what the batch processor passes: cache, read_index, write_index, cu_seq_lens_q/k, max_seqlen_q/k.

    Returns:
        [1, tokens, heads, head_dim], and None for the weights. Rows of padding hold anything.
    """
    keys, values = kwargs["cache"].update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    output = attend_packed(
        query[0].transpose(0, 1).contiguous(),
        keys.contiguous(),
        values.contiguous(),
        (kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]),
        (kwargs["max_seqlen_q"], kwargs["max_seqlen_k"]),
        scaling=scaling,
    )
    return output.unsqueeze(0), None


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    *,
    scaling: float | None,
) -> torch.Tensor:
    """Attend within each sequence; its last query sees all of its keys.

    Args:
        query: [tokens, heads, head_dim], packed.
        key: [keys, key_value_heads, head_dim], packed.
        value: like `key`.
        starts: int32 [sequences + 1] of queries and of keys: where each sequence starts.
        longest: queries and keys of a sequence at most.
        scaling: factor of the scores; None is 1 / sqrt(head_dim).
    """
    starts_q, starts_k = (each.to(torch.int32) for each in starts)
    # the operations behind torch's attention, whose public functions differ from release to release
    if query.dtype != torch.float32:
        return torch.ops.aten._flash_attention_forward(
            query, key, value, starts_q, starts_k, *longest, 0.0, True, False, scale=scaling
        )[0]
    repeats = query.shape[1] // key.shape[1]
    rows = [query, *(each.repeat_interleave(repeats, 1) if repeats > 1 else each for each in (key, value))]
    return torch.ops.aten._efficient_attention_forward(
        *(each.unsqueeze(0) for each in rows), None, starts_q, starts_k, *longest, 0.0, _BOTTOM_RIGHT, scale=scaling
    )[0][0]


def is_right(model: Any) -> bool:
    """Return whether the kernel gives what plain attention gives: on this device, in this precision, for these heads.

    Raises:
        RuntimeError: the device has no memory left or failed, which says nothing about the kernel.
    """
    config = model.config.get_text_config()
    heads, head_dim = config.num_attention_heads, _read_head_dim(config)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, head_dim, generator=generator).to(model.device, model.dtype)

    query, key, value = draw(sum(_QUERY_LENGTHS), heads), *(draw(sum(_KEY_LENGTHS), key_heads) for _ in range(2))
    starts = [torch.tensor((0, *each)).cumsum(0).int().to(model.device) for each in (_QUERY_LENGTHS, _KEY_LENGTHS)]
    try:
        output = attend_packed(
            query, key, value, (starts[0], starts[1]), (max(_QUERY_LENGTHS), max(_KEY_LENGTHS)), scaling=None
        )
    except (AttributeError, RuntimeError, TypeError) as error:  # not in this build, or with other arguments
        if describe_gpu_failure(error, remedy=""):
            raise
        return False
    expected = attend_plainly(query.float(), key.float(), value.float(), (starts[0].tolist(), starts[1].tolist()))
    return bool((output.float() - expected).abs().max() <= _TOLERANCE[model.dtype] * expected.abs().max())


def _read_head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: tuple[list[int], list[int]]
) -> torch.Tensor:
    """Attend sequence by sequence, as `attend_packed` does, in any precision and on any device."""
    repeats, parts = query.shape[1] // key.shape[1], []
    for (q, q_end), (k, k_end) in zip(pairwise(starts[0]), pairwise(starts[1]), strict=True):
        mask = torch.ones(q_end - q, k_end - k, dtype=torch.bool, device=query.device).tril(k_end - k - (q_end - q))
        mixed = scaled_dot_product_attention(
            query[q:q_end].transpose(0, 1),
            key[k:k_end].transpose(0, 1).repeat_interleave(repeats, 0),
            value[k:k_end].transpose(0, 1).repeat_interleave(repeats, 0),
            attn_mask=mask,
        )
        parts.append(mixed.transpose(0, 1))
    return torch.cat(parts)
