"""Find the first error of a kind in a group of tasks that failed, and say of an endpoint that died what is kept.

`except*` is not used: Python before 3.11.4 wraps an exception that is raised in it in a group. No stage would then
recognise the line that is meant for the user.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

from pipeline.errors import EngineError

E = TypeVar("E", bound=Exception)


def find_error(group: BaseExceptionGroup[BaseException], kind: type[E]) -> E | None:
    """Return the first error of a kind in a group, however deep; None where there is none."""
    for error in group.exceptions:
        cause = find_error(error, kind) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(cause, kind):
            return cause
    return None


def say_kept(died: EngineError, eval_name: str, num_kept: int, total: int, unit: str = "cases") -> EngineError:
    """Return the error of an endpoint that died during an eval, with what is kept and how it goes on."""
    return EngineError(
        f"{died}; {eval_name}: {num_kept} of {total} {unit} are finished and kept, run `dvc repro` to go on"
    )


@contextlib.contextmanager
def prepare(eval_name: str) -> Iterator[None]:
    """Have the block prepare an eval's requests; of an endpoint that dies meanwhile it is said that work is kept.

    Raises:
        EngineError: as the block does.
    """
    try:
        yield
    except EngineError as died:
        if type(died) is not EngineError:  # of one request, which is refused again
            raise
        raise EngineError(
            f"{died}; {eval_name}: its requests were in preparation; finished work is kept, run `dvc repro` to go on"
        ) from None
