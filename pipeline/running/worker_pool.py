"""Processes that load something once and then work on what comes: one per core, started when the first task comes.

A process that dies, for lack of memory say, ends the run with one line; what other tasks made is kept. None outlives
the stage that started it. Where several processes work side by side already, a pool of one worker is a thread of the
process that asked for it (`work_here`): another process would import everything once more. Tasks take turns there, so
that what times something can have the machine to itself, as it has in a stage (`turns.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import EngineError
from pipeline.running.gpu_failures import describe_gpu_failure
from pipeline.running.importing import pause_collection
from pipeline.running.quiet import silence_torchao
from pipeline.running.turns import share_machine

R = TypeVar("R")

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h; both are turned off
_loaded: list[Any] = []  # in a worker: at most one
_problems: list[Exception] = []  # why there is none
_place: list[int] = []  # of this worker in its pool: at most one
_works_here: list[Path] = []  # after `work_here`: where turns are taken


def work_here(turns: Path) -> None:
    """Let a pool of one worker be a thread of this process from now on, which works for one candidate and ends.

    Args:
        turns: folder of the locks by which tasks of all such processes take turns (`turns.py`).
    """
    _works_here.append(turns.resolve())


class _TurnTaking(Executor):
    """A pool whose tasks take turns with those of other processes."""

    def __init__(self, pool: Executor, turns: Path) -> None:
        self._pool, self._turns = pool, turns

    def submit(self, function: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        return self._pool.submit(_run_in_turn, self._turns, function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def _run_in_turn(turns: Path, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    with share_machine(turns):
        return function(*args, **kwargs)


@contextlib.contextmanager
def start_workers(
    load: Callable[[Any], Any],
    order: Any,
    num_workers: int,
    *,
    owner: str,
    died: str,
    remedy: str,
    needs_own_process: bool = False,
) -> Iterator[Executor]:
    """Start workers; they load when the first task comes, which finds it by `get_loaded`.

    Args:
        load: a function of a module, run in each worker on the order.
        order: what to load, pickled.
        num_workers: processes.
        owner: for whom they work, which starts each message.
        died: what happened when one ends by itself.
        remedy: what helps then, and where memory is short.
        needs_own_process: a worker is a process even after `work_here`.

    Raises:
        EngineError: a worker died, or its device has no memory left or no longer works.
    """
    is_here = bool(_works_here) and num_workers == 1 and not needs_own_process
    pool = _open_thread(load, order) if is_here else _open_processes(load, order, num_workers)
    for turns in _works_here:
        pool = _TurnTaking(pool, turns)
    try:
        yield pool
    except BrokenProcessPool:
        raise EngineError(f"{owner}: {died}; {remedy}") from None
    except (RuntimeError, MemoryError) as error:
        if (problem := describe_gpu_failure(error, remedy=remedy)) is None:
            raise
        raise EngineError(f"{owner}: {problem}") from None
    finally:
        pool.shutdown(cancel_futures=True)
        if is_here:
            _forget()


def _open_processes(load: Callable[[Any], Any], order: Any, num_workers: int) -> Executor:
    context = multiprocessing.get_context("spawn")  # a forked torch hangs on its own threads
    places = context.SimpleQueue()
    for place in range(num_workers):
        places.put(place)
    return ProcessPoolExecutor(num_workers, mp_context=context, initializer=_initialize, initargs=(load, order, places))


def _open_thread(load: Callable[[Any], Any], order: Any) -> Executor:
    """Open a pool that is one thread: it loads and works, as torch keeps the number of its threads by thread."""
    if _place:
        raise RuntimeError("a process works for one pool at a time")
    _place.append(0)
    return ThreadPoolExecutor(1, initializer=_load, initargs=(load, order))


def _forget() -> None:
    for held in (_place, _loaded, _problems):
        held.clear()


def run_tasks(pool: Executor, function: Callable[..., R], tasks: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, R]]:
    """Yield the position and the result of each task as it is done; after a failure what still ends, then raise it.

    Args:
        pool: of workers.
        function: runs in a worker.
        tasks: arguments of each call.
    """
    waiting = {pool.submit(function, *task): place for place, task in enumerate(tasks)}
    for future in as_completed(waiting):
        if future.cancelled() or future.exception() is not None:
            for other in waiting:
                other.cancel()
            continue
        place = waiting.pop(future)  # a result that was taken is not kept: pixels are large
        yield place, future.result()
    for failed in (future for future in waiting if not future.cancelled()):
        failed.result()  # raises what the first of them raised


def get_loaded() -> Any:
    """Return what this worker has loaded, or raise what kept it from loading."""
    for problem in _problems:
        raise problem
    return _loaded[0]


def choose_gpu(gpus: Sequence[int]) -> int | None:
    """Return the GPU of this worker, so that workers are spread evenly; None where there is none.

    Args:
        gpus: that this process sees.
    """
    return gpus[_place[0] % len(gpus)] if gpus else None


def _initialize(load: Callable[[Any], Any], order: Any, places: SimpleQueue[int]) -> None:
    _place.append(places.get())
    silence_torchao()
    threading.Thread(target=end_with_parent, daemon=True, name="parent-watch").start()
    _load(load, order)


def _load(load: Callable[[Any], Any], order: Any) -> None:
    try:
        with pause_collection():  # what it imports takes longer than what it loads
            _loaded.append(load(order))
    except Exception as error:  # raised here it would only say that a process has ended
        _problems.append(error)


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what this process frees for later use; on another system this does nothing.

    Otherwise a network's arrays are given back to the system and asked for anew at each call. The upscaler's evaluation
    spent half of its CPU time on their pages. Not for what is timed: a server does so only on request.

    Source: mallopt(3).
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def end_with_parent() -> None:
    """End when whoever started this process is gone, killed or not: a worker that waits would not notice."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)
