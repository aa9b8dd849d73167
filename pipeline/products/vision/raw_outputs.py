"""What a network returns of a batch, picture by picture: which are finite, and each one's own part.

Not covered: rows of all pictures in one tensor, each of which names its picture. They count for all pictures, unless
there are as many rows as pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pipeline.errors import EngineError
from pipeline.products.vision.adapters import Adapter
from pipeline.products.vision.loading import list_tensors


def find_finite(adapter: Adapter, outputs: Any, num: int) -> list[bool]:
    """Return which pictures have finite raw outputs only; a tensor that is not of so many pictures counts for all.

    Raises:
        EngineError: there is no tensor to look into: NaN would pass unseen.
    """
    if tree_leaves(outputs) and not list_tensors(outputs):
        raise EngineError(
            f"{adapter.path}: the module returned {type(outputs).__name__!r} without a tensor in it, "
            "expected a tensor, or tensors in lists, tuples and dictionaries; correct its forward()"
        )
    finite = tree_map(lambda leaf: leaf.isfinite().cpu() if isinstance(leaf, torch.Tensor) else leaf, outputs)
    return [all(bool(tensor.all()) for tensor in list_tensors(part)) for part in split_pictures(finite, num)]


def split_pictures(outputs: Any, num: int) -> list[Any]:
    """Return raw outputs of each picture, as of a batch of one; what is not by pictures stands in each.

    Args:
        outputs: tensors with a row for each picture, or a list with an entry for each.
        num: pictures.
    """
    if _has_entries(outputs, num):
        return [[entry] for entry in outputs]

    def cut(leaf: Any, i: int) -> Any:
        return leaf[i : i + 1] if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (num,) else leaf

    return [tree_map(partial(cut, i=i), outputs) for i in range(num)]


def _has_entries(outputs: Any, num: int) -> bool:
    """Say whether outputs are a list with an entry for each picture, as of a detector that suppresses boxes itself.

    These differ in their numbers of rows alone, as maps of several scales do not. Tensors that all have a row for each
    picture are taken for such rows.
    """
    if not isinstance(outputs, list) or len(outputs) != num:
        return False
    entries = [tree_map(lambda leaf: getattr(leaf, "shape", ())[1:], entry) for entry in outputs]
    is_alike = all(entry == entries[0] for entry in entries)
    has_rows = all(tensor.shape[:1] == (num,) for tensor in list_tensors(outputs))
    return is_alike and (isinstance(outputs[0], Mapping) or not has_rows)
