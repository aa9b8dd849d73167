"""Which keys may stand where in settings, by pydantic's JSON schema of them: what a refusal says of a path.

Pydantic's paths have levels that the file has not: the `kind` of an entry, and the types that a value may have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails

Node = Mapping[str, Any]  # of a JSON schema
_Places = list[tuple[str | None, Node]]  # what may stand at one place; with a kind where an entry may be of several
_OF_KEY = "[key]"  # what pydantic's path ends with, after the key as text, where a chosen name is wrong


class KeyPaths:
    """The keys of one section and all that stands below it."""

    def __init__(self, schema: Node) -> None:
        """Read a JSON schema of pydantic's."""
        self._schema = schema

    def list_keys(self, path: Sequence[Any], *, of_entries: bool = False) -> list[str]:
        """Return the keys that may stand at a place; none where the schema does not name any.

        Args:
            path: as pydantic gives it.
            of_entries: also those of the entries of a list, or of a section with chosen names.
        """
        *_, places = self._walk(path)
        if of_entries:
            places = [*places, *self._enter(places, None)]
        return _name_keys(places)

    def list_owners(self, key: str, path: Sequence[Any]) -> list[str]:
        """List the keys of an entry that lead to a key of this name, else such sections; not those of the path.

        Args:
            key: that is unknown where it stands.
            path: of the entry, as pydantic gives it.
        """
        if key == "kind":
            return []  # many have one, and none is meant
        inside = [name for name in self.list_keys(path) if key in self.list_keys([*path, name], of_entries=True)]
        others = [name for name in self.list_keys([]) if name not in path]
        return inside or [name for name in others if key in self.list_keys([name], of_entries=True)]

    def drop_tags(self, path: Sequence[Any], data: Any) -> Iterator[Any]:
        """Yield the levels of a path that the file has, or should have.

        Args:
            path: as pydantic gives it.
            data: that it leads into.
        """
        for part, places in zip(path, self._walk(path), strict=False):
            if _is_kind(part, places):
                continue
            if _holds(data, part):
                yield part
                data = data[part]
            elif part in _name_keys(places):
                yield part
                data = None

    def _walk(self, path: Sequence[Any]) -> Iterator[_Places]:
        """Yield what may stand at the top, and then below each part of a path."""
        places = list(self._open(self._schema))
        yield places
        for part in path:
            places = self._enter(places, part)
            yield places

    def _enter(self, places: _Places, part: Any) -> _Places:
        """Return what stands one level below: under a kind, a key, an index or a chosen name."""
        if _is_kind(part, places):
            return [(None, node) for kind, node in places if kind == part]
        inner = []
        for _, node in places:
            found = node.get("properties", {}).get(part) or node.get("items") or node.get("additionalProperties")
            inner += list(self._open(found)) if isinstance(found, Mapping) else []
        return inner

    def _open(self, node: Node, kind: str | None = None) -> Iterator[tuple[str | None, Node]]:
        """Yield each of what a node stands for."""
        if "$ref" in node:
            yield from self._open(self._schema["$defs"][node["$ref"].rpartition("/")[2]], kind)
        elif "discriminator" in node:
            for name, reference in node["discriminator"]["mapping"].items():
                yield from self._open({"$ref": reference}, name)
        elif "anyOf" in node:
            for one in node["anyOf"]:
                yield from self._open(one, kind)
        else:
            yield kind, node


def find_wrong_key(problem: ErrorDetails) -> tuple[Any, ...] | None:
    """Return the path to a key that is no text, as the file has it; None where pydantic's problem is another one."""
    path, key = problem["loc"], problem["input"]
    if problem["type"] == "invalid_key":  # of a section; the path ends with the key as text
        return (*path[:-1], key)
    if path[-1:] == (_OF_KEY,) and not isinstance(key, str) and path[-2:-1] in ((key,), (str(key),)):
        return (*path[:-2], key)
    return None


def _is_kind(part: Any, places: _Places) -> bool:
    return part is not None and any(kind == part for kind, _ in places)


def _holds(data: Any, part: Any) -> bool:
    if isinstance(data, list):
        return part in range(len(data))
    return isinstance(data, Mapping) and part in data


def _name_keys(places: _Places) -> list[str]:
    return list(dict.fromkeys(key for _, node in places for key in node.get("properties", {})))
