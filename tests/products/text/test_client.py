"""The client against a server that misbehaves: what is repeated, what is not, and for how long."""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from pipeline.errors import EngineError, IgnoredFieldError, NonsenseError, RequestError
from pipeline.products.text.serving import sending
from pipeline.products.text.serving.answers import find_ignored, read_scores
from pipeline.products.text.serving.client import MAX_SCORE_TOKENS, MAX_TEXT_CHARS, Client

Behaviour = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
CHAT: dict[str, Any] = {
    "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    "system_fingerprint": "f",
}


class FakeServer:
    """Answers each request with the next behaviour of a script; the last one repeats."""

    def __init__(self, *script: Behaviour) -> None:
        self.script = list(script)
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.heads: list[str] = []  # in small letters

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next((int(h.split(":")[1]) for h in head.split("\r\n") if h.startswith("content-length")), 0)
                body = json.loads(await reader.readexactly(length) or b"{}")
                self.paths.append(head.split()[1])
                self.heads.append(head)
                self.bodies.append(body)
                behave = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                await behave(body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def answer(status: int, value: Any, **headers: str) -> Behaviour:
    async def behave(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        content = json.dumps(value).encode()
        lines = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(content)}\r\n{lines}\r\n".encode() + content)

    return behave


async def hang(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def die_half_way(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{"choices": [')
    await writer.drain()
    writer.close()


async def echo_scores(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    choices = []
    for i, ids in enumerate(body["prompt"]):
        # the given token comes first even when it is not likely, and a generated token follows
        tops = [None, *({f"token_id:{t}": -9.0, "token_id:7": -0.5, "token_id:8": -1.0} for t in [*ids[1:], 99])]
        logprobs = {"token_logprobs": [None, *(-float(t) for t in ids[1:]), -99.0], "top_logprobs": tops}
        choices.append({"index": i, "logprobs": logprobs})
    await answer(200, {"choices": choices[::-1]})(body, writer)


def ask(server: FakeServer, **options: Any) -> tuple[Any, list[float]]:
    """Send one chat; return the reply or the exception, and the waits between attempts."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def run() -> Any:
        settings: dict[str, Any] = {"concurrency": 2, "timeout_s": 5.0, "sleep": sleep} | options
        async with server, Client([server.url], "m", **settings) as client:
            try:
                return await client.chat([{"role": "user", "content": "x"}], max_tokens=7)
            except EngineError as error:
                return error

    return asyncio.run(run()), waits


def test_chat_is_greedy_with_explicit_length() -> None:
    server = FakeServer(answer(200, CHAT))
    reply, waits = ask(server)
    assert (reply.text, reply.num_completion_tokens, reply.fingerprint, waits) == ("yes", 1, "f", [])
    # a server's own defaults (sampling, 1024 tokens) must never decide
    assert server.bodies[0]["temperature"] == 0
    assert server.bodies[0]["max_tokens"] == 7


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_in_seconds_is_waited_exactly(status: int) -> None:
    reply, waits = ask(FakeServer(answer(status, {}, retry_after="3"), answer(200, CHAT)))
    assert reply.text == "yes"
    assert waits == [3.0]


def test_retry_after_as_a_date_is_waited() -> None:
    date = email.utils.formatdate(time.time() + 40, usegmt=True)
    reply, waits = ask(FakeServer(answer(429, {}, retry_after=date), answer(200, CHAT)))
    assert reply.text == "yes"
    assert 37 < waits[0] <= 40


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_refusals_are_not_repeated_and_carry_the_servers_words(status: int) -> None:
    server = FakeServer(answer(status, {"error": {"message": "prompt too long"}}))
    error, waits = ask(server)
    assert isinstance(error, RequestError)
    assert "prompt too long" in str(error) and str(status) in str(error)
    assert len(server.bodies) == 1 and waits == []


def test_server_error_then_success() -> None:
    server = FakeServer(answer(500, {}), die_half_way, answer(200, CHAT))
    reply, waits = ask(server)
    assert reply.text == "yes"
    assert len(server.bodies) == 3
    assert 0 < waits[0] <= sending.BASE_BACKOFF_S < waits[1] * 2  # grows


def test_a_server_that_limits_the_rate_is_asked_until_all_have_had_their_turn() -> None:
    """It takes one request in 20 ms, and 32 are in flight: five tries are not enough for most."""
    free_at = 0.0

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal free_at
        if (now := time.monotonic()) < free_at:
            return await answer(429, {"error": "slow down"}, retry_after="0.02")(body, writer)
        free_at = now + 0.02
        await answer(200, CHAT)(body, writer)

    async def run() -> list[str]:
        async with FakeServer(behave) as server, Client([server.url], "m", concurrency=32, timeout_s=5) as client:
            message = {"role": "user", "content": "x"}
            replies = await asyncio.gather(*(client.chat([message], max_tokens=7) for _ in range(32)))
            return [reply.text for reply in replies]

    assert asyncio.run(run()) == ["yes"] * 32


@pytest.mark.parametrize("status", [520, 522, 524, 529])
def test_what_a_proxy_says_of_a_busy_server_is_asked_again(status: int) -> None:
    reply, waits = ask(FakeServer(answer(status, {}), answer(200, CHAT)))
    assert (reply.text, len(waits)) == ("yes", 1)


@pytest.mark.parametrize("finish_reason", ["abort", "error", "content_filter", None])
def test_an_answer_that_the_server_broke_off_is_not_the_models(finish_reason: str | None) -> None:
    (choice,) = CHAT["choices"]
    error, _ = ask(FakeServer(answer(200, CHAT | {"choices": [choice | {"finish_reason": finish_reason}]})))
    assert isinstance(error, EngineError) and not isinstance(error, RequestError)
    assert f"expected an answer that the model ended, got one that the server did ({finish_reason!r}), " in str(error)


@pytest.mark.parametrize(
    "calls",
    [
        [None],
        ["wait"],
        {"function": {"name": "wait", "arguments": "{}"}},
        [{"function": {"name": None, "arguments": "{}"}}],
        [{"function": {"name": "wait", "arguments": {"minutes": 5}}}],
    ],
    ids=["none", "text", "no-list", "no-name", "object"],
)
def test_tool_calls_of_another_form_are_no_wrong_answer(calls: Any) -> None:
    """A server that sends its arguments as an object would have every call of every case counted as wrong."""
    message = {"content": None, "tool_calls": calls}
    error, _ = ask(FakeServer(answer(200, CHAT | {"choices": [{"message": message, "finish_reason": "tool_calls"}]})))
    assert isinstance(error, EngineError)
    assert "expected tool calls with a name and with arguments as text, got " in str(error)


@pytest.mark.parametrize("count", [None, "1", 1.5])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_a_usage_without_whole_numbers_is_none(name: str, count: Any) -> None:
    """They are added up and compared later on, where nobody would name the server."""
    error, _ = ask(FakeServer(answer(200, CHAT | {"usage": CHAT["usage"] | {name: count}})))
    assert isinstance(error, EngineError) and "expected a chat completion with its usage, got " in str(error)


def test_a_tool_call_without_arguments_is_one() -> None:
    call = {"function": {"name": "wait", "arguments": None}}
    message = {"content": None, "tool_calls": [call]}
    reply, _ = ask(FakeServer(answer(200, CHAT | {"choices": [{"message": message, "finish_reason": "tool_calls"}]})))
    assert reply.tool_calls == (call,)


def test_tries_are_bounded() -> None:
    server = FakeServer(answer(500, {"detail": "boom"}))
    error, waits = ask(server)
    assert not isinstance(error, RequestError)
    assert f"tried {sending.MAX_TRIES} times" in str(error) and "boom" in str(error)
    assert len(server.bodies) == sending.MAX_TRIES


def test_a_hanging_server_costs_two_timeouts() -> None:
    server = FakeServer(hang)
    start = time.monotonic()
    error, _ = ask(server, timeout_s=0.2)
    assert "no answer within 0.2 s" in str(error)
    assert len(server.bodies) == sending.MAX_TIMEOUTS
    assert time.monotonic() - start < 2


def test_nothing_listening_is_tried_as_often_as_was_said() -> None:
    server = FakeServer(answer(200, CHAT))

    async def run() -> tuple[str, int]:
        async with server:
            pass
        waits: list[float] = []

        async def sleep(seconds: float) -> None:
            waits.append(seconds)

        async with Client([server.url], "m", concurrency=1, timeout_s=5, max_refusals=2, sleep=sleep) as client:
            with pytest.raises(EngineError) as caught:
                await client.get("/v1/models")
        return str(caught.value), len(waits)

    message, num_waits = asyncio.run(run())
    assert "no connection: " in message and "(tried 2 times)" in message
    assert num_waits == 1


def test_a_dead_server_ends_the_tries_at_once() -> None:
    def check_alive() -> None:
        raise EngineError("server-0: killed by signal 9")

    server = FakeServer(die_half_way)
    error, waits = ask(server, check_alive=check_alive)
    assert "killed by signal 9" in str(error)
    assert waits == [] and len(server.bodies) == 1


def test_an_answer_that_is_no_completion_is_an_engine_error() -> None:
    error, _ = ask(FakeServer(answer(200, {"choices": []})))
    assert isinstance(error, EngineError)
    assert str(error).endswith("""/completions: expected a chat completion with its usage, got '{"choices":[]}'""")


@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"usage": {"prompt_tokens": 3, "completion_tokens": 8}}],
    ids=["another-model", "longer-than-asked"],
)
def test_an_answer_that_ignores_the_request_is_neither_taken_nor_asked_again(change: dict[str, Any]) -> None:
    server = FakeServer(answer(200, CHAT | change))
    error, waits = ask(server)
    assert isinstance(error, IgnoredFieldError) and "/v1/chat/completions: expected " in str(error)
    assert len(server.bodies) == 1 and waits == []


@pytest.mark.parametrize("change", [{"model": "m"}, {"model": None}, {}], ids=["named", "null", "unnamed"])
def test_an_answer_as_long_as_was_asked_for_is_taken(change: dict[str, Any]) -> None:
    reply, _ = ask(FakeServer(answer(200, CHAT | change | {"usage": {"prompt_tokens": 3, "completion_tokens": 7}})))
    assert reply.num_completion_tokens == 7


def test_scores_of_many_sequences_may_count_a_token_each() -> None:
    """vLLM adds up what it generated after each prompt."""
    body = {"model": "m", "prompt": [[1, 2], [3, 4]], "max_tokens": 1}
    assert find_ignored(body, {"usage": {"completion_tokens": 2}}) is None
    assert "at most 2 completion tokens" in (find_ignored(body, {"usage": {"completion_tokens": 3}}) or "")
    assert find_ignored({"model": "m", "prompt": "text"}, {"tokens": [1]}) is None


def test_turns_of_a_session_stay_on_one_server_and_sessions_spread() -> None:
    async def run() -> list[int]:
        async with FakeServer(answer(200, CHAT)) as a, FakeServer(answer(200, CHAT)) as b:
            async with Client([a.url, b.url], "m", concurrency=4, timeout_s=5) as client:
                for _ in range(3):
                    for name in ("s1", "s2"):
                        await client.chat([{"role": "user", "content": name}], max_tokens=1, session=name)
            return [len({body["messages"][0]["content"] for body in s.bodies}) for s in (a, b)]

    assert asyncio.run(run()) == [1, 1]


def test_no_more_requests_in_flight_than_allowed() -> None:
    running, most = 0, 0

    async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        await answer(200, CHAT)(body, writer)

    async def run() -> None:
        async with FakeServer(slow) as server, Client([server.url], "m", concurrency=3, timeout_s=5) as client:
            await asyncio.gather(*(client.chat([{"role": "user", "content": "x"}], max_tokens=1) for _ in range(12)))

    asyncio.run(run())
    assert most == 3


def test_scores_are_read_from_vllms_form() -> None:
    async def run() -> list[Any]:
        async with FakeServer(echo_scores) as server, Client([server.url], "m", concurrency=2, timeout_s=5) as client:
            return await asyncio.gather(*(client.score([[1, 2, 3], [4, 5 + i]], top_logprobs=2) for i in range(10)))

    first, second = asyncio.run(run())[3]
    np.testing.assert_array_equal(first.token_logprobs, np.array([-2, -3], np.float32))
    np.testing.assert_array_equal(second.token_logprobs, np.array([-8], np.float32))  # results were not mixed up
    # the given token is not among the two best, and the generated one is dropped
    np.testing.assert_array_equal(first.top_ids, [[7, 8], [7, 8]])
    np.testing.assert_array_equal(first.top_logprobs, np.array([[-0.5, -1.0]] * 2, np.float32))


def test_equal_calls_make_equal_requests_whatever_else_is_asked() -> None:
    """Concurrent calls were merged as they came: who shared a forward pass differed, and last bits of scores."""

    async def run(num_others: int) -> list[Any]:
        async with FakeServer(echo_scores) as server, Client([server.url], "m", concurrency=2, timeout_s=5) as client:
            batch = [[1, 2, 3], [4] * MAX_SCORE_TOKENS, [5, 6], [7, 8]]
            others = [client.score([[9, 10 + i]], top_logprobs=2) for i in range(num_others)]
            await asyncio.gather(client.score(batch, top_logprobs=2), *others)
            return [body["prompt"] for body in server.bodies if body["prompt"][0][0] != 9]

    alone = asyncio.run(run(0))
    assert [[len(tokens) for tokens in prompt] for prompt in alone] == [[3], [MAX_SCORE_TOKENS], [2, 2]]
    assert asyncio.run(run(10)) == alone


def test_scores_with_unlike_numbers_of_likely_tokens_are_nonsense() -> None:
    """Four likely tokens of two places would else be read as two of each."""
    logprobs = {
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"token_id:1": -0.5},
            {"token_id:2": -0.5, "token_id:3": -1.0, "token_id:4": -2.0},
        ],
    }
    with pytest.raises(NonsenseError, match="expected echoed logprobs of 3 tokens, got unlike numbers of likely ones"):
        read_scores({"choices": [{"index": 0, "logprobs": logprobs}]}, [3], 3)


def test_a_refused_score_reaches_its_caller_and_the_next_call_works() -> None:
    async def run() -> int:
        server = FakeServer(answer(400, {"error": {"message": "too long"}}), echo_scores)
        async with server, Client([server.url], "m", concurrency=2, timeout_s=5) as client:
            with pytest.raises(RequestError, match="too long"):
                await client.score([[1, 2]], top_logprobs=2)
            return len(await client.score([[1, 2]], top_logprobs=2))

    assert asyncio.run(run()) == 1


def test_many_texts_are_tokenised_by_several_requests() -> None:
    """100 MB of documents in one request kept a server from answering anybody until it timed out."""
    texts = [str(i) * 100_000 for i in range(10)] + ["9" * 2_000_000, "", "8"]

    async def count(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await answer(200, {"tokens": [[len(text)] for text in body["prompt"]]})(body, writer)

    async def run() -> None:
        async with FakeServer(count) as server, Client([server.url], "m", concurrency=2, timeout_s=5) as client:
            assert await client.tokenize(texts) == [[len(text)] for text in texts]
            sizes = [sum(map(len, body["prompt"])) for body in server.bodies]
            assert max(sizes) == 2_000_000 and sorted(sizes)[-2] <= MAX_TEXT_CHARS and len(sizes) <= 5
            assert await client.tokenize([]) == []

    asyncio.run(run())


def test_a_tokenizer_that_takes_one_text_at_a_time_is_remembered() -> None:
    async def one(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if isinstance(body["prompt"], list):
            await answer(422, {"detail": "prompt: expected a string"})(body, writer)
        else:
            await answer(200, {"tokens": [len(body["prompt"])]})(body, writer)

    async def run() -> list[Any]:
        async with FakeServer(one) as server, Client([server.url], "m", concurrency=2, timeout_s=5) as client:
            assert await client.tokenize(["a", "bb"]) == [[1], [2]]
            assert await client.tokenize(["ccc"]) == [[3]]
        return [body["prompt"] for body in server.bodies]

    lists = [prompt for prompt in asyncio.run(run()) if isinstance(prompt, list)]
    assert lists == [["a", "bb"]]  # a list was sent once, and never again


def test_one_refused_sequence_does_not_fail_the_calls_merged_with_it() -> None:
    async def picky(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        bad = any(ids == [1, 666] for ids in body["prompt"])
        await (answer(400, {"error": "bad token"}) if bad else echo_scores)(body, writer)

    async def run() -> list[Any]:
        async with FakeServer(picky) as server, Client([server.url], "m", concurrency=2, timeout_s=5) as client:
            calls = (client.score([[1, last]], top_logprobs=2) for last in (2, 666, 3))
            return await asyncio.gather(*calls, return_exceptions=True)

    good, refused, also_good = asyncio.run(run())
    assert isinstance(refused, RequestError)
    assert good[0].token_logprobs[0] == -2 and also_good[0].token_logprobs[0] == -3
