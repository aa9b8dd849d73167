"""Turns of processes that work side by side: what is timed has the machine to itself, and all else shares it.

A task has a turn beside those of other processes (`share_machine`). For what it times it waits until nobody else has
one, and keeps others from beginning anew (`have_machine_alone`). All that wait for that follow each other before others
go on: to wait until the machine is empty may take longer than what is timed. A process that dies gives its turn back.
Not covered: what takes no turns, such as servers, the loading of weights and whole steps that have no batches.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_own = threading.local()  # `turn`: the open locks of the task at work in this thread


@contextlib.contextmanager
def share_machine(folder: Path) -> Iterator[None]:
    """Wait for a turn beside others, and have it for the block.

    Args:
        folder: of the locks, the same for all that share a machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "door.lock").open("w") as door, (folder / "room.lock").open("w") as room:
        _share(door, room)
        _own.turn = (door, room)
        try:
            yield
        finally:
            del _own.turn


@contextlib.contextmanager
def have_machine_alone() -> Iterator[None]:
    """Give a turn that is shared back, and have one alone for the block; a task without a turn has no others to fear.

    Within the block it asks for nothing. Of several that wait, none has a turn that another waits for.
    """
    turn: tuple[IO[str], IO[str]] | None = getattr(_own, "turn", None)
    if turn is None:
        yield
        return
    door, room = turn
    fcntl.flock(room, fcntl.LOCK_UN)
    fcntl.flock(door, fcntl.LOCK_SH)  # shut for those who share, until nobody is left who wants to be alone
    fcntl.flock(room, fcntl.LOCK_EX)
    _own.turn = None
    try:
        yield
    finally:
        fcntl.flock(room, fcntl.LOCK_UN)
        fcntl.flock(door, fcntl.LOCK_UN)
        _share(door, room)
        _own.turn = turn


def _share(door: IO[str], room: IO[str]) -> None:
    """Come in as one of many, when nobody wants to be alone."""
    fcntl.flock(door, fcntl.LOCK_EX)
    fcntl.flock(room, fcntl.LOCK_SH)
    fcntl.flock(door, fcntl.LOCK_UN)
