"""Reading a call out of a reply, and when two calls are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.evalsets.cards import Tool
from pipeline.evalsets.cases import Call
from pipeline.products.text.evals.calls import (
    continue_conversation,
    declare_tools,
    format_reply,
    is_accepted,
    is_exact,
    parse_call,
    same_value,
)
from pipeline.products.text.serving.client import Reply
from pipeline.products.text.settings import ToolCallsEval


def reply(text: str = "", *tool_calls: dict[str, Any]) -> Reply:
    return Reply(
        text=text,
        tool_calls=tool_calls,
        finish_reason="stop",
        num_prompt_tokens=1,
        num_completion_tokens=1,
        latency_s=0.0,
        fingerprint="f",
    )


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}


def call(name: str = "order", **arguments: Any) -> Call:
    return Call(name=name, arguments=arguments)


@pytest.mark.parametrize(
    "given",
    [
        reply('{"name":"order","arguments":{"n":2}}'),
        reply('\n {"arguments": {"n": 2},\n "name": "order"} '),
        reply("", tool_call("order", '{"n": 2}')),
        reply("Let me see.", tool_call("order", '{"n":2}'), tool_call("other", "{}")),
    ],
)
def test_a_call_is_read_from_text_or_from_tool_calls(given: Reply) -> None:
    assert parse_call(given) == call(n=2)


def test_a_call_without_arguments_may_leave_the_text_empty() -> None:
    assert parse_call(reply("", tool_call("finish", ""))) == call("finish")


@pytest.mark.parametrize(
    "given",
    [
        reply(""),
        reply("I would order two lamps."),
        reply('{"name":"order","arguments":{"n":2}'),
        reply('{"name":"order","arguments":{"n":2}} and then some'),
        reply('{"name":"order"}'),
        reply('{"name":"order","arguments":[2]}'),
        reply('{"name":7,"arguments":{}}'),
        reply('{"name":"order","arguments":{},"id":1}'),
        reply("[1, 2]"),
        reply("null"),
        reply("", tool_call("order", "{n: 2}")),
        reply("", tool_call("order", "[2]")),
        reply("", {"id": "call-1"}),
        reply("", {"function": {"name": "order"}}),
        reply('{"name":"account","arguments":{"id":"\\ud83d"}}'),
        reply('{"name":"account","arguments":{"\\ud83d":1}}'),
        reply('{"name":"account","arguments":' + '{"a":' * 100 + "1" + "}" * 101),
        reply('{"name":"account","arguments":' + '{"a":' * 5000),
        reply("[" * 5000),
        reply("", tool_call("order", "[" * 5000)),
        reply("", tool_call("order", '{"id":"\\ud83d"}')),
    ],
)
def test_what_is_no_call_is_none(given: Reply) -> None:
    assert parse_call(given) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (2, 2.0),
        ("a", "a"),
        (None, None),
        (True, True),
        ([], ()),
        ({}, {}),
        ({"a": 1, "b": [1, {"c": 2}]}, {"b": [1.0, {"c": 2}], "a": 1}),
    ],
)
def test_equal_values(first: Any, second: Any) -> None:
    assert same_value(first, second) and same_value(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (2, "2"),
        (2, 3),
        (1, True),
        (0, False),
        (1.0, True),
        ("true", True),
        (None, False),
        (None, 0),
        (None, ""),
        ("a", "A"),
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ([1], 1),
        ([True], [1]),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1, "b": None}),
        ({}, []),
        ({"a": 1}, {"b": 1}),
        (float("nan"), float("nan")),
    ],
)
def test_different_values(first: Any, second: Any) -> None:
    assert not same_value(first, second) and not same_value(second, first)


def test_exact_is_to_the_letter() -> None:
    expected = call(item="lamp", n=2)
    assert is_exact(call(n=2.0, item="lamp"), expected)
    for other in (
        call("buy", item="lamp", n=2),
        call(item="lamps", n=2),
        call(item="lamp", n="2"),
        call(item="lamp"),
        call(item="lamp", n=2, via="post"),
    ):
        assert not is_exact(other, expected)


ACCEPTED: dict[str, tuple[Any, ...]] = {"item": ("lamps",), "via": ("post", None)}


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        (call(item="lamp", n=2), True),
        (call(item="lamps", n=2), True),
        (call(item="lamp", n=2, via="post"), True),  # an argument that only the accepted values name
        (call(item="lamp", n=2, via=None), True),
        (call(item="lamp", n=2, via="rail"), False),
        (call(item="lamp", n=3), False),
        (call(item="lamp", n="2"), False),
        (call(item="lamp", n=True), False),
        (call(item="lamp"), False),  # n is not optional
        (call(n=2), False),  # nor is item: no None among its accepted values
        (call(item="lamp", n=2, colour="red"), False),
        (call("buy", item="lamp", n=2), False),
    ],
)
def test_accepted_takes_further_values_and_none_makes_an_argument_optional(given: Call, is_right: bool) -> None:
    assert is_accepted(given, call(item="lamp", n=2), ACCEPTED) == is_right


def test_accepted_none_lets_an_expected_argument_be_left_out() -> None:
    expected = call(item="lamp", n=1)
    assert is_accepted(call(item="lamp"), expected, {"n": (None,)})
    assert is_accepted(expected, expected, {"n": (None,)})
    assert not is_accepted(call(item="lamp", n=2), expected, {"n": (None,)})


def test_an_expected_null_is_not_the_same_as_leaving_it_out() -> None:
    assert is_accepted(call(cc=None), call(cc=None), {})
    assert not is_accepted(call(), call(cc=None), {})


def test_a_reply_is_one_line() -> None:
    assert format_reply(reply("a\nb")) == "a\\nb"
    assert json.loads(format_reply(reply("", tool_call("order", "{}")))) == {"name": "order", "arguments": "{}"}
    assert format_reply(reply("")) == ""


def test_the_conversation_goes_on_in_the_form_of_the_reply() -> None:
    text = '{"name": "order",\n "arguments": {}}'
    assert continue_conversation(reply(text), "ok") == [
        {"role": "assistant", "content": text},
        {"role": "tool", "content": "ok"},
    ]
    first = tool_call("order", "{}")
    assert continue_conversation(reply("", first, tool_call("other", "{}")), "ok") == [
        {"role": "assistant", "content": "", "tool_calls": [first]},
        {"role": "tool", "tool_call_id": "call-1", "content": "ok"},
    ]


def test_tools_in_the_form_of_a_request() -> None:
    declared = Tool(description="Send.", parameters={"type": "object"})
    function = {"name": "order", "description": "Send.", "parameters": {"type": "object"}}
    sent, unsent = (ToolCallsEval(kind="tool_calls", evalset="e", send_tools=send) for send in (True, False))
    assert declare_tools({"order": declared}, sent) == [{"type": "function", "function": function}]
    assert declare_tools({"order": declared}, unsent) is None
