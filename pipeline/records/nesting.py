"""How deeply JSON is nested: what is walked or written by recursion ends in an error of Python's beyond a limit."""

from __future__ import annotations

from typing import Any


def is_deep(value: Any, most: int) -> bool:
    """Say whether more objects and lists are in one another than there may be."""
    level = [value]
    for _ in range(most):
        level = [
            part
            for one in level
            if isinstance(one, (dict, list))
            for part in (one.values() if isinstance(one, dict) else one)
        ]
    return any(isinstance(one, (dict, list)) for one in level)
