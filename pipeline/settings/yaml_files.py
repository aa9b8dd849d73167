"""Read YAML that people and strangers wrote, within bounds: its aliases can write out to more than any machine holds.

A few lines in which every list names the one above nine times are billions of entries for whoever walks through them.
They are counted from the events of the parser, before anything is built, and so are levels, as Python walks through a
thousand at most. Either is reported as any other mistake in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent

from pipeline.errors import EvidenceError
from pipeline.records.files import line_of, open_bounded

_MAX_BYTES = 1 << 20
_MAX_ENTRIES = 100_000  # with every alias written out
_MAX_DEPTH = 100


def read_yaml(path: Path) -> Any:
    """Return what is in a YAML file.

    Raises:
        YAMLError: it is no YAML, or beyond a bound.
        OSError: the system's, such as no file.
    """
    return parse_yaml(read_text(path))


def read_text(path: Path) -> str:
    """Return the text of a YAML file; raises what `read_yaml` does."""
    try:
        with open_bounded(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except EvidenceError as error:
        raise YAMLError(str(error).removeprefix(f"{path}: ")) from None
    if len(data) > _MAX_BYTES:
        raise YAMLError(f"expected {_MAX_BYTES >> 20} MiB at most, got more")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line_start = data.rfind(b"\n", 0, error.start) + 1
        column = len(data[line_start : error.start].decode()) + 1
        raise YAMLError(
            f"line {line_of(error)}, column {column}: not UTF-8: {error.reason}; save the file as UTF-8"
        ) from None


def parse_yaml(text: str) -> Any:
    """Return what a YAML text says.

    Raises:
        YAMLError: it is no YAML, or beyond a bound.
    """
    try:
        check_extent(text)
        return YAML(typ="safe").load(text)
    except YAMLError:
        raise
    except (ValueError, OverflowError, RecursionError) as error:  # a date that is none, a number of 5,000 digits
        raise YAMLError(f"a value that can't be read: {' '.join(str(error).split())[:200]}") from None


def check_extent(text: str) -> None:
    """Count the levels, and the entries with every alias written out, without building or writing out any.

    Raises:
        YAMLError: there are too many, or it is no YAML.
    """
    sizes: dict[str, int] = {}  # by anchor
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # anchor, and entries so far
    for event in YAML(typ="safe", pure=True).parse(text):
        if isinstance(event, CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > _MAX_DEPTH:
                raise YAMLError(f"line {event.start_mark.line + 1}: expected {_MAX_DEPTH} levels at most, got more")
        elif isinstance(event, (CollectionEndEvent, NodeEvent)):
            anchor, size = open_nodes.pop() if isinstance(event, CollectionEndEvent) else (event.anchor, 1)
            line = event.start_mark.line + 1
            if isinstance(event, AliasEvent):
                if anchor not in sizes:
                    raise YAMLError(f"line {line}: expected an alias of what stands above it, got *{str(anchor)[:60]}")
                size = sizes[anchor]
            elif anchor is not None:
                sizes[anchor] = size
            outer, so_far = open_nodes.pop()
            if so_far + size > _MAX_ENTRIES:
                raise YAMLError(
                    f"line {line}: expected {_MAX_ENTRIES:,} entries at most with every alias written out, got more"
                )
            open_nodes.append((outer, so_far + size))
