"""Where two answers part, and what kind of difference it is.

An output has one line per turn. What a user loses by a difference depends on its kind: another tool or
argument value changes what is done, another spelling of the same call changes nothing.
"""

from __future__ import annotations

import json
from typing import Any

# from harmless to harmful
KINDS = (
    "whitespace",
    "spelling of the same call",
    "prose",
    "argument value",
    "argument name",
    "tool name",
    "JSON shape",
    "number of turns",
)


def first_difference(reference: str, candidate: str) -> tuple[int, int] | None:
    """Return where two outputs part: (line, character), 0-based, or None when they are equal.

    A trajectory's output has one line per turn, so the line is the turn.
    """
    if reference == candidate:
        return None
    shorter = min(len(reference), len(candidate))
    at = next((i for i in range(shorter) if reference[i] != candidate[i]), shorter)
    return reference[:at].count("\n"), at


def classify_difference(reference: str, candidate: str) -> str | None:
    """Return the kind (one of `KINDS`) of the first turn that differs, or None when outputs are equal.

    Later turns follow from the first that differs, so their kinds say nothing more.
    """
    ours, theirs = reference.split("\n"), candidate.split("\n")
    pair = next(((a, b) for a, b in zip(ours, theirs, strict=False) if a != b), None)
    if pair is None:
        return None if len(ours) == len(theirs) else "number of turns"
    a, b = pair
    if "".join(a.split()) == "".join(b.split()):
        return "whitespace"
    first, second = _read_call(a), _read_call(b)
    if first is not None and second is not None:
        return _compare_calls(first, second)
    is_prose = first is second is None and not (_is_json_like(a) or _is_json_like(b))
    return "prose" if is_prose else "JSON shape"


def _compare_calls(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    if ours["name"] != theirs["name"]:
        return "tool name"
    a, b = ours["arguments"], theirs["arguments"]
    if a.keys() != b.keys():
        return "argument name"
    # as JSON: 1 and true are equal to Python, and not to a tool
    same = all(json.dumps(a[key], sort_keys=True) == json.dumps(b[key], sort_keys=True) for key in a)
    return "spelling of the same call" if same else "argument value"


def _read_call(line: str) -> dict[str, Any] | None:
    """Return a line as a tool call whose arguments are an object (or one as text, as the OpenAI API has it)."""
    try:
        call = json.loads(line)
        arguments = call["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, KeyError, TypeError):
        return None
    return {"name": call.get("name"), "arguments": arguments} if isinstance(arguments, dict) else None


def _is_json_like(line: str) -> bool:
    return line.lstrip().startswith(("{", "["))
