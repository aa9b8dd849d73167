"""Processes that load once: why one can't is said by it, and one that dies ends the run with one line."""

from __future__ import annotations

import gc
import os
import platform
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CheckpointError, EngineError
from pipeline.running import worker_pool
from pipeline.running.turns import share_machine
from pipeline.running.worker_pool import choose_gpu, run_tasks, start_workers
from tests.fakes.pool_tasks import add, choose_together, count_new_pages, die, fail_on_the_gpu, load, time_something
from tests.fakes.processes import is_running, wait_for_end

DIED: dict[str, Any] = {"owner": "a", "died": "a process ended by itself", "remedy": "lower the batch size"}


def test_a_worker_loads_once_and_is_gone_with_the_pool() -> None:
    """Loading for each task would take longer than the task."""
    with start_workers(load, 40, 1, **DIED) as pool:
        found = [pool.submit(add, number).result() for number in range(3)]
    assert [value for value, _ in found] == [40, 41, 42]
    processes = {process for _, process in found}
    assert len(processes) == 1
    wait_for_end(*processes)
    assert not any(map(is_running, processes))


def test_workers_are_spread_over_the_gpus(tmp_path: Path) -> None:
    with start_workers(load, 1, 4, **DIED) as pool:
        gpus = [pool.submit(choose_together, tmp_path, 4) for _ in range(4)]
        assert sorted(gpu.result() or 0 for gpu in gpus) == [0, 0, 1, 2]


@pytest.mark.parametrize(("gpus", "chosen"), [([], None), ([0], 0), ([0, 1], 1), ([4, 5, 6], 4)])
def test_a_worker_takes_its_turn_of_the_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], chosen: int | None
) -> None:
    monkeypatch.setattr(worker_pool, "_place", [3])
    assert choose_gpu(gpus) == chosen


def test_results_that_were_taken_are_not_kept() -> None:
    """Pixels of a thousand images of SDXL are 3 GB."""
    taken: list[weakref.ref[Large]] = []
    with ThreadPoolExecutor(1) as pool:
        for _, result in run_tasks(pool, Large, [()] * 5):
            taken.append(weakref.ref(result))
            del result
            gc.collect()
            assert sum(kept() is not None for kept in taken) <= 1, "of the future that is at hand"


class Large:
    """What can be told from another, and referred to weakly."""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="no other malloc is told anything")
def test_a_worker_can_keep_the_memory_that_it_frees() -> None:
    """Asked for anew, the arrays of an upscaler took more time of the system than its convolutions took."""
    with start_workers(load, 1, 1, **DIED) as pool:
        assert pool.submit(count_new_pages, 64 * 2**20).result() < 16, "even huge pages are 32"


@pytest.mark.parametrize(
    ("order", "error", "said"),
    [
        ("quantgate", CheckpointError, "^models/x: expected weights, found none$"),
        ("bug", ZeroDivisionError, "^a mistake of ours$"),
    ],
)
def test_what_keeps_a_worker_from_loading_is_what_its_tasks_raise(
    order: str, error: type[Exception], said: str
) -> None:
    """A broken pool says that a process died; for our own mistakes it blamed the memory."""
    with pytest.raises(error, match=said), start_workers(load, order, 1, **DIED) as pool:
        pool.submit(add, 1).result()


def test_a_worker_that_dies_ends_with_the_given_line_and_keeps_what_was_done() -> None:
    with pytest.raises(EngineError) as caught, start_workers(load, 1, 1, **DIED) as pool:
        done = pool.submit(add, 1)
        wait([done])
        pool.submit(die, 1).result()
    assert str(caught.value) == "a: a process ended by itself; lower the batch size" and done.result()[0] == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB "
            "is free. Of the",
            "a: out of memory on GPU 0: 2.00 GiB needed, 1.00 GiB of 79.11 GiB free; lower the batch size",
        ),
        ("CUDA error: unspecified launch failure\nSearch", "a: the GPU or its driver failed: CUDA error: unspecified "),
    ],
)
def test_a_gpu_that_fails_ends_with_a_line_and_keeps_what_was_done(text: str, said: str) -> None:
    with pytest.raises(EngineError) as caught, start_workers(load, 1, 1, **DIED) as pool:
        done = [result for _, result in run_tasks(pool, add, [(1,)])]
        list(run_tasks(pool, fail_on_the_gpu, [(text,)]))
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value) and done[0][0] == 2


