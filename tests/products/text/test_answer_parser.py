"""Answers in tags, as Qwen 3.5 writes them: arguments by the schema of their tool, and calls that were cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.cli.serving.utils import ToolCall, response_events_to_chunks

from pipeline.products.text.serving.answer_parser import AnswerParser

TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>\s*(?P<value>.*?)\s*</\w+>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}
PROPERTIES = {"minutes": {"type": "integer"}, "why": {"type": "string"}}
WAIT = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": PROPERTIES}}}
CALL = "<call><function=wait><minutes>5</minutes><why>7</why></function></call>"


def read(text: str, *, by_pieces: bool, tools: list[dict[str, Any]]) -> list[Any]:
    end = SimpleNamespace(content="<end>", special=True)
    tokenizer = SimpleNamespace(added_tokens_decoder={0: end}, decode=lambda ids: "<assistant>")
    parser = AnswerParser(TEMPLATE, tokenizer, [0], tools)
    if not by_pieces:
        return parser.read(text)
    items = [item for piece in text for item in response_events_to_chunks(parser.feed(piece))]
    return items + response_events_to_chunks(parser.finalize()[1])


@pytest.mark.parametrize("by_pieces", [False, True], ids=["whole", "by-pieces"])
def test_arguments_in_tags_have_the_types_of_the_tools_schema(by_pieces: bool) -> None:
    """Each was a text, so that no call with a number was ever the expected one."""
    assert read(CALL, by_pieces=by_pieces, tools=[WAIT]) == [ToolCall("wait", '{"minutes": 5, "why": "7"}')]
    assert read(CALL, by_pieces=by_pieces, tools=[]) == [ToolCall("wait", '{"minutes": "5", "why": "7"}')]


@pytest.mark.parametrize("by_pieces", [False, True], ids=["whole", "by-pieces"])
def test_a_call_in_tags_that_was_cut_is_text(by_pieces: bool) -> None:
    """It was a call without the arguments that were still to come."""
    cut = CALL[: CALL.index("<why>")]
    items = read(f"Well. {CALL}{cut}<end>", by_pieces=by_pieces, tools=[WAIT])
    assert [item for item in items if isinstance(item, ToolCall)] == [ToolCall("wait", '{"minutes": 5, "why": "7"}')]
    assert "".join(item for item in items if isinstance(item, str)) == f"Well. {cut}"
