"""From a worker thread to the event loop: what lm-eval asks is awaited there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Bridge:
    """Awaits work of other threads on the running event loop. Make one on that loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closed = threading.Event()
        self._at_work: set[Future[Any]] = set()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns; called in any thread but the loop's.

        Raises:
            CancelledError: the bridge is closed.
        """
        if self._closed.is_set():
            work.close()
            raise CancelledError
        answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._at_work.add(answer)
        if self._closed.is_set():  # meanwhile
            answer.cancel()
        try:
            return answer.result()
        finally:
            self._at_work.discard(answer)

    def close(self) -> None:
        """Cancel what is at work, and take nothing more: threads that wait come to their end."""
        self._closed.set()
        for answer in list(self._at_work):
            answer.cancel()
