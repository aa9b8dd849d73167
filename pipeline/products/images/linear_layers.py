"""The linear layers of a part of a pipeline, and those of them that are quantised. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from pipeline.errors import SettingsError
from pipeline.running.weight_files import TensorInfo
from pipeline.settings.layer_patterns import list_nearest, match_layers


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
        try:
            matching = match_layers(pattern, known)
        except re.error as error:
            raise SettingsError(f"{where}: expected a regular expression, got {pattern!r}: {error}") from None
        if not matching:
            nearest = ", ".join(list_nearest(pattern, known)) or "none"
            raise SettingsError(f"{where}: expected linear layers, {pattern!r} matches none; the nearest are {nearest}")
        excluded |= matching
    left = [name for name in known if name not in excluded]
    if not left:
        why = f"exclude names all {len(known)}" if known else "this part has none"
        raise SettingsError(f"expected linear layers to quantise, found none: {why}; remove the step")
    return left
