"""Write files and folders whole or not at all, and read text by lines.

A killed stage leaves no half file and no half folder behind: what is written goes under a temporary name and is
moved into place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replace_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to, and move the file into place at the end: whole or not at all.

    Raises:
        OSError: the system's, with the name of the file that was meant instead of the temporary one, or of none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, and flush it to disk."""
    with replace_whole(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_folder(folder: Path, target: Path) -> None:
    """Move a finished folder to where another one may lie; a kill in between leaves neither half a folder there.

    Args:
        folder: beside `target`, on the same disk.
        target: steps aside first, as a folder can't replace one that is not empty, and is removed at the end.
    """
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    folder.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def read_lines(path: Path) -> list[str]:
    """Split a text file at newlines only: `str.splitlines` also cuts at U+2028 inside a JSON string."""
    text = path.read_text(encoding="utf-8")
    return text.removesuffix("\n").split("\n") if text else []


def line_of(error: UnicodeDecodeError) -> int:
    """Return the line, counted from 1, in which a file stopped being text."""
    return error.object[: error.start].count(b"\n") + 1
