"""Which layers a setting names: by a name, a shell pattern, or "re:" and a regex from the start. Free of torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

_REGEX = "re:"


def match_layers(pattern: str, names: Iterable[str]) -> set[str]:
    """Return the layers that a pattern matches.

    Args:
        pattern: as a setting has it.
        names: of all layers that it may mean.

    Raises:
        re.error: it is no regular expression.
    """
    if not pattern.startswith(_REGEX):
        return {name for name in names if fnmatchcase(name, pattern)}
    regex = re.compile(pattern.removeprefix(_REGEX))
    return {name for name in names if regex.match(name)}


def list_nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """Return up to three layers that may be meant by a pattern that matches none."""
    text = re.sub(r"[\\^$*+?()\[\]|]|^re:", "", pattern)
    # compared with every tail as well, because a name is often given without its prefix
    tails = {".".join(name.split(".")[i:]): name for name in reversed(names) for i in range(name.count(".") + 1)}
    close = difflib.get_close_matches(text, tails, n=6, cutoff=0.0)
    # a name without a dot means the head, which the file may call otherwise
    heads = [name for name in names if "." not in name] if "." not in text else []
    return list(dict.fromkeys(heads + [tails[tail] for tail in close]))[:3]
