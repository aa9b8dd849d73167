"""What lm-eval asks from its thread, and how that thread ends."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

import pipeline.products.text.evals.harness as harness
from pipeline.products.text.evals.bridge import Bridge


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


def test_an_eval_that_is_cancelled_leaves_no_thread_behind_that_writes() -> None:
    """Another eval failed: the journal is closed next, and lm-eval may be in the middle of a chunk."""
    asks, is_over = threading.Event(), threading.Event()
    no_context: Any = None

    def work(context: Any, bridge: Any) -> list[Any]:
        asks.set()
        try:
            bridge.wait(asyncio.sleep(60))
        finally:
            threading.Event().wait(0.2)  # it is slow to end
            is_over.set()
        return []

    async def run() -> None:
        task = asyncio.create_task(harness._work_beside(harness._LIBRARY, no_context, work))
        await asyncio.to_thread(asks.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_over.is_set()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_tasks_that_wait_for_their_turn_take_no_thread_of_others() -> None:
    """Names of hosts are looked up in these threads: with tasks enough nobody asked anything any more."""
    at_work: list[int] = []

    def work(number: Any, bridge: Any) -> int:
        at_work.append(number)
        bridge.wait(asyncio.to_thread(threading.Event().wait, 0.05))
        at_work.append(number)
        return int(number)

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        numbers: Any = range(5)
        assert await asyncio.gather(*(harness._work_beside(harness._LIBRARY, number, work) for number in numbers)) == [
            *numbers
        ]
        assert at_work == [number for number in numbers for _ in range(2)], "one after the other"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_task_that_is_cancelled_before_its_turn_never_begins() -> None:
    begun: list[str] = []

    def work(name: Any, bridge: Any) -> None:
        begun.append(name)
        bridge.wait(asyncio.sleep(0.2))

    async def run() -> None:
        first, second = (asyncio.create_task(harness._work_beside(harness._LIBRARY, name, work)) for name in names)
        while not begun:
            await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await first
        assert begun == ["first"]

    names: Any = ("first", "second")
    asyncio.run(asyncio.wait_for(run(), 30))
