"""Runs a server that knows nothing of us, and ends it when we are gone: `python -m ...keeper COMMAND ...`.

A server such as vLLM starts further processes and lives on when its parent dies. This one holds it in
a process group, and when standard input closes, or the server ends, the whole group is told to
terminate and, when it does not, killed. A container's client passes the signal on to its container.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

TERMINATE_TIMEOUT_S = 15.0
LEFTOVERS_TIMEOUT_S = 1.0  # of what a server leaves behind: the client waits for us to say that it has died


def main(argv: list[str]) -> int:
    """Run a command until it ends or standard input closes; return its exit code."""
    server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True, name="parent-watch").start()
    code = server.wait()
    _end_group(server.pid, LEFTOVERS_TIMEOUT_S)
    return code


def _end_with_parent(server: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    _end_group(server.pid, TERMINATE_TIMEOUT_S)


def _end_group(group: int, timeout_s: float) -> None:
    """End the server, or what it left behind: politely, then not."""
    _signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while _signal_group(group, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
