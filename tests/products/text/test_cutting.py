"""Answers that are cut while they are generated: stop strings, and tool calls in a stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from transformers.cli.serving.utils import ReasoningText, ToolCall

from pipeline.products.text.serving.cutting import CutQueue, Cutter, collect
from pipeline.products.text.serving.streams import build_piece

CALL = '{"name":"f","arguments":{}}'


class Streamer:
    is_cancelled, total_tokens = False, 9

    def cancel(self) -> None:
        self.is_cancelled = True


def cut(pieces: list[Any], *stops: str, **options: Any) -> tuple[list[Any], Streamer]:
    async def run() -> tuple[list[Any], Streamer]:
        source: asyncio.Queue[Any] = asyncio.Queue()
        streamer = Streamer()
        for piece in (*pieces, None):
            source.put_nowait(piece)
        return await collect(CutQueue(source, streamer, stops, **options)), streamer

    return asyncio.run(run())


@pytest.mark.parametrize("stops", [("bc",), ("ca", "bca"), ("abcabx", "cab"), ("x",), ("aa",)], ids=str)
@pytest.mark.parametrize("text", ["abcabcaab", "aabbcc", "caabca"])
def test_text_ends_before_the_stop_string_that_is_complete_first(text: str, stops: tuple[str, ...]) -> None:
    """Half a stop string that was sent could not be taken back."""
    ends = [i for i in range(1, len(text) + 1) if text[:i].endswith(stops)]
    expected = text
    if ends:
        expected = text[: ends[0] - max(len(s) for s in stops if text[: ends[0]].endswith(s))]
    items, streamer = cut(list(text), *stops)
    assert "".join(items) == expected
    assert streamer.is_cancelled == bool(ends)


@pytest.mark.parametrize(("stop", "num_tokens"), [("bc", 3), ("a", 1), ("x", 9)])
def test_the_tokens_of_an_answer_end_with_the_one_that_completes_a_stop_string(stop: str, num_tokens: int) -> None:
    """The streamer had read nine when the text was looked at."""

    async def run() -> int:
        source: asyncio.Queue[Any] = asyncio.Queue()
        for item in (*(build_piece(text, i + 1) for i, text in enumerate("abcabc")), None):
            source.put_nowait(item)
        queue = CutQueue(source, Streamer(), [stop])
        await collect(queue)
        return queue.total_tokens

    assert asyncio.run(run()) == num_tokens


def test_what_can_not_become_a_stop_string_is_not_held_back() -> None:
    cutter = Cutter(["\n\n", "END"])
    assert [cutter.feed(piece) for piece in ("a", "E", "N", "X", "\n", "b\n", "\nc", "d")] == [
        *("a", "", "", "ENX", "", "\nb", "", "")
    ]
    assert cutter.is_cut


def test_nothing_comes_after_a_stop_string() -> None:
    """Tokens are on their way while generation is being ended."""
    items, _ = cut(["a", "STOP", "b", ReasoningText("c"), ToolCall("f", "{}")], "STOP")
    assert items == ["a"]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_call_in_a_stream_is_one_item_and_no_text(size: int) -> None:
    for text, before in ((CALL, ""), (f"So: <tool_call>{CALL}</tool_call>", "So: ")):
        items, _ = cut([text[i : i + size] for i in range(0, len(text), size)], reads_calls=True)
        assert "".join(i for i in items if isinstance(i, str)) == before
        assert [i for i in items if not isinstance(i, str)] == [ToolCall("f", "{}")]


@pytest.mark.parametrize("text", ["{not a call", "<tool>", "plain < text {", f"<tool_call>{CALL}"])
def test_text_that_is_no_call_is_all_sent(text: str) -> None:
    items, _ = cut(list(text), reads_calls=True)
    assert "".join(items) == text
    assert cut(["So ", "it ", "is"], reads_calls=True)[0] == ["So ", "it ", "is"], "not held to the end"


def test_one_call_at_most_where_that_is_asked() -> None:
    assert cut([f"{CALL}\n{CALL}"], reads_calls=True, calls_once=True)[0] == [ToolCall("f", "{}")]
    assert len(cut([f"{CALL}\n{CALL}"], reads_calls=True)[0]) == 2
    assert cut([ToolCall("a", "{}"), ToolCall("b", "{}")], calls_once=True)[0] == [ToolCall("a", "{}")]
