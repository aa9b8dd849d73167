"""Turns of processes that work side by side: what is timed has the machine to itself, and all else shares it.

Whoever wants it alone keeps others from beginning anew, and waits for those that work. A process that dies gives its
turn back. Not covered: work that takes no turns, such as servers and whole steps that have no batches.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_ALONE = "needs_machine_alone"  # the attribute of a function


def time_alone(function: F) -> F:
    """Mark a function whose times are evidence: it gets the machine to itself, wherever turns are taken."""
    setattr(function, _ALONE, True)
    return function


def is_timed_alone(function: Callable[..., Any]) -> bool:
    """Say whether a function is marked so."""
    return bool(getattr(function, _ALONE, False))


@contextlib.contextmanager
def take_turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait for a turn, and have it for the block.

    Args:
        folder: of the locks, the same for all that share a machine.
        alone: nobody else has a turn meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "door.lock").open("w") as door, (folder / "room.lock").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        yield
