"""Folders of results: whether they can be written, asked before any work rather than at its end, and who owns them.

Not covered: files in these folders, a full disk, and a folder with the sticky bit, where another user's can't be moved.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from pipeline.errors import JournalError

# beside a result: what is made before it takes the last one's place, the last one, and journals of a whole one
_BESIDE = (".{}.new", ".{}.tmp", ".{}.old", ".{}.done")


def check_evaluation_folders(build: Path, candidate: str) -> None:
    """Check that a candidate's evaluation and its journals can be written, and that the last ones can make way.

    Args:
        build: folder of the product's results.
        candidate: its name.

    Raises:
        JournalError: a folder may not be written to, or is a file.
    """
    for folder in (build / "evaluations" / candidate, build / "journal" / candidate):
        check_folder(folder.parent)
        for own in (folder, *(folder.with_name(name.format(candidate)) for name in _BESIDE)):
            if own.exists() and not own.is_dir():
                raise JournalError(f"{own}: expected a folder for results, got a file; move it away")
            for path, _, _ in os.walk(own, onerror=_explain_unread):
                _check_writable(Path(path))


def list_retired(build: Path, candidates: Collection[str]) -> list[str]:
    """Return a warning where results of candidates that params.yaml has no more are still there.

    DVC counts them in what the product's stages depend on, so that no other clone comes to the same. They may be what
    was released, and nobody else may have them: their owner removes them.

    Args:
        build: folder of the product's results.
        candidates: names of those that it has.
    """
    found = [path for part in ("candidates", "evaluations") for path in sorted((build / part).glob("[!.]*"))]
    retired = [str(path) for path in found if path.name not in candidates and path.is_dir()]
    if not retired:
        return []
    return [
        f"{retired[0]}: of no candidate in params.yaml, and yet DVC counts it in what the product's stages depend on, "
        f"so that no other clone comes to the same; move it away, or `rm -r {' '.join(retired)}`"
    ]


def check_folder(folder: Path) -> None:
    """Check that a folder can be made, or written to where it is there.

    Raises:
        JournalError: it, or what it would be made in, may not be written to or is a file.
    """
    above = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not above.is_dir():
        raise JournalError(f"{above}: expected a folder for results, got a file; move it away")
    _check_writable(above)


def _explain_unread(error: OSError) -> None:
    if isinstance(error, PermissionError):
        _check_writable(Path(error.filename))


def _check_writable(folder: Path) -> None:
    if folder.exists() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        status = folder.stat()
        raise JournalError(
            f"{folder}: expected a folder that user {os.getuid()} may write to, got no permission: it is "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}; correct owner, rights or mount, and run again"
        )
