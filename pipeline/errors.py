"""Every exception that quantgate raises on purpose, in one tree.

    QuantgateError            anything a user can act on; stages print it as one line and exit 1
    ├── SettingsError         params.yaml is wrong: carries the path of the offending key
    ├── CheckpointError       a checkpoint folder can't be opened, or is not what it claims to be
    ├── SizeError             a suite of cases or a machine is too small for what is asked of it
    ├── EvalsetError          a card or a case file is malformed: carries file and line
    ├── QuantizationError     an optimisation step can't do, or did not do, what was asked
    ├── NumericsError         a formula was given what it can't work on, or can't hold what it promises
    ├── EngineError           a serving engine did not start, died, hung or answered nonsense
    │   ├── RequestError      one request was refused for good (for example HTTP 400)
    │   ├── IgnoredFieldError one request was answered as if it had not said something that it said
    │   └── NonsenseError     an answer is not what the API promises
    ├── ToolError             a simulated tool refuses a call; the model is told
    ├── UnequalWorkError      two sides that are timed did not do the same work
    ├── HarmFound             harm beyond a tolerance is proven before all cases are asked
    ├── JournalError          finished cases can't be written or read back
    └── EvidenceError         records are not fit to be judged (missing, duplicated, unmatched)

A message says what was expected, what came, where, and what to do. A regression is never an
exception: it is a `Verdict`. What pydantic finds wrong with settings, cards, cases and records is put
into such words here, for all of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# pydantic's frequent types of error; "{...}" is from its context
_EXPECTED = {
    "missing": "this key",
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "invalid_key": "text as a key",
    "literal_error": "{expected}",
    "union_tag_invalid": "one of the kinds {expected_tags}",
    "union_tag_not_found": "a key `kind`",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "string_too_short": "{min_length} or more characters",
    "string_too_long": "at most {max_length} characters",
    "too_short": "{min_length} or more entries",
}
_MAX_SHOWN = 80  # characters of a wrong value
_NEAR = 0.7  # similarity of two words of which one may be the other, misspelled: 1 is equal


class QuantgateError(Exception):
    """An error whose message is meant for the user and fits on one line."""


class SettingsError(QuantgateError):
    """params.yaml is wrong; the message starts with the path of the key."""


class SizeError(QuantgateError):
    """A suite of cases is too small for a tolerance, or a machine for weights, whatever the candidate does."""


class CheckpointError(QuantgateError):
    """A checkpoint folder is missing, unsafe, damaged or inconsistent."""


class EvalsetError(QuantgateError):
    """An evalset's card or cases are malformed; the message carries file and line."""


class QuantizationError(QuantgateError):
    """A quantisation step was refused or did not produce what was asked for."""


class NumericsError(QuantgateError):
    """A tensor formula was given unfit input, or its result does not hold what it promises; names the module."""


class EngineError(QuantgateError):
    """A serving engine failed; the message names its log file where there is one."""


class RequestError(EngineError):
    """One request was refused for good and is not worth repeating; `status` is the HTTP status of the refusal."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class IgnoredFieldError(EngineError):
    """A server left a field of a request out of account; what it answers is not evidence."""


class NonsenseError(EngineError):
    """An answer is not of the form that the API has."""


class ToolError(QuantgateError):
    """A simulated tool can't do what it was called for; the message is its reply."""


class UnequalWorkError(QuantgateError):
    """Two sides that are timed did not do the same work, and their times say nothing."""


class HarmFound(QuantgateError):
    """Harm beyond a tolerance is proven; the message names the metric and what is known of it."""


class JournalError(QuantgateError):
    """The journal of finished cases can't be written or read."""


class EvidenceError(QuantgateError):
    """Records are missing, duplicated, unmatched or do not belong to this candidate."""


def show_value(value: object) -> str:
    """Return a wrong value as Python writes it, cut to what a line has room for."""
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 3] + "..."


def format_key(key: object) -> str:
    """Return a key as it stands in the file, or as Python writes it where that may not be read on a line."""
    return str(key) if re.fullmatch(r"[\w ./:*-]{1,80}", str(key)) else show_value(key)


def find_near(word: object, known: Iterable[str]) -> str:
    """Return the known word that may be meant by an unknown one; "" where none is near."""
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1, cutoff=_NEAR)), "")


def suggest(word: object, known: Iterable[str]) -> str:
    """Ask whether the known word that is nearest to an unknown one is meant; "" where none is near."""
    near = find_near(word, known)
    return f"is `{near}` meant" if near else ""


def describe_problem(problem: ErrorDetails, *others: ErrorDetails) -> str:
    """Say what was expected and what came; an error of a type that is not in the table keeps pydantic's words.

    Args:
        problem: pydantic's.
        others: of the same value, where it may be of several types.
    """
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key; remove it or correct its spelling"
    came = show_value(context["tag"] if kind == "union_tag_invalid" else problem["input"])
    known = [_EXPECTED[p["type"]].format(**p.get("ctx", {})) for p in (problem, *others) if p["type"] in _EXPECTED]
    expected = f"expected {', or '.join(dict.fromkeys(known))}" if kind in _EXPECTED else problem["msg"]
    return f"{expected}, found none" if kind == "missing" else f"{expected}, got {came}"
