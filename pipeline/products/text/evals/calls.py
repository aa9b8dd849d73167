"""Read a tool call out of a reply, and compare two calls.

A call comes either as the reply's `tool_calls` (a server with a tool parser) or as JSON in its text:
`{"name": ..., "arguments": {...}}`. Calls are compared as JSON values. The order of keys does not
matter, and 2 equals 2.0; but "2" does not equal 2, and true does not equal 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from pipeline.evalsets.cards import Tool
from pipeline.evalsets.cases import Call
from pipeline.products.text.serving.client import Reply
from pipeline.products.text.settings import ChatEval
from pipeline.records.nesting import is_deep

MAX_NESTING = 63  # of a call's arguments: a broken model writes brackets without end


def parse_call(reply: Reply) -> Call | None:
    """Return the first call of a reply, or None when it holds none that can be read, and written again."""
    try:
        if reply.tool_calls:
            function = reply.tool_calls[0]["function"]
            call = Call(name=function["name"], arguments=json.loads(function["arguments"] or "{}"))
        else:
            call = Call.model_validate(json.loads(reply.text))
        # half of a pair of escapes is JSON, and no text
        json.dumps(call.model_dump(), ensure_ascii=False).encode()
    except (KeyError, TypeError, ValueError, ValidationError, RecursionError):
        return None
    return None if is_deep(call.arguments, MAX_NESTING) else call


def format_reply(reply: Reply) -> str:
    """Return a reply as one line of text: its content, or its first tool call."""
    if reply.text or not reply.tool_calls:
        return reply.text.replace("\n", "\\n")
    return json.dumps(reply.tool_calls[0].get("function", {}), sort_keys=True)


def find_cut(*replies: Reply) -> str:
    """Return the setting that ended one of some replies before the model did; nothing where it ended none."""
    return "serving.max_tokens" if any(reply.finish_reason == "length" for reply in replies) else ""


def continue_conversation(reply: Reply, result: str) -> list[dict[str, Any]]:
    """Return the two messages that follow a reply whose first call gave `result`, in the reply's own form."""
    if not reply.tool_calls:
        return [{"role": "assistant", "content": reply.text}, {"role": "tool", "content": result}]
    call = reply.tool_calls[0]
    return [
        {"role": "assistant", "content": reply.text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call.get("id", ""), "content": result},
    ]


def same_value(first: Any, second: Any) -> bool:
    """Compare two JSON values: numbers by value, everything else by type and value."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_value(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same_value, first, second))
    return bool(first == second)


def is_exact(call: Call, expected: Call) -> bool:
    """Tell whether a call is the expected one to the letter (as JSON values)."""
    return call.name == expected.name and same_value(call.arguments, expected.arguments)


def is_accepted(call: Call, expected: Call, accepted: Mapping[str, Sequence[Any]]) -> bool:
    """Tell whether a call does what was asked: every argument expected or among its accepted values.

    Args:
        call: what the model called.
        expected: the canonical call.
        accepted: argument -> further values that do; None among them means it may be left out.
    """
    if call.name != expected.name or not call.arguments.keys() <= expected.arguments.keys() | accepted.keys():
        return False
    for name in expected.arguments.keys() | accepted.keys():
        further = accepted.get(name, ())
        if name not in call.arguments:
            is_right = any(value is None for value in further)
        else:
            values = [*further, *([expected.arguments[name]] if name in expected.arguments else [])]
            is_right = any(same_value(call.arguments[name], value) for value in values)
        if not is_right:
            return False
    return True


def declare_tools(tools: Mapping[str, Tool], settings: ChatEval) -> list[dict[str, Any]] | None:
    """Return the tools that an eval's chat requests carry, None when they carry none."""
    if not settings.send_tools:
        return None
    return [
        {"type": "function", "function": {"name": name, "description": tool.description, "parameters": tool.parameters}}
        for name, tool in tools.items()
    ]
