"""Import large libraries in three quarters of the time: cyclic garbage waits until they are there.

Imports make hundreds of thousands of objects and leave no garbage. Python looks for some all the same, again and
again, and over all that is there. Not for a process that lets a model go later: objects that are frozen here, and the
cycles that they are in, are never collected.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
