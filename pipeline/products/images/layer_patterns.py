"""Which linear layers a setting names: a name, a shell pattern, or "re:" and a regex from the start. Free of torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from pipeline.errors import SettingsError
from pipeline.running.weight_files import TensorInfo


def list_stored_matrices(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the layers whose stored weight is a matrix: every linear layer, and an embedding where there is one."""
    return [
        name.removesuffix(".weight")
        for name, info in tensors.items()
        if name.endswith(".weight") and len(info.shape) == 2
    ]


def choose_layers(names: Iterable[str], exclude: Sequence[str]) -> list[str]:
    """Return the layers that no pattern matches, in their order.

    Args:
        names: of all linear layers.
        exclude: patterns.

    Raises:
        SettingsError: a pattern matches none (the nearest are named) or is no regex, or no layer is left.
    """
    known = list(names)
    excluded: set[str] = set()
    for i, pattern in enumerate(exclude):
        where = f"exclude.{i}"
        matching = {name for name in known if _matches(pattern, name, where)}
        if not matching:
            nearest = ", ".join(_list_nearest(pattern, known)) or "none"
            raise SettingsError(f"{where}: expected linear layers, {pattern!r} matches none; the nearest are {nearest}")
        excluded |= matching
    left = [name for name in known if name not in excluded]
    if not left:
        why = f"exclude names all {len(known)}" if known else "this part has none"
        raise SettingsError(f"expected linear layers to quantise, found none: {why}; remove the step")
    return left


def _matches(pattern: str, name: str, where: str) -> bool:
    if not pattern.startswith("re:"):
        return fnmatchcase(name, pattern)
    try:
        return re.match(pattern[3:], name) is not None
    except re.error as error:
        raise SettingsError(f"{where}: expected a regular expression, got {pattern!r}: {error}") from None


def _list_nearest(pattern: str, names: Sequence[str]) -> list[str]:
    text = re.sub(r"[\\^$*+?()\[\]|]|^re:", "", pattern)
    # compared with every tail as well, because a name is often given without its prefix
    tails = {".".join(name.split(".")[i:]): name for name in reversed(names) for i in range(name.count(".") + 1)}
    close = difflib.get_close_matches(text, tails, n=6, cutoff=0.0)
    return list(dict.fromkeys(tails[tail] for tail in close))[:3]
