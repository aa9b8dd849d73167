"""Runs a server that knows nothing of us, and ends it when we are gone: `python -m ...keeper COMMAND ...`.

A server such as vLLM starts further processes and lives on when its parent dies. This one adopts all that
descend from it, also those that leave their process group. When standard input closes, or the server ends,
it asks all of them to terminate and kills those that do not. When this process itself is killed, the system
kills the server. A container's client passes the signal on to its container.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

TERMINATE_TIMEOUT_S = 15.0
LEFTOVERS_TIMEOUT_S = 1.0  # of processes that a server leaves behind: the client waits for us to say that it has died
KILL_TIMEOUT_S = 2.0  # a process that hangs in the kernel outlives its kill
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main(argv: list[str]) -> int:
    """Run a command until it ends or standard input closes; return its exit code."""
    _control(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become our children, so that they are found
    server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent)
    threading.Thread(target=_end_with_parent, daemon=True, name="parent-watch").start()
    code = server.wait()
    _end_all(LEFTOVERS_TIMEOUT_S)
    return code


def _control(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the process group has to do
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    _end_all(TERMINATE_TIMEOUT_S)


def _end_all(timeout_s: float) -> None:
    """End the server and all that it has started, or what it left behind: politely, then not."""
    _signal_all(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while _signal_all(0) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while _signal_all(signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.01)


def _signal_all(number: int) -> bool:
    """Signal every process that descends from this one; say whether there was any."""
    descendants = list_descendants(os.getpid())
    for process in descendants:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)
    return bool(descendants)


def list_descendants(ancestor: int) -> list[int]:
    """Return the processes that descend from one and have not ended, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.parent.name)] = int(parent)
    family = {ancestor}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family - {ancestor})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
