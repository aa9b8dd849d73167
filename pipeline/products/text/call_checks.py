"""Refuse expected calls that the tools of their card don't allow, such as one of a tool that is there no more.

No model that is sent the tools gets such a case right, neither the reference nor a candidate. So among many of them a
loss in the others looks small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema

from pipeline.errors import EvalsetError
from pipeline.evalsets.cards import Evalset, Tool
from pipeline.evalsets.cases import ToolCallCase

_OPEN = {
    "additionalProperties",
    "patternProperties",
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
}  # may allow more


def check_calls(path: Path, evalset: Evalset) -> None:
    """Check the calls that the cases of an evalset expect, where its card has tools.

    Args:
        path: of the cases.
        evalset: of single tool calls, or of another kind, which is not looked at.

    Raises:
        EvalsetError: with file and case, the first that expects what these tools don't allow.
    """
    for case in evalset.cases if evalset.card.tools else ():
        if isinstance(case, ToolCallCase) and (problem := find_problem(case, evalset.card.tools)):
            raise EvalsetError(f"{path}: case {case.id!r}: {problem}; correct it or the card, and seal it again")


def find_problem(case: ToolCallCase, tools: dict[str, Tool]) -> str | None:
    """Return what of a case's expected call these tools don't allow; None where all is."""
    name, arguments = case.expected.name, case.expected.arguments
    if name not in tools:
        return f"expected.name: expected a tool of the card ({', '.join(tools)}), got {name!r}"
    schema = tools[name].parameters
    declared: dict[str, Any] | None = schema.get("properties")
    if declared is not None and (_OPEN.isdisjoint(schema) or schema.get("additionalProperties") is False):
        for key, given in (("expected.arguments", arguments), ("accepted", case.accepted)):
            if other := next((argument for argument in given if argument not in declared), None):
                return f"{key}: expected arguments of tool {name!r} ({', '.join(declared)}), got {other!r}"
    for error in jsonschema.Draft202012Validator(schema).iter_errors(arguments):
        if error.validator == "required" and not error.absolute_path:
            missing = {argument for argument in error.validator_value if argument not in arguments}
            if missing <= case.accepted.keys():
                continue  # an argument may have further values without a first one
        at = ".".join(["expected.arguments", *map(str, error.absolute_path)])
        return f"{at}: expected what tool {name!r} takes, got other: {' '.join(error.message.split())[:120]}"
    return None
