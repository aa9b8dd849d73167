"""Whether processes that a test started or killed still run."""

from __future__ import annotations

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and that nobody asked about yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends while its file is read
        return False


def wait_for_end(*pids: int, limit_s: float = 15) -> bool:
    """Wait until processes have ended; return whether they have within the limit."""
    deadline = time.monotonic() + limit_s
    while (is_left := any(map(is_running, pids))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_left
