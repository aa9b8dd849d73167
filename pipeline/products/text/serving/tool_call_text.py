"""Read tool calls out of the text of an answer, and write calls as text for a template that has no place for them.

A model writes a call as text. OpenAI's API has a field for it. Three ways of writing are known: JSON alone, as the
shipped agent does (`{"name": ..., "arguments": {...}}`); Llama 3's JSON, which says `parameters`; and the JSON of
Hermes and Qwen between `<tool_call>` and `</tool_call>`.

Not covered: formats that a tokenizer declares itself (its `response_template`), which the library reads; and whether
a called tool exists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TAG = "<tool_call>"
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPENINGS = ("{", TAG)
_SEPARATORS = re.compile(r"[\s;]*")  # between two calls
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class WrittenCall:
    """One tool call, with its arguments as JSON."""

    name: str
    arguments: str


def read_calls(text: str) -> tuple[str, list[WrittenCall]]:
    """Split an answer into its text and its calls; without a call that can be read, all of it is text."""
    if tagged := _TAGGED.findall(text):
        calls = [call for block in tagged for call in _read_objects(block)]
        is_whole = len(calls) == len(tagged)
        return (_TAGGED.sub("", text).strip(), calls) if is_whole else (text, [])
    calls = _read_objects(text)
    return ("", calls) if calls else (text, [])


def may_be_calls(text: str) -> bool:
    """Tell whether the text that begins so may turn out to be a call, so that a stream must wait."""
    start = text.lstrip()
    return any(start.startswith(opening) or opening.startswith(start) for opening in _OPENINGS)


def write_calls(calls: Sequence[dict[str, Any]]) -> str:
    """Return OpenAI's `tool_calls` as text, compact JSON a line, as the shipped agent writes its own.

    Raises:
        ValueError: a call has no name, or arguments that are no JSON.
    """
    lines = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"expected a function with a name, got {call!r:.80}")
        arguments = function.get("arguments") or "{}"
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        lines.append(_write({"name": function["name"], "arguments": arguments}))
    return "\n".join(lines)


def _read_objects(text: str) -> list[WrittenCall]:
    """Return the calls that a text consists of; empty when it holds anything else."""
    calls: list[WrittenCall] = []
    position = _skip(text, 0)
    while position < len(text):
        try:
            value, end = _DECODER.raw_decode(text, position)
            _write(value).encode()  # half of a pair of escapes is JSON, and no text
        except (ValueError, RecursionError):  # of brackets without end
            return []
        arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
        if not isinstance(arguments, dict) or not isinstance(value.get("name"), str):
            return []
        calls.append(WrittenCall(value["name"], _write(arguments)))
        position = _skip(text, end)
    return calls


def _skip(text: str, position: int) -> int:
    match = _SEPARATORS.match(text, position)
    return match.end() if match else position


def _write(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
