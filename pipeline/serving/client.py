"""The one client: everything that talks to an endpoint goes through here, whoever runs the endpoint.

Speaks the OpenAI chat API and vLLM's way of scoring given tokens. Always greedy, always with an
explicit `max_tokens`. Spreads requests over servers, keeps a conversation on one server so that
its prefix stays cached there, merges concurrent score calls into one request, waits when a server
says Retry-After, repeats what may succeed later and never repeats what was refused.

Not covered: streaming and sampling.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson

from pipeline.errors import EngineError, RequestError
from pipeline.records import SpeculationCounts

MAX_TRIES = 5
MAX_TIMEOUTS = 2  # a request that ran into the timeout twice will do so again
BASE_BACKOFF_S = 0.5
MAX_BACKOFF_S = 20.0
MAX_RETRY_AFTER_S = 120.0
MAX_SCORE_TOKENS = 8192  # tokens in one score request
_TOKEN_ID = len("token_id:")
_REPEATABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Reply:
    """One chat answer."""

    text: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    latency_s: float  # of the request that succeeded, waiting for a free place not included
    fingerprint: str  # what the server said answered; empty when it said nothing
    speculation: SpeculationCounts | None = None


@dataclass(frozen=True)
class TokenScores:
    """Scores of one sequence of n tokens; row i is about token i + 1 given the tokens before it."""

    token_logprobs: np.ndarray  # float32 [n - 1], nats
    top_ids: np.ndarray  # int32 [n - 1, k]
    top_logprobs: np.ndarray  # float32 [n - 1, k], descending


@dataclass
class _Server:
    url: str
    places: asyncio.Semaphore  # one per request in flight
    num_waiting: int = 0  # requests running or waiting for a place
    num_sessions: int = 0


@dataclass
class _ScoreCall:
    tokens: list[int]
    num_top: int
    done: asyncio.Future[TokenScores] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Client:
    """Talks to one or more servers of the same model. Use as an async context manager."""

    def __init__(
        self,
        base_urls: Sequence[str],
        model: str,
        *,
        concurrency: int,
        timeout_s: float,
        check_alive: Callable[[], None] = lambda: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            base_urls: servers, without the trailing "/v1".
            model: the model name to send.
            concurrency: requests in flight per server.
            timeout_s: of one request.
            check_alive: raises EngineError when a server is known to be dead; asked after each
                failed attempt.
            sleep: how to wait between attempts.
        """
        self.model = model
        self.check_alive = check_alive
        self._sleep = sleep
        self._sessions: dict[str, _Server] = {}
        self._scores: asyncio.Queue[_ScoreCall] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []
        self._servers = [_Server(url.rstrip("/"), asyncio.Semaphore(concurrency)) for url in base_urls]
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Client:
        # `total` also ends an answer that never ends; places limit the connections
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=min(self._timeout_s, 10.0))
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        await self._http.close()

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        max_tokens: int,
        tools: Sequence[dict[str, Any]] | None = None,
        session: str | None = None,
    ) -> Reply:
        """Ask for the greedy answer to a conversation.

        Args:
            messages: the conversation, OpenAI style.
            max_tokens: completion tokens at most.
            tools: OpenAI tool declarations, or None.
            session: turns with the same session go to the same server.

        Raises:
            RequestError: the server refused the request for good.
            EngineError: no answer after all tries, or a server that is dead.
        """
        body: dict[str, Any] = {
            "model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens,
        }  # fmt: skip
        if tools:
            body["tools"] = list(tools)
        answer, latency = await self._post(self._pick(session), "/v1/chat/completions", body)
        try:
            choice, usage = answer["choices"][0], answer["usage"]
            return Reply(
                text=choice["message"].get("content") or "",
                tool_calls=tuple(choice["message"].get("tool_calls") or ()),
                finish_reason=choice["finish_reason"],
                num_prompt_tokens=usage["prompt_tokens"],
                num_completion_tokens=usage["completion_tokens"],
                latency_s=latency,
                fingerprint=answer.get("system_fingerprint") or "",
                speculation=SpeculationCounts(**usage["speculation"]) if usage.get("speculation") else None,
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"expected a chat completion, got {answer!r:.200} ({error!r})") from None

    async def score(self, batch: Sequence[list[int]], *, top_logprobs: int) -> list[TokenScores]:
        """Return log-likelihoods of given tokens, one result per sequence.

        Concurrent calls are merged, in the order they came: neighbours that share a prefix should
        be handed over side by side.

        Args:
            batch: token ids, at least two per sequence.
            top_logprobs: how many of the most likely tokens to report at each place.
        """
        if not self._workers:
            self._workers = [asyncio.create_task(self._score_forever(s)) for s in self._servers for _ in range(2)]
        calls = [_ScoreCall(tokens, top_logprobs) for tokens in batch]
        for call in calls:
            self._scores.put_nowait(call)
        try:
            return list(await asyncio.gather(*(call.done for call in calls)))
        finally:
            for call in calls:
                call.done.cancel()

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids that the server's own tokenizer gives for each text."""
        server = self._pick(None)
        body = {"model": self.model, "add_special_tokens": add_special_tokens}
        try:
            tokens = await self._tokenize(server, texts, body)
            if [type(ids) for ids in tokens] != [list] * len(texts):
                raise ValueError(f"{tokens!r:.80} for {len(texts)} texts")
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{server.url}/tokenize: expected the token ids of each text, got {error!r}") from None
        return tokens

    async def list_models(self) -> dict[str, int | None]:
        """Return the models that the first server serves, with the longest context of each where it says so."""
        answer = await self.get("/v1/models")
        try:
            lengths = {entry["id"]: entry.get("max_model_len") for entry in answer["data"]}
            return {name: length if isinstance(length, int) else None for name, length in lengths.items()}
        except (KeyError, TypeError, AttributeError):
            url = self._servers[0].url
            raise EngineError(f"{url}/v1/models: expected a list of models, got {answer!r:.80}") from None

    async def get(self, path: str) -> Any:
        """Return the JSON of one GET request to the first server."""
        return (await self._request(self._servers[0], "GET", path, None))[0]

    def end_session(self, session: str) -> None:
        """Forget which server a conversation was on; call when it is over."""
        if server := self._sessions.pop(session, None):
            server.num_sessions -= 1

    async def _tokenize(self, server: _Server, texts: Sequence[str], body: dict[str, Any]) -> list[list[int]]:
        try:
            return (await self._post(server, "/tokenize", {**body, "prompt": list(texts)}))[0]["tokens"]
        except RequestError:  # a list of texts is our extension; other servers take one at a time
            tasks = [self._post(server, "/tokenize", {**body, "prompt": text}) for text in texts]
            return [answer["tokens"] for answer, _ in await asyncio.gather(*tasks)]

    def _pick(self, session: str | None) -> _Server:
        if session is not None and session in self._sessions:
            return self._sessions[session]
        server = min(self._servers, key=lambda s: (s.num_waiting + s.num_sessions, s.url))
        if session is not None:
            self._sessions[session] = server
            server.num_sessions += 1
        return server

    async def _score_forever(self, server: _Server) -> None:
        while True:
            calls = [await self._scores.get()]
            total = len(calls[0].tokens)
            # what is queued now goes along; the rest is taken by whichever server is free next
            while not self._scores.empty() and total < MAX_SCORE_TOKENS:
                calls.append(self._scores.get_nowait())
                total += len(calls[-1].tokens)
            calls = [call for call in calls if not call.done.done()]
            for num_top in {call.num_top for call in calls}:
                await self._score_together(server, [c for c in calls if c.num_top == num_top], num_top)

    async def _score_together(self, server: _Server, calls: list[_ScoreCall], num_top: int) -> None:
        body = {
            "model": self.model, "prompt": [c.tokens for c in calls], "echo": True, "max_tokens": 1,
            "temperature": 0, "logprobs": num_top, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        try:
            answer, _ = await self._post(server, "/v1/completions", body)
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            results = [_read_scores(c["logprobs"], len(call.tokens), num_top)
                       for c, call in zip(choices, calls, strict=True)]  # fmt: skip
        except RequestError as error:
            if len(calls) == 1:
                return _settle(calls, error)
            # one bad sequence must not take its neighbours along
            for call in calls:
                await self._score_together(server, [call], num_top)
        except EngineError as error:
            _settle(calls, error)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            _settle(calls, EngineError(f"{server.url}/v1/completions: expected echoed logprobs, got {error!r}"))
        else:
            for call, result in zip(calls, results, strict=True):
                if not call.done.done():
                    call.done.set_result(result)

    async def _post(self, server: _Server, path: str, body: dict[str, Any]) -> tuple[Any, float]:
        return await self._request(server, "POST", path, orjson.dumps(body))

    async def _request(self, server: _Server, method: str, path: str, content: bytes | None) -> tuple[Any, float]:
        """Send a request until it succeeds, is refused, or the tries are used up."""
        server.num_waiting += 1
        try:
            async with server.places:
                return await self._try_repeatedly(server.url + path, method, content)
        finally:
            server.num_waiting -= 1

    async def _try_repeatedly(self, url: str, method: str, content: bytes | None) -> tuple[Any, float]:
        problem, num_timeouts = "", 0
        for attempt in range(MAX_TRIES):
            wait = min(MAX_BACKOFF_S, BASE_BACKOFF_S * 2**attempt) * random.uniform(0.5, 1.0)
            start = time.perf_counter()
            try:
                async with self._http.request(
                    method, url, data=content, headers={"content-type": "application/json"}, allow_redirects=False
                ) as response:
                    body = await response.read()
                if response.status == 200:
                    return orjson.loads(body), time.perf_counter() - start
                problem = f"HTTP {response.status}: {_message(body)}"
                if response.status not in _REPEATABLE:
                    raise RequestError(f"{url}: {problem}")
                wait = _retry_after_s(response.headers.get("retry-after", "")) or wait
            except TimeoutError:
                num_timeouts += 1
                problem = f"no answer within {self._timeout_s:g} s"
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            except orjson.JSONDecodeError as error:
                problem = f"the answer is not JSON: {error}"
            self.check_alive()
            if num_timeouts >= MAX_TIMEOUTS or attempt == MAX_TRIES - 1:
                break
            await self._sleep(wait)
        raise EngineError(f"{url}: {problem} (tried {attempt + 1} times)")


def _settle(calls: list[_ScoreCall], error: EngineError) -> None:
    for call in calls:
        if not call.done.done():
            call.done.set_exception(error)


def _message(body: bytes) -> str:
    try:
        data = orjson.loads(body)
        detail = data.get("error", data.get("detail", data)) if isinstance(data, dict) else data
        text = detail.get("message", detail) if isinstance(detail, dict) else detail
    except ValueError:
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:300]


