"""Write files and folders whole or not at all, and read what others wrote: as much as there is memory for.

A killed stage leaves no half file and no half folder behind: what is written goes under a temporary name and is
moved into place. What is read may come from anybody: a pipe would never end, and a small archive may unpack to more
than fits into memory. So there is one limit, of a file and of what it unpacks to, in MiB: QUANTGATE_MAX_MIB.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import EvidenceError, SettingsError

LIMIT = "QUANTGATE_MAX_MIB"
_MAX_MIB = 512  # a million cases with short texts are 160 MiB
_MIB = 1 << 20


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


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    with replace_whole(path) as temporary:
        temporary.write_bytes(data)


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


def link_or_copy(source: str, target: str) -> None:
    """Give a file a second name, which costs no bytes; a copy where the file system has none. Neither may be edited."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def share_files(folder: Path) -> None:
    """Let others read the files of a folder as they may any new one: some libraries keep theirs for their own user.

    A link is left, as what it leads to is somebody else's.
    """
    new = folder / ".new"
    new.touch()
    mode = stat.S_IMODE(new.stat().st_mode)
    new.unlink()
    for path in folder.rglob("*"):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            path.chmod(mode)


def check_size(num_bytes: int, where: str) -> None:
    """Refuse what is larger than the limit, before it is read or unpacked.

    Raises:
        EvidenceError: it is.
        SettingsError: the limit is no number of MiB.
    """
    limit_mib = os.environ.get(LIMIT, str(_MAX_MIB))
    if not (limit_mib.isascii() and limit_mib.isdigit() and 0 < len(limit_mib) < 10 and int(limit_mib)):
        raise SettingsError(f"{LIMIT}: expected a whole number of MiB above 0, got {limit_mib[:40]!r}")
    if num_bytes > int(limit_mib) * _MIB:
        raise EvidenceError(
            f"{where}: expected {limit_mib} MiB at most, got {-(-num_bytes // _MIB):,} MiB; if it is what "
            f"you mean and memory allows, raise {LIMIT}"
        )


@contextlib.contextmanager
def open_bounded(path: Path) -> Iterator[BinaryIO]:
    """Open a file to be read, unless it is a pipe or a device, or too large.

    Raises:
        EvidenceError: it is no regular file, or larger than the limit.
        OSError: the system's.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise EvidenceError(f"{path}: expected a file, got something else, such as a folder, a pipe or a device")
    check_size(status.st_size, str(path))
    with path.open("rb") as file:
        yield file


def read_bounded(path: Path) -> bytes:
    """Return what is in a file that `open_bounded` opens."""
    with open_bounded(path) as file:
        return file.read()


def check_link(path: Path, folder: Path) -> None:
    """Refuse a file of a folder that lies elsewhere: what is wrong with it would be told with its words.

    Raises:
        EvidenceError: a link leads out of the folder.
    """
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise EvidenceError(
            f"{path}: expected a file of this folder, got a link that leads out of it; copy the file to its place"
        )


def read_lines(path: Path) -> list[str]:
    """Split a text file at newlines only: `str.splitlines` also cuts at U+2028 inside a JSON string."""
    text = read_bounded(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    return text.removesuffix("\n").split("\n") if text else []


def line_of(error: UnicodeDecodeError) -> int:
    """Return the line, counted from 1, in which a file stopped being text."""
    return error.object[: error.start].count(b"\n") + 1
