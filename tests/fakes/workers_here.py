"""The worker processes of a kind, played in the process of the test: its own take seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

from pipeline.running import worker_pool


@contextmanager
def start_here(load: Any, setup: Any, _num_workers: int, **_texts: str) -> Iterator[ThreadPoolExecutor]:
    """Stand in for `worker_pool.start_workers`: load and work in a thread of this process."""
    with (
        mock.patch.object(worker_pool, "_place", [0]),
        mock.patch.object(worker_pool, "_loaded", []) as loaded,
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(lambda: loaded.append(load(setup))).result()
        yield pool