def _retry_after_s(value: str) -> float | None:
    """Read Retry-After, in seconds or as a date; None when absent or unreadable."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(MAX_RETRY_AFTER_S, max(0.0, seconds))


def _read_scores(logprobs: dict[str, Any], num_tokens: int, num_top: int) -> TokenScores:
    """Read one choice's echoed logprobs; entries past the prompt (a generated token) are dropped."""
    tops = logprobs["top_logprobs"][1:num_tokens]
    token_logprobs = np.array(logprobs["token_logprobs"][1:num_tokens], dtype=np.float32)
    if len(tops) != num_tokens - 1 or token_logprobs.shape != (num_tokens - 1,):
        raise ValueError(f"{len(tops)} entries for {num_tokens} tokens")
    if not np.isfinite(token_logprobs).all():
        raise ValueError("log-probabilities that are not numbers")
    # servers may add the given token to the top list, in front of it: sort, then cut
    rows = [row if len(row) == num_top else dict(sorted(row.items(), key=lambda kv: -kv[1])[:num_top]) for row in tops]
    ids = np.array([[int(name[_TOKEN_ID:]) for name in row] for row in rows], dtype=np.int32)
    values = np.array([list(row.values()) for row in rows], dtype=np.float32)
    order = np.argsort(-values, axis=1, kind="stable")
    return TokenScores(token_logprobs, np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1))
