"""Attention request by request against plain attention, on a cache whose unused memory holds no numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeline.products.text.serving import paged_attention

BLOCK, NUM_BLOCKS, LAYERS, WIDTH = 4, 64, 2, 8


@dataclass
class Request:
    """What a request was given so far, by layer: [tokens, heads, width]."""

    length: int
    blocks: list[int]
    num_done: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def pages(self, start: int, end: int) -> list[int]:
        return [self.blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end)]


def make_cache(key_heads: int) -> Any:
    shape = ((NUM_BLOCKS + 2) * BLOCK, key_heads, WIDTH)
    both = [[torch.full(shape, float("nan")) for _ in range(LAYERS)] for _ in range(2)]
    for cached in both[0] + both[1]:
        cached.view(-1, BLOCK, key_heads, WIDTH)[NUM_BLOCKS].fill_(0)  # as the library does for padding
    return SimpleNamespace(
        block_size=BLOCK,
        key_cache=both[0],
        value_cache=both[1],
        read_trash_index=NUM_BLOCKS * BLOCK,
        layer_index_to_group_indices={i: (0, i) for i in range(LAYERS)},
    )


def forward(cache: Any, steps: list[tuple[Request, int]], heads: int, key_heads: int) -> None:
    """Pass some new tokens of each request, and hold what comes against plain attention."""
    queries, written, pages, q, k = [], [], [], [0], [0]
    is_all_new = all(request.num_done == 0 for request, _ in steps)
    for request, num_new in steps:
        end = request.num_done + num_new
        queries.append(torch.randn(LAYERS, num_new, heads, WIDTH))
        written += request.pages(request.num_done, end)
        pages += [] if is_all_new else request.pages(0, end)
        q.append(q[-1] + num_new)
        k.append(k[-1] + end)
    new = [torch.randn(2, LAYERS, num_new, key_heads, WIDTH) for _, num_new in steps]
    indices = {
        "write_index": [torch.tensor(written)],
        "read_index": [torch.tensor(pages, dtype=torch.int64)],
        "cu_seq_lens_q": torch.tensor(q),
        "cu_seq_lens_k": torch.tensor(k),
    }
    for layer in range(LAYERS):
        query = torch.cat([part[layer] for part in queries]).transpose(0, 1)[None]
        key, value = (torch.cat([part[i, layer] for part in new]).transpose(0, 1)[None] for i in range(2))
        module: Any = SimpleNamespace(layer_idx=layer)
        output, _ = paged_attention.attend(module, query, key, value, None, cache=cache, **indices)
        for number, (request, _) in enumerate(steps):
            for mine, i in ((request.keys, 0), (request.values, 1)):
                earlier = [mine[layer]] if len(mine) > layer else []
                mine[layer : layer + 1] = [torch.cat([*earlier, new[number][i, layer]])]
            expected = attend_plainly(queries[number][layer], request.keys[layer], request.values[layer])
            torch.testing.assert_close(output[0, q[number] : q[number + 1]], expected, rtol=1e-5, atol=1e-6)
    for request, num_new in steps:
        request.num_done += num_new


def attend_plainly(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    repeats = query.shape[1] // keys.shape[1]
    mask = torch.ones(len(query), len(keys), dtype=torch.bool).tril(len(keys) - len(query))
    rows, keys, values = (
        tensor.transpose(0, 1) for tensor in (query, *(x.repeat_interleave(repeats, 1) for x in (keys, values)))
    )
    return scaled_dot_product_attention(rows, keys, values, attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2)])
def test_requests_attend_to_their_own_keys_alone(
    heads: int, key_heads: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut at random, many at once, in blocks that lie anywhere: memory that nobody wrote must not come through."""
    monkeypatch.setattr(paged_attention, "DECODE_ROWS", rows)
    torch.manual_seed(0)
    draw = random.Random(0)
    cache, free = make_cache(key_heads), draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    waiting = [Request(length, []) for length in (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 30, 31)]
    for request in waiting:
        request.blocks = [free.pop() for _ in range(-(-request.length // BLOCK))]
    while waiting := [request for request in waiting if request.num_done < request.length]:
        steps = []
        for request in draw.sample(waiting, draw.randint(1, len(waiting))):
            left = request.length - request.num_done
            steps.append((request, draw.choice([1, 1, draw.randint(1, left)])))
        forward(cache, steps, heads, key_heads)


def test_a_shared_prefix_is_read_where_it_lies() -> None:
    """The second request has the blocks of the first for its beginning, and one of its own."""
    torch.manual_seed(0)
    cache, first = make_cache(2), Request(10, [3, 9, 5])
    forward(cache, [(first, 10)], 2, 2)
    second = Request(12, [3, 9, 7], 8, [x[:8] for x in first.keys], [x[:8] for x in first.values])
    forward(cache, [(second, 2), (first, 1)], 2, 2)
    forward(cache, [(first, 1), (second, 1)], 2, 2)
