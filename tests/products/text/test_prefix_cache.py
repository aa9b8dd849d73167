"""A full cache: which prefix is given up for a new request."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.generation.continuous_batching import cache, cache_manager

from pipeline.products.text.serving import prefix_cache
from tests.products.text.test_batching import plan

LENGTH = 4  # of a block


class Conversations:
    """Conversations of two blocks each, in a cache with room for three, made as a server makes it."""

    def __init__(self) -> None:
        self._manager: Any = cache.BlockManager(6, LENGTH, tp_on=False)

    def answer(self, name: str) -> None:
        """Answer a request of a conversation, and let go of what it had in use."""
        tokens = self._list_tokens(name)
        blocks = self._manager.get_free_blocks(2, None, shareable=True, group_id=0)
        self._manager.mark_shareable_blocks_as_complete(2, blocks, tokens)
        self._manager.free_blocks(blocks, shareable=True)

    def is_kept(self, name: str) -> bool:
        """Look for its prefix as the library does for a new request."""
        found: list[int] = []
        for start in (0, LENGTH):
            tokens = self._list_tokens(name)[start : start + LENGTH]
            found.append(self._manager.compute_hash(found[-1] if found else None, tokens, group_id=0))
        return all(each in self._manager._hash_to_id for each in found)

    def _list_tokens(self, name: str) -> list[int]:
        return [ord(name)] * 2 * LENGTH


@pytest.fixture
def conversations(monkeypatch: pytest.MonkeyPatch) -> Conversations:
    monkeypatch.setattr(cache, "BlockManager", cache_manager.BlockManager)
    prefix_cache.register()
    return Conversations()


def test_what_was_used_last_stays_and_the_oldest_goes(conversations: Conversations) -> None:
    """The library gave up the last turn of each conversation that was about to go on."""
    for name in "abcd":
        conversations.answer(name)
    assert [conversations.is_kept(name) for name in "abcd"] == [False, True, True, True]


def test_what_is_used_again_is_no_longer_the_oldest(conversations: Conversations) -> None:
    for name in "abcad":
        conversations.answer(name)
    assert [conversations.is_kept(name) for name in "abcd"] == [True, False, True, True]


def test_a_server_has_such_a_cache_however_it_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(cache, "BlockManager", cache_manager.BlockManager)
        plan(monkeypatch, kind)
        assert issubclass(cache.BlockManager, cache_manager.BlockManager)
        assert cache.BlockManager is not cache_manager.BlockManager
