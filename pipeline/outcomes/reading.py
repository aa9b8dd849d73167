"""Text and JSON from strangers: bounded, in UTF-8, and refused with its place where it is not what it should be."""

from __future__ import annotations

import codecs
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from pipeline.errors import EvidenceError
from pipeline.records.files import open_bounded
from pipeline.records.nesting import is_deep

_MAX_SHOWN = 60  # characters of a key
_MAX_DEPTH = 200  # of objects and lists in one another; what walks through them calls itself
_HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON spells a surrogate


def clean(text: str) -> str:
    """Replace what can't be written as UTF-8: half a surrogate pair, which JSON can spell."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON data with its texts changed, but for keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_texts(part, change) for key, part in value.items()}
    return [map_texts(part, change) for part in value] if isinstance(value, list) else value


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON; NaN and infinity become what they say, for the reader to refuse by name, half a surrogate pair "?".

    Raises:
        EvidenceError: it is none, or an object has a key twice.
    """

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if is_halved:
            pairs = [(clean(key), map_texts(value, clean)) for key, value in pairs]
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise EvidenceError(f"{where}: key {twice[:_MAX_SHOWN]!r} is there twice; name it once")
        return found

    try:
        text = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
        is_halved = _HALF_A_PAIR.search(text) is not None
        value = json.loads(text, object_pairs_hook=build)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(
            f"{where}: expected JSON, got something else: {' '.join(str(error).split())}; was the file cut off?"
        ) from None
    if text.count("[") + text.count("{") > _MAX_DEPTH and is_deep(value, _MAX_DEPTH):
        raise EvidenceError(f"{where}: expected {_MAX_DEPTH} objects and lists in one another at most, got more")
    return value


def read_first_keys(path: Path) -> set[str]:
    """Return the keys of the first object of a JSONL file, without reading the rest; none where it is no object.

    Raises:
        EvidenceError: it is no regular file, or larger than the limit.
    """
    with open_bounded(path) as file:
        line = next((line for line in file if line.strip()), b"{}")
    try:
        first = parse_json(line, str(path))
    except EvidenceError:
        return set()  # whoever reads it says so, with its line
    return set(first) if isinstance(first, dict) else set()


@contextmanager
def open_text(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open a file in UTF-8, with a byte-order mark or without, to be read line by line.

    Args:
        newline: as for `open`.

    Raises:
        EvidenceError: it is no regular file, too large, or, when it is read, in another encoding.
    """
    with open_bounded(path) as file:
        start = file.read(2)
        if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in start:
            raise EvidenceError(f"{path}: expected UTF-8, got what looks like UTF-16; save it as UTF-8")
        file.seek(0)
        try:
            with io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text:
                yield text
        except UnicodeDecodeError as error:
            raise EvidenceError(f"{path}:{_find_broken_line(path)}: not UTF-8 ({error.reason})") from None


def _find_broken_line(path: Path) -> int:
    """Return the line, counted from 1, in which a file stops being text."""
    with open_bounded(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def iterate_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line of a JSONL file that is not empty, with its place.

    Raises:
        EvidenceError: no file, not UTF-8, or a line that is no JSON object.
    """
    # of all that `str.splitlines` cuts at, a JSON string may hold U+2028
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}:{number}"
                value = parse_json(line, where)
                if not isinstance(value, dict):
                    raise EvidenceError(f"{where}: expected a JSON object, got {type(value).__name__}")
                yield where, value
