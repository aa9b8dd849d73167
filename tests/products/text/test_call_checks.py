"""Expected calls against the tools of their card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evalsets.seal import seal
from pipeline.errors import EvalsetError
from pipeline.evalsets.cards import load_evalset
from pipeline.products.text.call_checks import check_calls

BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"room": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["room"],
}
CARD = {
    "name": "calls",
    "version": "1",
    "licence": "CC0-1.0",
    "kind": "tool_calls",
    "description": "Bookings.",
    "made_by": "hand",
    "cluster": "a request",
}


def check(folder: Path, schema: dict[str, Any] | None, **case: Any) -> None:
    """Check a case that expects a call of tool `book`, beside one that is right."""
    folder.mkdir()
    tools: dict[str, Any] = {"cancel": {"parameters": {}}} | (
        {"book": {"parameters": schema}} if schema is not None else {}
    )
    (folder / "card.yaml").write_text(json.dumps(CARD | {"tools": tools}))
    right = {"expected": {"name": "cancel", "arguments": {}}}
    cases = [
        {"id": f"call-{i}", "cluster": f"call-{i}", "messages": [{"role": "user", "content": f"Request {i}."}]} | given
        for i, given in enumerate([right, case], start=1)
    ]
    (folder / "cases.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in cases))
    seal(folder)
    check_calls(folder / "cases.jsonl", load_evalset(folder))


def book(**arguments: Any) -> dict[str, Any]:
    return {"name": "book", "arguments": arguments}


@pytest.mark.parametrize(
    ("schema", "case", "said"),
    [
        (None, {"expected": book(room="blue")}, "expected.name: expected a tool of the card (cancel), got 'book'"),
        (
            BOOK,
            {"expected": book(roam="blue")},
            "expected.arguments: expected arguments of tool 'book' (room, people), got 'roam'",
        ),
        (
            BOOK,
            {"expected": book(room="blue"), "accepted": {"rom": ["Blue"]}},
            "accepted: expected arguments of tool 'book' (room, people), got 'rom'",
        ),
        (
            BOOK,
            {"expected": book(room="blue", people="2")},
            "expected.arguments.people: expected what tool 'book' takes, got other: '2' is not of type 'integer'",
        ),
        (
            BOOK,
            {"expected": book(people=2)},
            "expected.arguments: expected what tool 'book' takes, got other: 'room' is a required property",
        ),
        (
            BOOK | {"additionalProperties": False, "anyOf": [{}]},
            {"expected": book(room="blue", day=1)},
            "expected.arguments: expected arguments of tool 'book' (room, people), got 'day'",
        ),
    ],
    ids=["tool", "argument", "accepted", "type", "required", "closed"],
)
def test_a_call_that_the_tools_do_not_allow_is_refused(
    tmp_path: Path, schema: dict[str, Any] | None, case: dict[str, Any], said: str
) -> None:
    """With 880 such cases beside 220, a loss of seven points passed a tolerance of three."""
    with pytest.raises(EvalsetError) as caught:
        check(tmp_path / "calls", schema, **case)
    where = f"{tmp_path / 'calls/cases.jsonl'}: case 'call-2': "
    assert str(caught.value) == f"{where}{said}; correct it or the card, and seal it again"


@pytest.mark.parametrize(
    ("schema", "case"),
    [
        (BOOK, {"expected": book(room="blue"), "accepted": {"people": [2, None]}}),
        (BOOK, {"expected": book(people=2), "accepted": {"room": ["blue", "Blue"]}}),
        (BOOK | {"additionalProperties": True}, {"expected": book(room="blue", day=1)}),
        ({}, {"expected": book(anything=[1])}),
    ],
    ids=["further-argument", "required-among-accepted", "open", "no-schema"],
)
def test_what_the_tools_allow_is_none_of_this(tmp_path: Path, schema: dict[str, Any], case: dict[str, Any]) -> None:
    check(tmp_path / "calls", schema, **case)
