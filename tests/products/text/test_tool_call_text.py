"""Tool calls as models write them, and as OpenAI's API has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.products.text.serving.chat_template import prepare_messages
from pipeline.products.text.serving.request_fields import FieldError
from pipeline.products.text.serving.tool_call_text import WrittenCall, may_be_calls, read_calls, write_calls

AGENT = '{"name":"order","arguments":{"item":"lamp","n":25}}'
ORDER = WrittenCall("order", '{"item":"lamp","n":25}')


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (AGENT, "", 1),
        (f" {AGENT}\n", "", 1),
        (AGENT.replace("arguments", "parameters"), "", 1),
        (f"{AGENT}; {AGENT}", "", 2),
        (f"<tool_call>\n{AGENT}\n</tool_call>\n<tool_call>{AGENT}</tool_call>", "", 2),
        (f"I order.\n<tool_call>{AGENT}</tool_call>", "I order.", 1),
    ],
    ids=["agent", "spaces", "llama", "two", "hermes", "words-before"],
)
def test_a_call_is_read_in_each_way_of_writing(text: str, content: str, num_calls: int) -> None:
    assert read_calls(text) == (content, [ORDER] * num_calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Done.",
        AGENT[:-1],
        AGENT + " and more",
        '{"answer": 4}',
        '{"name":"order","arguments":"n"}',
        "[1]",
        f"<tool_call>{AGENT}",
        f"<tool_call>{AGENT[:-1]}</tool_call>",
        '{"name":"order","arguments":{"id":"\\ud83d"}}',
        '{"name":"order","arguments":' + '{"a":' * 5000,
        "[" * 5000,
    ],
)
def test_what_is_no_whole_call_stays_text_to_the_letter(text: str) -> None:
    """A half call that were dropped, or JSON that were taken for a call, would be another answer."""
    assert read_calls(text) == (text, [])


@pytest.mark.parametrize("end", range(len(AGENT)))
def test_a_stream_waits_for_what_may_be_a_call(end: int) -> None:
    assert may_be_calls(AGENT[:end]) and may_be_calls(f"<tool_call>{AGENT}"[:end])
    assert not may_be_calls("<b>"[: end + 2])


def prepare(template: str | None, *messages: Any) -> list[dict[str, Any]]:
    return prepare_messages(SimpleNamespace(chat_template=template), messages)


def test_a_template_without_a_place_for_calls_is_given_the_text_that_the_model_wrote() -> None:
    """The shipped agent would be shown an empty turn, and answer something else."""
    _, (call,) = read_calls(AGENT)
    function = {"name": call.name, "arguments": call.arguments}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    assert prepare("{{ message.content }}", turn) == [{"role": "assistant", "content": AGENT}]
    assert prepare("{{ message.tool_calls }}", turn) == [{"role": "assistant", "tool_calls": turn["tool_calls"]}]


def test_nulls_of_a_client_are_no_calls_and_no_text() -> None:
    turn = {"role": "assistant", "content": "Done.", "tool_calls": None, "refusal": None}
    assert prepare("", turn) == prepare("", turn | {"tool_calls": []}) == [{"role": "assistant", "content": "Done."}]


@pytest.mark.parametrize("call", [{}, "x", {"function": {"name": "f", "arguments": "{"}}, {"function": {}}], ids=str)
def test_calls_that_can_not_be_shown_are_refused(call: Any) -> None:
    with pytest.raises(FieldError, match="messages: tool_calls of message 0: "):
        prepare("", {"role": "assistant", "tool_calls": [call]})


def test_arguments_may_be_json_or_an_object() -> None:
    both = [{"function": {"name": "f", "arguments": value}} for value in ('{"a": "é"}', {"a": "é"})]
    assert write_calls(both) == '{"name":"f","arguments":{"a":"é"}}\n{"name":"f","arguments":{"a":"é"}}'
