"""Digests without reading again what did not change, large files and the project's code: for stage `env`.

A file counts as unchanged where path, size, inode and both of its times are those that it was read with. Records don't
rest on this: `optimize`, the servers and the gate read every byte, and each stage its own code. The digests are kept in
build/env/digests.json and code.json, which are safe to delete. Not covered: two processes that write one at once. What
one of them read is then read again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pipeline.records.digests import NOT_CONTENT, digest_files, digest_json, list_files
from pipeline.records.files import write_text
from pipeline.running import stage_code
from pipeline.settings.base import ENV
from pipeline.settings.hub_names import parse_pinned

KEPT = ENV / "digests.json"
KEPT_CODE = ENV / "code.json"
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
    kept = _read_stamped(root / KEPT)
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


def digest_code_once(
    wanted: Collection[tuple[str, str]], *, root: Path, clock_ns: Callable[[], int] = time.time_ns
) -> dict[tuple[str, str], str]:
    """Return what `digest_code` says of stages and kinds, and keep it for as long as no file of the code changes.

    Args:
        wanted: stages, each with a kind.
        root: of the project, under which the digests are kept.
        clock_ns: what time it is, in nanoseconds.
    """
    files = [path for name in stage_code.PACKAGES for path in (stage_code.ROOT / name).rglob("*") if path.is_file()]
    stamps = {str(path): _stamp(path) for path in files if path.suffix != ".pyc"}
    grounds = digest_json(stamps)
    kept = read_kept(root / KEPT_CODE)
    names = {pair: " ".join((grounds, *pair)) for pair in wanted}
    digests = {pair: str(kept.get(name) or stage_code.digest_code(*pair)) for pair, name in names.items()}
    settled_ns = clock_ns() - _TICK_NS
    if not kept.keys() >= set(names.values()) and all(max(stamp[2:]) < settled_ns for stamp in stamps.values()):
        write_text(root / KEPT_CODE, json.dumps({name: digests[pair] for pair, name in names.items()}, indent=0))
    return digests


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _read_stamped(path: Path) -> dict[str, tuple[Stamp, str]]:
    """Return what is kept, by path; a file that is damaged holds nothing."""
    try:
        return {name: (list(stamp), str(digest)) for name, (stamp, digest) in read_kept(path).items()}
    except (ValueError, TypeError):
        return {}


def read_kept(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing where it is damaged."""
    try:
        held = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}
