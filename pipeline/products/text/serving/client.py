"""The one client: everything that talks to an endpoint goes through here, whoever runs the endpoint.

Speaks the OpenAI API (chats, and plain prompts) and vLLM's way of scoring given tokens. Always greedy, always with an
explicit `max_tokens`. Spreads requests over servers, and keeps a conversation on one server so that
its prefix stays cached there.

Not covered: streaming and sampling; when a request is repeated (`sending`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from pipeline.errors import EngineError, IgnoredFieldError, NonsenseError, RequestError
from pipeline.products.text.serving.answers import (
    Reply,
    TokenScores,
    find_ignored,
    read_completion,
    read_json,
    read_models,
    read_reply,
    read_scores,
    read_tokens,
)
from pipeline.products.text.serving.sending import MAX_TRIES, Sender

MAX_SCORE_TOKENS = 8192  # tokens in one score request
MAX_TEXT_CHARS = 500_000  # in one request to tokenise; a server takes about a second, and answers nobody else meanwhile

T = TypeVar("T")


@dataclass
class _Server:
    url: str
    places: asyncio.Semaphore  # one per request in flight
    num_waiting: int = 0  # requests running or waiting for a place
    num_sessions: int = 0
    takes_lists: bool = True  # of texts in /tokenize: our extension, unknown until a server refuses it


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
        max_tries: int = MAX_TRIES,
        max_refusals: int = MAX_TRIES,
        check_alive: Callable[[], None] = lambda: None,
        echo: str | None = None,
        api_key: str | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            base_urls: servers, without the trailing "/v1".
            model: the model name to send.
            concurrency: requests in flight per server.
            timeout_s: of one request.
            max_tries: tries of a request that may succeed later.
            max_refusals: tries of a request when nothing listens there.
            check_alive: raises EngineError when a server is known to be dead; asked after each
                failed attempt.
            echo: what each reply must carry as `system_fingerprint`; None: what the first one carries.
            api_key: sent as a bearer token.
            sleep: how to wait between attempts.
        """
        self.model = model
        self.check_alive = check_alive
        self.echo = echo
        self._sender = Sender(
            timeout_s=timeout_s,
            max_tries=max_tries,
            max_refusals=max_refusals,
            check_alive=check_alive,
            api_key=api_key,
            sleep=sleep,
        )
        self._sessions: dict[str, _Server] = {}
        self._scores: asyncio.Queue[list[_ScoreCall]] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []
        self._servers = [_Server(url.rstrip("/"), asyncio.Semaphore(concurrency)) for url in base_urls]

    async def __aenter__(self) -> Client:
        await self._sender.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        await self._sender.close()

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        max_tokens: int,
        tools: Sequence[dict[str, Any]] | None = None,
        session: str | None = None,
        return_token_ids: bool = False,
    ) -> Reply:
        """Ask for the greedy answer to a conversation.

        Args:
            messages: the conversation, OpenAI style.
            max_tokens: completion tokens at most.
            tools: OpenAI tool declarations, or None.
            session: turns with the same session go to the same server.
            return_token_ids: also ask for the token ids of prompt and answer.

        Raises:
            RequestError: the server refused the request for good.
            EngineError: no answer after all tries, a server that is dead, or that is not the one it was.
            IgnoredFieldError: the answer is longer than was asked for, or another model's.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        if tools:
            body["tools"] = list(tools)
        if return_token_ids:
            body["return_token_ids"] = True
        server = self._pick(session)
        reply = await self._post(server, "/v1/chat/completions", body, read_reply)
        self._check_echo(server, reply.fingerprint)
        return reply

    async def complete(
        self, prompt: str, *, max_tokens: int, stops: Sequence[str] = (), return_token_ids: bool = False
    ) -> Reply:
        """Ask for the greedy continuation of a plain prompt, up to its first stop string.

        Args:
            prompt: the text, to which the server's tokenizer adds its special tokens.
            max_tokens: completion tokens at most.
            stops: texts that end the answer, and are cut off.
            return_token_ids: also ask for the token ids of prompt and answer.

        Raises:
            RequestError, EngineError, IgnoredFieldError: as `chat` does.
        """
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
        if stops:
            body["stop"] = list(stops)
        if return_token_ids:
            body["return_token_ids"] = True
        server = self._pick(None)
        reply = await self._post(server, "/v1/completions", body, read_completion)
        self._check_echo(server, reply.fingerprint)
        return reply

    async def score(self, batch: Sequence[list[int]], *, top_logprobs: int) -> list[TokenScores]:
        """Return log-likelihoods of given tokens, one result per sequence.

        Which sequences share a forward pass may change the last bits of a score, so a call is one request of its own,
        or as few as MAX_SCORE_TOKENS allows: equal calls get equal answers. Neighbours that share a prefix should be
        handed over side by side.

        Args:
            batch: token ids, at least two per sequence.
            top_logprobs: how many of the most likely tokens to report at each place.
        """
        if not self._workers:
            self._workers = [asyncio.create_task(self._score_forever(s)) for s in self._servers for _ in range(2)]
        calls = [_ScoreCall(tokens, top_logprobs) for tokens in batch]
        for request in _cut_requests(calls, lambda call: len(call.tokens), MAX_SCORE_TOKENS):
            self._scores.put_nowait(request)
        try:
            return list(await asyncio.gather(*(call.done for call in calls)))
        finally:
            for call in calls:
                call.done.cancel()

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids that the server's own tokenizer gives for each text."""
        ids: list[list[int]] = []
        for some in _cut_requests(texts, len, MAX_TEXT_CHARS):
            ids += await self._tokenize_together(some, add_special_tokens=add_special_tokens)
        return ids

    async def _tokenize_together(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        server = self._pick(None)
        body = {"model": self.model, "add_special_tokens": add_special_tokens}
        if server.takes_lists:
            together = {**body, "prompt": texts}
            try:
                return await self._post(
                    server, "/tokenize", together, lambda answer, _: read_tokens(answer, len(texts))
                )
            except RequestError:
                server.takes_lists = False
        tasks = [
            self._post(server, "/tokenize", {**body, "prompt": text}, lambda answer, _: read_tokens(answer))
            for text in texts
        ]
        return [ids for (ids,) in await asyncio.gather(*tasks)]

    async def tokenize_chat(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Return the token ids of a conversation as the server's chat template renders it, the answer begun."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        (ids,) = await self._post(self._pick(None), "/tokenize", body, lambda answer, _: read_tokens(answer))
        return ids

    async def list_models(self) -> dict[str, int | None]:
        """Return the models that the first server serves, with the longest context of each where it is stated."""
        return await self._request(self._servers[0], "GET", "/v1/models", None, lambda answer, _: read_models(answer))

    async def get(self, path: str) -> Any:
        """Return the JSON of one GET request to the first server."""
        return await self._request(self._servers[0], "GET", path, None, lambda answer, _: answer)

    async def get_text(self, path: str) -> str:
        """Return the text of one GET request to the first server."""
        return await self._request(
            self._servers[0], "GET", path, None, lambda text, _: text, decode=lambda body: body.decode(errors="replace")
        )

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON of one POST request to the first server."""
        return await self._request(self._servers[0], "POST", path, orjson.dumps(body), lambda answer, _: answer)

    def _check_echo(self, server: _Server, system_fingerprint: str) -> None:
        """Refuse a reply of another server than the one that was asked first, as far as servers say who they are."""
        self.echo = self.echo or system_fingerprint
        if system_fingerprint and system_fingerprint != self.echo:
            raise EngineError(
                f"{server.url}: expected answers of system_fingerprint {self.echo[:20]!r}, got "
                f"{system_fingerprint[:20]!r}: another server, or another model, answers there now; start the right "
                "one and run `dvc repro`"
            )

    def end_session(self, session: str) -> None:
        """Forget which server a conversation was on; call when it is over."""
        if server := self._sessions.pop(session, None):
            server.num_sessions -= 1

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
            calls = await self._scores.get()  # by whichever server is free next
            if not all(call.done.done() for call in calls):
                await self._score_together(server, calls, calls[0].num_top)

    async def _score_together(self, server: _Server, calls: list[_ScoreCall], num_top: int) -> None:
        body = {
            "model": self.model,
            "prompt": [c.tokens for c in calls],
            "echo": True,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": num_top,
            "return_tokens_as_token_ids": True,
        }
        sizes = [len(call.tokens) for call in calls]
        try:
            results = await self._post(
                server, "/v1/completions", body, lambda answer, _: read_scores(answer, sizes, num_top)
            )
        except RequestError as error:
            if len(calls) == 1:
                return _settle(calls, error)
            # one bad sequence must not take its neighbours along
            for call in calls:
                await self._score_together(server, [call], num_top)
        except EngineError as error:
            _settle(calls, error)
        else:
            for call, result in zip(calls, results, strict=True):
                if not call.done.done():
                    call.done.set_result(result)

    async def _post(self, server: _Server, path: str, body: dict[str, Any], read: Callable[[Any, float], T]) -> T:
        def read_obedient(answer: Any, latency_s: float) -> T:
            if problem := find_ignored(body, answer):
                raise IgnoredFieldError(f"{server.url}{path}: {problem}")
            return read(answer, latency_s)

        return await self._request(server, "POST", path, orjson.dumps(body), read_obedient)

    async def _request(
        self,
        server: _Server,
        method: str,
        path: str,
        content: bytes | None,
        read: Callable[[Any, float], T],
        *,
        decode: Callable[[bytes], Any] = read_json,
    ) -> T:
        """Send a request until it succeeds, is refused, or the tries are used up; read (answer, seconds)."""
        server.num_waiting += 1
        try:
            async with server.places:
                answer, latency = await self._sender.send(method, server.url, path, content, decode)
            return read(answer, latency)
        except NonsenseError as error:
            raise EngineError(f"{server.url}{path}: {error}") from None
        finally:
            server.num_waiting -= 1


def _cut_requests(parts: Sequence[T], measure: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yield the parts of each request, in their order: at most `limit` together, or one part."""
    request: list[T] = []
    total = 0
    for part in parts:
        if request and total + measure(part) > limit:
            yield request
            request, total = [], 0
        request.append(part)
        total += measure(part)
    if request:
        yield request


def _settle(calls: list[_ScoreCall], error: EngineError) -> None:
    for call in calls:
        if not call.done.done():
            call.done.set_exception(error)