def test_tasks_that_wait_are_dropped_when_one_fails() -> None:
    """Else a run that failed at once would work on until its last batch."""
    with pytest.raises(RuntimeError), start_workers(load, 1, 1, **DIED) as pool:
        pool.submit(add, 1).result()
        waiting = [pool.submit(time.sleep, 0.2) for _ in range(100)]
        raise RuntimeError
    assert sum(future.cancelled() for future in waiting) > 80


@pytest.fixture
def works_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker_pool, "_works_here", [])
    worker_pool.work_here(tmp_path / "turns")


@pytest.mark.usefixtures("works_here")
def test_where_others_work_beside_it_one_worker_is_the_process_itself() -> None:
    """Another process would import everything once more; each pool loads anew, and nothing of the last is left."""
    for order in (40, 50):
        with start_workers(load, order, 1, **DIED) as pool:
            assert [pool.submit(add, number).result() for number in range(2)] == [
                (order, os.getpid()),
                (order + 1, os.getpid()),
            ]
    assert not worker_pool._loaded and not worker_pool._place


@pytest.mark.usefixtures("works_here")
@pytest.mark.parametrize(("num_workers", "needs_own"), [(2, False), (1, True)])
def test_several_workers_and_one_that_needs_it_are_processes_all_the_same(num_workers: int, needs_own: bool) -> None:
    with start_workers(load, 1, num_workers, **DIED, needs_own_process=needs_own) as pool:
        assert pool.submit(add, 0).result()[1] != os.getpid()


@pytest.mark.usefixtures("works_here")
def test_what_kept_the_process_itself_from_loading_is_said_once() -> None:
    with start_workers(load, "quantgate", 1, **DIED) as pool, pytest.raises(CheckpointError, match="found none"):
        pool.submit(add, 1).result()
    with start_workers(load, 1, 1, **DIED) as pool:
        assert pool.submit(add, 1).result()[0] == 2


@pytest.mark.usefixtures("works_here")
def test_two_pools_at_once_are_refused_in_one_process() -> None:
    """Each would find what the other has loaded."""
    with (
        start_workers(load, 1, 1, **DIED),
        pytest.raises(RuntimeError, match="one pool at a time"),
        start_workers(load, 2, 1, **DIED),
    ):
        pass


@pytest.mark.usefixtures("works_here")
def test_memory_that_ends_in_the_process_itself_is_one_line() -> None:
    with pytest.raises(EngineError, match="^a: .*lower the batch size"), start_workers(load, 1, 1, **DIED) as pool:
        pool.submit(fail_on_the_gpu, "CUDA out of memory. Tried to allocate 2.00 GiB").result()


@pytest.mark.usefixtures("works_here")
@pytest.mark.parametrize("needs_own", [False, True], ids=["thread", "process"])
def test_a_task_that_times_something_waits_until_no_other_process_works(tmp_path: Path, needs_own: bool) -> None:
    """A verdict on speed would rest on what a neighbour did."""
    with (
        start_workers(load, 1, 1, **DIED, needs_own_process=needs_own) as pool,
        ExitStack() as others,
    ):
        others.enter_context(share_machine(tmp_path / "turns"))
        assert pool.submit(add, 0).result()[0] == 1, "others work on beside it"
        timed = pool.submit(time_something)
        assert wait([timed], timeout=0.3).not_done
        others.close()
        assert timed.result() == "timed"
