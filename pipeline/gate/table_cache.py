"""What is made of tables of matched detections is kept while two detectors are compared, however many categories.

A reference's tables are every candidate's, and all metrics read them. Kept are those used last: of a reference and a
dozen candidates with 80 categories, and of two detectors with any number of them. Fewer would be made anew for each
metric, as all categories are gone through in one order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from pipeline.records.detections import MatchTable

P = ParamSpec("P")
T = TypeVar("T")

_NUM_KEPT = 1024  # results of each function, at least; the largest take 320 KB
_NUM_SIDES = 3  # a reference, a candidate, and room for buckets of images


def keep_by_table(
    function: Callable[Concatenate[MatchTable, P], T],
) -> Callable[Concatenate[MatchTable, P], T]:
    """Return a function that finds again what it made of the very table and equal other arguments, used lately."""
    kept: OrderedDict[tuple[Hashable, ...], T] = OrderedDict()
    num_kept = _NUM_KEPT

    @wraps(function)
    def find(table: MatchTable, *args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal num_kept
        num_kept = max(num_kept, _NUM_SIDES * (1 + len(table.categories)))
        key = (table, *args, *kwargs.items())
        if key not in kept:
            kept[key] = function(table, *args, **kwargs)
            while len(kept) > num_kept:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return kept[key]

    return find
