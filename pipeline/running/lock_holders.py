"""Who holds the lock of a file: for the message that one waits for in vain."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.records.plain_text import format_line

_LOCKS = Path("/proc/locks")  # of Linux; other systems don't say


def name_holder(path: Path) -> str:
    """Return the process that holds a lock on a file, in brackets behind a blank; nothing where the system can't say.

    Args:
        path: of a file that `flock` locks.
    """
    try:
        status = path.stat()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        entries = [line.split() for line in _LOCKS.read_text(encoding="utf-8").splitlines()]
        # "1: FLOCK ADVISORY WRITE 4711 fe:00:131 0 EOF"; who only waits has an arrow behind the number
        pids = [words[words.index(place) - 1] for words in entries if place in words and "->" not in words]
        command = Path(f"/proc/{pids[0]}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (OSError, IndexError):
        return ""
    return f" (process {pids[0]}: {format_line(command.strip())[:100]})"
