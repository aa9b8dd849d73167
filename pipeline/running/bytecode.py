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
    compiling = f"`python -m compileall -q {shlex.quote(str(Path(spec.origin).parents[1]))}` once"
    try:
        remedy = _find_remedy(Path(cache_from_source(spec.origin)), compiling)
    except (OSError, NotImplementedError):
        return []  # bytecode may not even be looked for, or is not kept by this Python, which goes on without it
    said = (
        f"each process compiles {library} and the other libraries anew, as their bytecode is not kept: imports take "
        f"three times as long; {remedy}"
    )
    return [said] if remedy else []


def _find_remedy(kept: Path, compiling: str) -> str:
    """Return what has a file of bytecode written; "" where it is there, or will be.

    Args:
        kept: the file.
        compiling: the command that writes those of all libraries.
    """
    if kept.is_file():
        return ""
    folder = next(folder for folder in kept.parents if folder.is_dir())
    if not os.access(folder, os.W_OK):
        return f"this user can't write to {folder}, so let its owner run {compiling}"
    if not sys.dont_write_bytecode:
        return ""
    return f"{'unset ' + _VARIABLE if os.environ.get(_VARIABLE) else 'start Python without -B'}, or run {compiling}"
