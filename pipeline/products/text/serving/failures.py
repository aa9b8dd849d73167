"""What failed in a group of tasks: the first error of a kind.

`except*` is not used: what is raised in it, Python before 3.11.4 wraps in a group, and no stage would know it for a
line that is meant for the user.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=Exception)


def find_error(group: BaseExceptionGroup[BaseException], kind: type[E]) -> E | None:
    """Return the first error of a kind in a group, however deep; None where there is none."""
    for error in group.exceptions:
        cause = find_error(error, kind) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(cause, kind):
            return cause
    return None
