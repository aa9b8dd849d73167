"""Cases in progress at one endpoint: so many at once, whatever their evals."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator


class Places:
    """A free place goes to the eval that comes first; of one eval, to whoever has waited for longest."""

    def __init__(self, count: int) -> None:
        """Begin with so many free ones."""
        self.count = self._num_free = count
        self._line: list[tuple[tuple[int, ...], int, asyncio.Future[None]]] = []  # a heap
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def take(self, rank: tuple[int, ...]) -> AsyncIterator[None]:
        """Hold a place; evals of a lower rank come first."""
        if self._num_free:  # then nobody waits
            self._num_free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._line, (rank, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it came in the same moment
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._line:
            _, _, turn = heapq.heappop(self._line)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
