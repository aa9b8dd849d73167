"""Turns of processes that work side by side: what is timed has the machine to itself, and all else shares it.

A task takes a turn, which several may have at once (`share_machine`). To time something, a task waits until no other
has a turn, and none gets one until it is done (`have_machine_alone`). All tasks that wait for this have the machine one
after the other before any new turn: to wait until it is empty may take longer than what is timed. A task that does
something for minutes, such as compiling, says so (`keep_nobody_waiting`): who wants the machine alone waits for its
end, and until then others get turns all the same. A process that dies gives its turn back.

Not covered: what takes no turns, such as servers, the loading of weights and whole steps that have no batches.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

_own = threading.local()  # `turn`: that of this thread's task; None while it is alone or does something long


class _Turn(NamedTuple):
    """The locks of a folder, as one task has them open.

    Attributes:
        room: held shared by each task that has a turn; held alone by the one that has the machine alone.
        door: held shared by who has the machine alone or waits for the room to be empty; held alone, for a moment, by
            who comes in. So nobody comes in while anybody is alone or about to be.
        long: held shared by who does something long, who is not in the room meanwhile. The door is shut only while
            nobody holds it, so who is kept out never waits for something long.
    """

    room: IO[str]
    door: IO[str]
    long: IO[str]


@contextlib.contextmanager
def share_machine(folder: Path) -> Iterator[None]:
    """Wait for a turn, and have it for the block, as others may at the same time.

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
    """Give the task's turn back, have the machine alone for the block, and then wait for a turn again.

    Turns are given back first, so that several that want this do not wait for each other's. It does nothing in a task
    that takes no turns, within a block of its own, and within `keep_nobody_waiting`.
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
    """Give the task's turn back for the block, which takes long, and then wait for a turn again.

    Who wants the machine alone waits until the block has ended, and until then keeps nobody else from a turn. It does
    nothing in a task that takes no turns, and within `have_machine_alone`.
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
    """Yield the locks of the task's turn, which is given back for the block; None where it has no turn."""
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
    """Wait until nobody is alone or waits for the room to be empty, and hold a lock shared."""
    fcntl.flock(turn.door, fcntl.LOCK_EX)
    fcntl.flock(lock, fcntl.LOCK_SH)
    fcntl.flock(turn.door, fcntl.LOCK_UN)


def _shut_door(turn: _Turn) -> bool:
    """Keep others from coming in, unless somebody does something long; return whether they are kept out."""
    fcntl.flock(turn.door, fcntl.LOCK_SH)
    try:
        fcntl.flock(turn.long, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(turn.door, fcntl.LOCK_UN)
        return False
    fcntl.flock(turn.long, fcntl.LOCK_UN)
    return True


def _wait_for_long(turn: _Turn) -> None:
    """Wait until nobody does something long; others may begin to at once."""
    fcntl.flock(turn.long, fcntl.LOCK_EX)
    fcntl.flock(turn.long, fcntl.LOCK_UN)
