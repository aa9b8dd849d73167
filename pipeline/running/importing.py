"""Import large libraries in three quarters of the time: cyclic garbage waits until they are there.

Imports make hundreds of thousands of objects and leave no garbage. Python looks for some all the same, again and
again, and over all that is there. Not for a process that lets a model go later: objects that are frozen here, and the
cycles that they are in, are never collected.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import cache_from_source, find_spec
from pathlib import Path


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Look for no cyclic garbage meanwhile, nor later among the objects that are there at the end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def list_bytecode_problems(library: str = "numpy") -> list[str]:
    """Say that every process compiles the libraries anew: they came without bytecode, and Python may keep none.

    Containers often set PYTHONDONTWRITEBYTECODE, or hold libraries that only root may write to.

    Args:
        library: whose first file stands for all.
    """
    spec = find_spec(library)
    if spec is None or spec.origin is None or (kept := Path(cache_from_source(spec.origin))).is_file():
        return []
    folder = next(folder for folder in kept.parents if folder.is_dir())
    if sys.dont_write_bytecode:
        remedy = "unset PYTHONDONTWRITEBYTECODE"
    elif not os.access(folder, os.W_OK):
        remedy = f"let this user write to {folder}"
    else:
        return []
    return [
        f"each process compiles {library} and the other libraries anew, as their bytecode is not kept: imports take "
        f"three times as long; {remedy}, or run `python -m compileall -q {Path(spec.origin).parents[1]}` once"
    ]
