"""The digest of a folder without reading again the large files that did not change: for stage `env`, before any run.

A file counts as unchanged where path, size, inode and both of its times are those that it was read with. Records don't
rest on this: `optimize`, the servers and the gate read every byte. The digests are kept in build/env/digests.json,
which is safe to delete. Not covered: two processes that write it at once. The files of
one are then read again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.records.digests import NOT_CONTENT, digest_files, digest_json, list_files
from pipeline.records.files import write_text
from pipeline.settings.base import ENV
from pipeline.settings.hub_names import parse_pinned

KEPT = ENV / "digests.json"
_MIN_BYTES = 1 << 20  # a smaller file is read in a millisecond
# clocks of file systems tick every few milliseconds, or two seconds: a change within one tick shows in no time
_TICK_NS = 2_000_000_000

Stamp = list[int]


def digest_watched(reference: str, root: Path) -> str:
    """Return a text that differs when a checkpoint does: the name of a pinned model, or the digest of a folder."""
    return reference if parse_pinned(reference) else digest_once(root / reference, root=root, ignore=NOT_CONTENT)


def digest_once(
    folder: Path, *, root: Path, ignore: frozenset[str] = frozenset(), clock_ns: Callable[[], int] = time.time_ns
) -> str:
    """Return the digest of a folder as `digest_folder` does, and keep those of its large files.

    Args:
        folder: to read, recursively.
        root: of the project, under which the digests are kept.
        ignore: file names that do not count.
        clock_ns: what time it is, in nanoseconds.
    """
    kept = _read_kept(root / KEPT)
    paths = {name: path.resolve() for name, path in list_files(folder, ignore=ignore).items()}
    stamps = {name: _stamp(path) for name, path in paths.items()}  # ahead of the reading, as it may change meanwhile
    entries = {name: kept.get(str(path)) for name, path in paths.items()}
    known = {name: entry[1] for name, entry in entries.items() if entry is not None and entry[0] == stamps[name]}
    digests = digest_files(folder, ignore=ignore, known=known)
    settled_ns = clock_ns() - _TICK_NS
    fresh = {
        str(paths[name]): (stamp, digests[name])
        for name, stamp in stamps.items()
        if name not in known and stamp[0] >= _MIN_BYTES and max(stamp[2:]) < settled_ns
    }
    if fresh:
        present = {path: entry for path, entry in kept.items() if Path(path).is_file()}
        write_text(root / KEPT, json.dumps(present | fresh, indent=0))
    return digest_json(digests)


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _read_kept(path: Path) -> dict[str, tuple[Stamp, str]]:
    """Return what is kept, by path; a file that is damaged holds nothing."""
    try:
        return {name: (list(stamp), str(digest)) for name, (stamp, digest) in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
