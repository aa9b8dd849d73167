"""What lm-eval asks from its thread, and how that thread ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

import pipeline.products.text.evals.harness as harness
from pipeline.products.text.evals.bridge import Bridge
from pipeline.products.text.settings import HarnessEval


async def answer() -> str:
    return "yes"


def test_a_thread_that_waits_ends_when_the_bridge_closes_and_asks_no_more() -> None:
    async def run() -> None:
        bridge, ends = Bridge(), list[type[BaseException]]()

        def ask() -> str:
            said = bridge.wait(answer())
            for _ in range(2):
                try:
                    bridge.wait(asyncio.sleep(60))
                except BaseException as error:
                    ends.append(type(error))
            return said

        async with asyncio.timeout(20):
            asking = asyncio.ensure_future(asyncio.to_thread(ask))
            while not bridge._at_work:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            bridge.close()
            assert await asking == "yes"
        assert ends == [CancelledError, CancelledError]

    asyncio.run(run())


def test_an_eval_that_is_cancelled_leaves_no_thread_behind_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another eval failed: the journal is closed next, and lm-eval may be in the middle of a chunk."""
    asks, is_over = threading.Event(), threading.Event()

    def run_task(context: Any, settings: Any, bridge: Bridge) -> list[Any]:
        asks.set()
        try:
            bridge.wait(asyncio.sleep(60))
        finally:
            threading.Event().wait(0.2)  # it is slow to end
            is_over.set()
        return []

    async def run() -> None:
        task = asyncio.create_task(harness._run_beside(None, HarnessEval(kind="harness", task="t")))  # type: ignore[arg-type]
        await asyncio.to_thread(asks.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_over.is_set()

    monkeypatch.setattr(harness, "_run_task", run_task)
    asyncio.run(asyncio.wait_for(run(), 30))
