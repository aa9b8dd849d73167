"""Is the bytecode of libraries kept? Without it each process compiles them anew, and imports take three times as long.

Containers often set PYTHONDONTWRITEBYTECODE, or hold libraries that only root may write to. Not covered: bytecode that
is older than its source, which Python does not use either.
"""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

_VARIABLE = "PYTHONDONTWRITEBYTECODE"


def list_bytecode_problems(library: str = "numpy") -> list[str]:
    """Say that the libraries came without bytecode and Python may keep none; nothing where that can't be told.

    Args:
        library: whose first file stands for all.
    """
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        return []
    try:
        remedy = _find_remedy(Path(cache_from_source(spec.origin)))
    except OSError:
        return []  # bytecode may not even be looked for, and Python goes on without it
    folder = shlex.quote(str(Path(spec.origin).parents[1]))
    said = (
        f"each process compiles {library} and the other libraries anew, as their bytecode is not kept: imports take "
        f"three times as long; {remedy} `python -m compileall -q {folder}` once"
    )
    return [said] if remedy else []


def _find_remedy(kept: Path) -> str:
    """Return what lets Python write a file of bytecode; "" where it is there, or will be."""
    if kept.is_file():
        return ""
    folder = next(folder for folder in kept.parents if folder.is_dir())
    if not os.access(folder, os.W_OK):
        return f"let this user write to {folder}, or let its owner run"
    if not sys.dont_write_bytecode:
        return ""
    return f"{'unset ' + _VARIABLE if os.environ.get(_VARIABLE) else 'start Python without -B'}, or run"
