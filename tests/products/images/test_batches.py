"""Decoding a batch as the candidate does and in float32: what is judged, and what is timed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.products.images import batches
from pipeline.products.images.batches import Loaded, _decode_both_ways
from pipeline.products.images.shared_latents import SharedLatents

LATENTS = torch.arange(4.0).reshape(4, 1, 1, 1)
WHOLE, APART = [slice(0, 4)], [slice(0, 2), slice(2, 4)]


class Decoder(nn.Module):
    """Multiplies what it gets, and notes of how much."""

    device, dtype = torch.device("cpu"), torch.float32
    config = SimpleNamespace(scaling_factor=1.0)

    def __init__(self, name: str, factor: float, seen: list[tuple[str, int]]) -> None:
        super().__init__()
        self.name, self.factor, self.seen, self.decoder = name, factor, seen, nn.Identity()

    def decode(self, latents: torch.Tensor, *, return_dict: bool) -> tuple[torch.Tensor]:
        self.seen.append((self.name, len(latents)))
        return (self.decoder(latents) * self.factor,)


def load(seen: list[tuple[str, int]]) -> Loaded:
    pipe: Any = SimpleNamespace(vae=Decoder("ours", 2, seen))
    candidate: Any = SimpleNamespace(serving=SimpleNamespace(tiling=None))
    return Loaded(
        candidate, pipe, Decoder("exact", 3, seen), None, 0.05, {}, SharedLatents(Path(), "", is_kept_here=False)
    )


@pytest.mark.parametrize("parts", [WHOLE, APART])
@pytest.mark.parametrize("num_timed", [0, 1, batches.NUM_TIMED - 1, batches.NUM_TIMED])
def test_both_decodes_are_of_the_whole_batch_whether_timed_or_not(num_timed: int, parts: list[slice]) -> None:
    seen: list[tuple[str, int]] = []
    loaded = load(seen)
    loaded.decode_s = [0.0] * num_timed
    raw, exact, timed, _ = _decode_both_ways(loaded, LATENTS, parts)
    assert torch.equal(raw, 2 * LATENTS) and torch.equal(exact, 3 * LATENTS)
    is_timed = num_timed < batches.NUM_TIMED
    assert (timed is not None) == is_timed
    assert seen.count(("ours", 4)) == 1 + is_timed
    num_timed_apart = len(LATENTS[APART[0]]) * is_timed * (parts is APART)  # what judges is decoded beside it then
    assert sum(size for name, size in seen if name == "exact") == len(LATENTS) + num_timed_apart


def test_seconds_are_of_the_right_side_and_the_first_batches_alone_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that says 8 for the candidate's decode and 80 for float32."""
    seen: list[tuple[str, int]] = []

    def time_call(call: Any, _device: Any) -> tuple[Any, float]:
        return call(), {"ours": 8.0, "exact": 80.0}[seen[-1][0]]

    monkeypatch.setattr(batches, "time_call", time_call)
    loaded = load(seen)
    timed = [_decode_both_ways(loaded, LATENTS, WHOLE)[2] for _ in range(batches.NUM_TIMED + 3)]
    assert timed == [(8.0, 80.0)] * batches.NUM_TIMED + [None] * 3
    assert loaded.decode_s == [2.0] * batches.NUM_TIMED
    assert _decode_both_ways(load(seen), LATENTS, APART)[2] == (8.0, 160.0), "of half of the batch"
