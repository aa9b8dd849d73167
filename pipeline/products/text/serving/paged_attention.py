"""Attention for continuous batching on CPU: one call for a few decoding rows, one per prefill.

The library's own paged attention packs every request in flight into a single attention with a
block-diagonal mask. So each query is multiplied with the keys of all other requests as well. With
32 requests of 300 tokens that is 32 times the work. Here each request attends to its own keys only.
Decoding requests of similar length go together, so that little is padded and the keys that are gathered
for them stay in the CPU's cache.
Results are those of plain scaled-dot-product attention on the same keys.

Covers models whose layers all attend to the full past. Sliding windows are not covered: `supports`
says so and the caller keeps the library's implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "paged|per_request"
DECODE_ROWS = 4  # requests per call: all of them in one would gather tens of MiB of keys for every layer


@dataclass(frozen=True)
class _Prefill:
    """One request with several new tokens: its slice of the queries and of the keys."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None  # [new, keys], added to the scores; None: nothing cached yet, plain causal


@dataclass(frozen=True)
class _Decode:
    """A few requests with one new token each."""

    rows: slice  # of the plan's rows
    pages: torch.Tensor  # int64 [n * longest]: cache pages of their keys, padded
    mask: torch.Tensor  # [n, 1, 1, longest], added to the scores


@dataclass(frozen=True)
class _Plan:
    """What one forward pass attends to; shared by its layers."""

    rows: torch.Tensor  # int64 [decoding requests]: position of each one's only query, those with few keys first
    decodes: tuple[_Decode, ...]
    prefills: tuple[_Prefill, ...]


def supports(config: Any) -> bool:
    """Return whether every layer of a model attends to its full past."""
    text = config.get_text_config()  # of a composite model
    kinds = getattr(text, "layer_types", None) or ["full_attention"]
    return set(kinds) == {"full_attention"} and not getattr(text, "sliding_window", None)


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
    """Write the new keys to the cache, then attend request by request.

    Args:
        module: the attention layer; its `layer_idx` names the cache.
        query: [1, heads, tokens, head_dim], the new tokens of all requests, packed.
        key: [1, key_value_heads, tokens, head_dim].
        value: like `key`.
        attention_mask: None; the structure comes from the cumulative lengths in `kwargs`.
        scaling: factor of the scores; None is 1 / sqrt(head_dim).
        kwargs: what the batch processor passes: cache, read_index, write_index, cu_seq_lens_q/k.

    Returns:
        [1, tokens, heads, head_dim], and None for the weights.
    """
    cache = kwargs["cache"]
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    keys, values = cache.key_cache[layer], cache.value_cache[layer]
    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    keys.index_copy_(0, kwargs["write_index"][group], new_keys)
    values.index_copy_(0, kwargs["write_index"][group], new_values)
    pages = kwargs["read_index"][group]
    if module.layer_idx == 0:
        cache.attention_plan = _make_plan(kwargs, pages, padding=cache.read_trash_index, dtype=query.dtype)
    plan: _Plan = cache.attention_plan
    output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    if plan.decodes:
        output.index_copy_(0, plan.rows, _decode(query, keys, values, plan, scaling=scaling))
    for part in plan.prefills:
        part_keys, part_values = (
            (keys.index_select(0, pages[part.keys]), values.index_select(0, pages[part.keys]))
            if pages.numel()
            else (new_keys[part.keys], new_values[part.keys])
        )
        output[part.queries] = _prefill(query, part_keys, part_values, part, scaling=scaling)
    return output.unsqueeze(0), None


def _make_plan(kwargs: dict[str, Any], pages: torch.Tensor, *, padding: int, dtype: torch.dtype) -> _Plan:
    q, k = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist()
    decode, prefills = [], []
    for i in range(len(q) - 1):
        # a lone new token without cached keys has nothing to gather: it goes the prefill way
        if q[i + 1] - q[i] == 1 and pages.numel():
            decode.append(i)
        else:
            prefills.append(_plan_prefill(slice(q[i], q[i + 1]), slice(k[i], k[i + 1]), dtype))
    decode.sort(key=lambda i: k[i + 1] - k[i])
    groups = [slice(start, start + DECODE_ROWS) for start in range(0, len(decode), DECODE_ROWS)]
    spans = [slice(k[i], k[i + 1]) for i in decode]
    return _Plan(
        torch.tensor([q[i] for i in decode]),
        tuple(_plan_decode(rows, [pages[span] for span in spans[rows]], padding, dtype) for rows in groups),
        tuple(prefills),
    )


def _plan_decode(rows: slice, spans: list[torch.Tensor], padding: int, dtype: torch.dtype) -> _Decode:
    padded = torch.nn.utils.rnn.pad_sequence(spans, batch_first=True, padding_value=padding)
    lengths = torch.tensor([len(span) for span in spans])
    mask = torch.zeros(len(spans), 1, 1, padded.shape[1], dtype=dtype)
    mask.masked_fill_((torch.arange(padded.shape[1]) >= lengths[:, None])[:, None, None], float("-inf"))
    return _Decode(rows, padded.flatten(), mask)


def _plan_prefill(queries: slice, keys: slice, dtype: torch.dtype) -> _Prefill:
    num_new, num_keys = queries.stop - queries.start, keys.stop - keys.start
    if num_new == num_keys:
        return _Prefill(queries, keys, None)
    # above the diagonal lies what comes later
    mask = torch.full((num_new, num_keys), float("-inf"), dtype=dtype).triu(num_keys - num_new + 1)
    return _Prefill(queries, keys, mask)


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: _Plan, *, scaling: float | None
) -> torch.Tensor:
    """Return what each row of the plan attends to, [rows, heads, head_dim]."""
    (heads, key_heads), width = (query.shape[1], keys.shape[1]), keys.shape[2]
    rows = query[0].transpose(0, 1).index_select(0, plan.rows)
    output = torch.empty_like(rows)
    # all groups gather into the same memory: a new one for each costs a tenth more
    longest = max(few.pages.shape[0] for few in plan.decodes)
    some_keys, some_values = (keys.new_empty(longest, key_heads, width) for _ in range(2))
    for few in plan.decodes:
        n, num_pages = few.mask.shape[0], few.pages.shape[0]
        shape = (n, num_pages // n, key_heads, width)
        row_keys = torch.index_select(keys, 0, few.pages, out=some_keys[:num_pages]).view(shape)
        row_values = torch.index_select(values, 0, few.pages, out=some_values[:num_pages]).view(shape)
        mixed = scaled_dot_product_attention(
            # heads that share keys become extra queries, so that keys need not be repeated
            rows[few.rows].view(n, key_heads, heads // key_heads, width),
            row_keys.transpose(1, 2),
            row_values.transpose(1, 2),
            attn_mask=few.mask,
            scale=scaling,
        )
        output[few.rows] = mixed.reshape(n, heads, width)
    return output


def _prefill(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: _Prefill, *, scaling: float | None
) -> torch.Tensor:
    repeats = query.shape[1] // keys.shape[1]
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    if repeats > 1:  # repeating once would copy them
        keys, values = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
    mixed = scaled_dot_product_attention(
        query[:, :, part.queries],
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=part.mask,
        is_causal=part.mask is None,
        scale=scaling,
    )
    return mixed[0].transpose(0, 1)
