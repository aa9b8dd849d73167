"""What the workers of a test load and do; a spawned process must find these by name."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.running.turns import have_machine_alone
from pipeline.running.worker_pool import choose_gpu, get_loaded, keep_freed_memory


def load(order: Any) -> Any:
    """Return the order, or raise what it says."""
    if order == "quantgate":
        raise CheckpointError("models/x: expected weights, found none")
    if order == "bug":
        raise ZeroDivisionError("a mistake of ours")
    return [order, os.getpid()]


def add(number: int) -> tuple[Any, int]:
    """Return what was loaded, and the process that did it."""
    order, process = get_loaded()
    return order + number, process


def count_new_pages(num_bytes: int) -> int:
    """Return the pages of memory that the system gave for the last of ten arrays, each freed before the next."""
    keep_freed_memory()
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        bytearray(num_bytes)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def fail_on_the_gpu(text: str) -> None:
    """Raise what torch raises."""
    raise RuntimeError(text)


def die(_number: int) -> None:
    """End as a process does that the kernel kills."""
    os._exit(9)


def choose_together(folder: Path, num_workers: int) -> int | None:
    """Return which of three GPUs this worker takes, once so many workers are there."""
    gpu = choose_gpu(range(3))
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < num_workers:
        time.sleep(0.01)
    return gpu


def time_something() -> str:
    """Stand for what needs the machine for itself."""
    with have_machine_alone():
        return "timed"
