"""Edit entries of a YAML file's top-level mappings as text, so that comments and layout of all others stay.

    products:          <- a block
      agent: ...       <- an entry; the comment right above it is part of it

Not covered: mappings in braces, where `add_entry` finds no block. Whether the text still says the same otherwise is for
the caller to check.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from textwrap import indent

from ruamel.yaml.error import YAMLError


def add_entry(text: str, block: str, entry: str) -> str:
    """Put an entry, which is not indented, behind the last one of a block.

    Raises:
        YAMLError: no such block in this layout.
    """
    lines = text.splitlines(keepends=True)
    start, end = _find_block(lines, block)
    added = indent(entry.rstrip("\n") + "\n", " " * _measure_indent(lines[start:end], block))
    return "".join([*lines[:end], "\n", added, *lines[end:]])


def remove_entries(text: str, block: str, names: Collection[str]) -> str:
    """Take entries out of a block, each with the comment above it and the blank lines behind it.

    Raises:
        YAMLError: no such block in this layout.
    """
    lines = text.splitlines(keepends=True)
    start, end = _find_block(lines, block)
    depth = _measure_indent(lines[start:end], block)
    heads = [i for i in range(start, end) if _measure(lines[i]) == depth and not _is_comment(lines[i])]
    starts = [_climb_comment(lines, head, depth) for head in heads]
    kept = lines[:start] + (lines[start : starts[0]] if starts else [])
    for head, first, after in zip(heads, starts, [*starts[1:], end], strict=True):
        if _read_key(lines[head]) not in names:
            kept += lines[first:after]
    return "".join(kept + lines[end:])


def _find_block(lines: list[str], block: str) -> tuple[int, int]:
    """Return the first line behind the block's key, and that behind its last entry."""
    start = next((i for i, line in enumerate(lines, 1) if re.match(rf"{re.escape(block)}:\s*(#.*)?$", line)), None)
    if start is None:
        raise YAMLError(f"expected `{block}:` on a line of its own and its entries below, found none")
    end = next((i for i in range(start, len(lines)) if _measure(lines[i]) == 0 and not _is_comment(lines[i])), None)
    end = len(lines) if end is None else end
    while end > start and (_measure(lines[end - 1]) is None or _measure(lines[end - 1]) == 0):
        end -= 1  # what stands between two blocks belongs to the second
    return start, end


def _measure(line: str) -> int | None:
    """Return how far a line is indented; None: it is blank."""
    return len(line) - len(line.lstrip(" ")) if line.strip() else None


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _measure_indent(lines: list[str], block: str) -> int:
    """Return how far the entries of a block are indented."""
    for line in lines:
        if (found := _measure(line)) and not _is_comment(line):
            return found
    raise YAMLError(f"expected entries below `{block}:`, found none")


def _climb_comment(lines: list[str], head: int, depth: int) -> int:
    while _is_comment(lines[head - 1]) and _measure(lines[head - 1]) == depth:
        head -= 1
    return head


def _read_key(line: str) -> str:
    return line.strip().partition(":")[0].strip("'\"")
