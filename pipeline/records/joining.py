"""Items that share a key, directly or by way of others, are one group: cases of which equal ones are one cluster.

Without a graph library, as judging others' records runs where none is installed. What a key is made of, and what a
group is called, the caller says.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable


def join_by_keys(num: int, keys: Iterable[Iterable[Hashable]]) -> list[int]:
    """Return a number for each of `num` items: one for all that are connected by shared keys.

    Args:
        num: of items.
        keys: of each item, in the order of the items.
    """
    parents = list(range(num))

    def find(i: int) -> int:
        while parents[i] != i:
            parents[i] = parents[parents[i]]
            i = parents[i]
        return i

    holders: dict[Hashable, int] = {}
    for i, own in enumerate(keys):
        for key in own:
            parents[find(i)] = find(holders.setdefault(key, i))
    return [find(i) for i in range(num)]
