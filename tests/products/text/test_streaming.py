"""One timed request: what counts as a token, as content and as the end of an answer."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import aiohttp
import pytest

from pipeline.errors import EngineError
from pipeline.products.text.benchmark import streaming
from tests.products.text.test_client import Behaviour, FakeServer, answer

CHAT = [{"role": "user", "content": "x"}]


def chunk(content: str | None = None, *, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    text = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": text | delta, "finish_reason": finish}]}


def usage(num_tokens: int, num_prompt: int = 3, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, **more}}


def stream(*events: dict[str, Any] | str) -> Behaviour:
    """Answer with server-sent events, each in a chunk of its own."""

    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n")
        for event in (*events, "[DONE]"):
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    return behave


class Clock:
    """Says 0, 1, 2, ... s: streaming looks at it when it sends, and at each line, of which an event has two."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def perf_counter(self) -> float:
        return float(next(self._ticks))


def ask(behave: Behaviour, *, num_tokens: int = 9, **options: Any) -> tuple[streaming.TimedReply, dict[str, Any]]:
    async def run() -> tuple[streaming.TimedReply, dict[str, Any]]:
        async with FakeServer(behave) as server, aiohttp.ClientSession() as http:
            reply = await streaming.ask(http, server.url, "m", CHAT, num_tokens=num_tokens, **options)
            return reply, server.bodies[0]

    return asyncio.run(run())


def test_tokens_are_those_of_the_usage_and_not_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under speculation a chunk holds several tokens: counted by chunks, drafts would make latency look worse."""
    monkeypatch.setattr(streaming, "time", Clock())
    timed, body = ask(
        stream(chunk("", role="assistant"), chunk("abcd"), chunk("efghi"), chunk(finish="length"), usage(9))
    )
    assert (timed.reply.text, timed.reply.num_completion_tokens) == ("abcdefghi", 9)
    # events arrive at 1, 3, 5, 7, 9 s; the first has a role and no content, the fourth ends the answer
    assert timed.ttft_ms == 3000
    assert timed.inter_token_latency_ms == pytest.approx(1000 * (7 - 3) / 8)
    assert body["temperature"] == 0 and body["ignore_eos"] is True and body["stream_options"] == {"include_usage": True}
    assert body["min_tokens"] == body["max_tokens"] == 9


def test_tokens_without_text_at_the_end_take_their_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A special token decodes to nothing: had its time not counted, ending early would look fast."""
    monkeypatch.setattr(streaming, "time", Clock())
    timed, _ = ask(stream(chunk("ab"), chunk(""), chunk(""), chunk("", finish="length"), usage(4)))
    assert timed.inter_token_latency_ms == pytest.approx(1000 * (7 - 1) / 3)


def test_a_tool_call_in_pieces_is_one_call_and_counts_as_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "time", Clock())
    pieces = [
        {"index": 0, "function": {"name": "order", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"n":'}},
        {"index": 0, "function": {"arguments": "2}"}},
    ]
    timed, body = ask(
        stream(*(chunk(tool_calls=[piece]) for piece in pieces), chunk(finish="tool_calls"), usage(5)),
        tools=[{"type": "function"}],
    )
    assert timed.reply.tool_calls == ({"function": {"name": "order", "arguments": '{"n":2}'}},)
    assert timed.ttft_ms == 1000 and body["tools"] == [{"type": "function"}]


def test_counts_of_speculation_come_along() -> None:
    counts = {
        "method": "prompt_lookup",
        "num_tokens": 2,
        "num_target_forwards": 4,
        "num_completion_tokens": 9,
        "num_drafted": 6,
        "accepted_by_position": [3, 2],
    }
    timed, _ = ask(stream(chunk("ab"), chunk(finish="length"), usage(9, speculation=counts)))
    assert timed.reply.speculation is not None and timed.reply.speculation.num_accepted == 5


@pytest.mark.parametrize(
    ("behave", "said"),
    [
        (
            answer(400, {"error": {"message": "unsupported field 'ignore_eos'"}}),
            "HTTP 400: unsupported field 'ignore_eos'",
        ),
        (stream(chunk("a"), chunk(finish="length")), "expected a chat completion with its usage"),
        (stream(chunk("a"), usage(9)), "an end, got 'a' with 9 tokens, finish_reason None"),
        (stream(chunk(finish="length"), usage(9)), "expected a stream with content"),
        (stream('{"error": "out of memory"}'), "expected a chunk of an answer, got \"{'error': 'out of memory'}\""),
        (stream("oops"), "expected JSON, got 'oops'"),
        (stream(chunk(tool_calls=[{"index": None, "function": {"name": "a"}}])), "expected a chunk of an answer, got "),
        (stream(chunk("a"), chunk(finish="length"), usage(9) | {"usage": [9]}), "expected a chunk of an answer, got "),
    ],
    ids=["refused", "no-usage", "no-end", "no-content", "error-half-way", "no-json", "no-number", "no-counts"],
)
def test_what_is_no_whole_answer_ends_the_benchmark_in_one_line(behave: Behaviour, said: str) -> None:
    with pytest.raises(EngineError) as caught:
        ask(behave)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_stream_that_breaks_off_is_an_error_and_is_not_repeated() -> None:
    async def die(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\ndata: {}")
        writer.close()

    with pytest.raises(EngineError, match="/v1/chat/completions: expected a stream, got "):
        ask(die)
