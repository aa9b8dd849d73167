"""Which cached prefix transformers' continuous batching gives up when its cache is full: what nobody used for longest.

The library gives up what was used last: the turns of a conversation that is about to go on. The next request then
computes them once more; in float32 the answer is the same.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any


def register() -> None:
    """Have transformers' caches made from now on give up the oldest prefixes first."""
    from transformers.generation.continuous_batching import cache
    from transformers.generation.continuous_batching.cache_manager import BlockManager

    class LeastRecentlyUsed(BlockManager):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._init_block_ids = _OldestFirst()  # blocks that no request uses now, and the next one may

    cache.BlockManager = LeastRecentlyUsed


class _OldestFirst(OrderedDict[int, None]):
    def popitem(self, last: bool = False) -> tuple[int, None]:
        return super().popitem(last)
