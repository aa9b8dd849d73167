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
        """Answer a request of a conversation by what is cached of it, as the library does, and let go of it."""
        hashes = self._list_hashes(name)
        if self.is_kept(name):
            blocks = [self._manager._hash_to_id[each] for each in hashes]
            for block in blocks:
                self._manager.increase_ref_count(block)
        else:
            blocks = self._manager.get_free_blocks(2, None, shareable=True, group_id=0)
            self._manager.mark_shareable_blocks_as_complete(2, blocks, [ord(name)] * 2 * LENGTH)
        self._manager.free_blocks(blocks, shareable=True)

    def is_kept(self, name: str) -> bool:
        """Say whether all of it is cached."""
        return all(each in self._manager._hash_to_id for each in self._list_hashes(name))

    def _list_hashes(self, name: str) -> list[int]:
        tokens = [ord(name)] * LENGTH
        first = self._manager.compute_hash(None, tokens, group_id=0)
        return [first, self._manager.compute_hash(first, tokens, group_id=0)]


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
