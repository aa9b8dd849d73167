"""Turns of processes that work side by side: what is timed has the machine to itself, and all else shares it.

A task has a turn beside those of other processes (`share_machine`). For what it times it waits until nobody else has
one, and keeps others from beginning anew (`have_machine_alone`). All that wait for that follow each other before others
go on: to wait until the machine is empty may take longer than what is timed. Where a task does something for minutes,
such as compiling, those who want to be alone wait until it has ended, and meanwhile keep nobody from a turn
(`keep_nobody_waiting`). A process that dies gives its turn back.
Not covered: what takes no turns, such as servers, the loading of weights and whole steps that have no batches.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

_own = threading.local()  # `turn`: that of the task at work in this thread


class _Turn(NamedTuple):
    """Locks that all open, whose holders are as follows.

    Attributes:
        room: shared, who has a turn beside others; alone, who has the machine alone.
        door: shared, who is alone or waits for the room to be; alone, for a moment, who comes in beside others.
        long: shared, who does something long. It is not in the room, so that who is shut out waits for the room alone.
    """

    room: IO[str]
    door: IO[str]
    long: IO[str]


@contextlib.contextmanager
def share_machine(folder: Path) -> Iterator[None]:
    """Wait for a turn beside others, and have it for the block.

    Args:
        folder: of the locks, the same for all that share a machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        turn = _Turn(*(stack.enter_context((folder / f"{name}.lock").open("w")) for name in _Turn._fields))
        _come_in(turn, turn.room)
        _own.turn = turn
        try:
            yield
        finally:
            del _own.turn


@contextlib.contextmanager
def have_machine_alone() -> Iterator[None]:
    """Give a turn that is shared back, and have one alone for the block; a task without a turn has no others to fear.

    Asked again within the block, it does nothing. Of several that wait, none has a turn that another waits for.
    """
    with _leave_room() as turn:
        if turn is None:
            yield
            return
        while not _shut_door(turn):
            _wait_for_long(turn)
        fcntl.flock(turn.room, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(turn.room, fcntl.LOCK_UN)
            fcntl.flock(turn.door, fcntl.LOCK_UN)


@contextlib.contextmanager
def keep_nobody_waiting() -> Iterator[None]:
    """Have others go on for the block, which takes long, while somebody waits to be alone until it has ended.

    Within the block nothing is timed alone.
    """
    with _leave_room() as turn:
        if turn is None:
            yield
            return
        _come_in(turn, turn.long)
        try:
            yield
        finally:
            fcntl.flock(turn.long, fcntl.LOCK_UN)


@contextlib.contextmanager
def _leave_room() -> Iterator[_Turn | None]:
    """Yield the task's turn, given back for the block; None where it has none."""
    turn: _Turn | None = getattr(_own, "turn", None)
    if turn is None:
        yield None
        return
    fcntl.flock(turn.room, fcntl.LOCK_UN)
    _own.turn = None
    try:
        yield turn
    finally:
        _come_in(turn, turn.room)
        _own.turn = turn


def _come_in(turn: _Turn, lock: IO[str]) -> None:
    """Share a lock, when nobody is alone or waits for the room to be empty."""
    fcntl.flock(turn.door, fcntl.LOCK_EX)
    fcntl.flock(lock, fcntl.LOCK_SH)
    fcntl.flock(turn.door, fcntl.LOCK_UN)


def _shut_door(turn: _Turn) -> bool:
    """Keep others from coming in, unless something long is at work, which may have begun before; say whether."""
    fcntl.flock(turn.door, fcntl.LOCK_SH)
    try:
        fcntl.flock(turn.long, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(turn.door, fcntl.LOCK_UN)
        return False
    fcntl.flock(turn.long, fcntl.LOCK_UN)
    return True


def _wait_for_long(turn: _Turn) -> None:
    fcntl.flock(turn.long, fcntl.LOCK_EX)
    fcntl.flock(turn.long, fcntl.LOCK_UN)
