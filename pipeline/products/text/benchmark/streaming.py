"""One timed request, a chat or a plain prompt, over the OpenAI stream that vLLM and the embedded server speak.

Numbers of tokens come from the server's usage, never from counting chunks. Under speculation one
chunk carries several tokens, and a token that completes no character may have none. Nothing is repeated: a second
try would time a prompt that the server has seen.

Not covered: sampling, and reading an answer that need not be timed, which is the client's work.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from pipeline.errors import EngineError, NonsenseError
from pipeline.products.text.evals.generation import Content
from pipeline.products.text.serving.answers import Reply, read_json, read_refusal, read_reply

DEFINITIONS = (
    "TTFT is the time from sending a request to the first chunk with content. Inter-token latency is, for each "
    "request, the time from that chunk to the one that ends the answer, divided by its completion tokens less one; "
    "tokens are those of the server's usage, not chunks. Where drafts are accepted the first chunk may hold several "
    "tokens, which flatters both; throughput has no such doubt. Answers go on past their end to the fixed length, "
    "where drafts are accepted less often than in the evals."
)
_CONTENT = ("content", "reasoning", "reasoning_content", "tool_calls")


@dataclass(frozen=True)
class TimedReply:
    """One answer, and how long its parts took."""

    reply: Reply
    ttft_ms: float
    inter_token_latency_ms: float


@dataclass
class _Stream:
    """What has come of one answer: its parts, and when the first content and the end were there."""

    text: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    first_s: float | None = None
    last_s: float = 0.0

    def add(self, event: Any, arrival_s: float) -> None:
        """Take one event; anything that is no chunk of an answer is refused."""
        try:
            self.usage = dict(event.get("usage") or self.usage)
            self.fingerprint = event.get("system_fingerprint") or self.fingerprint
            for choice in event["choices"]:
                self._add_choice(choice, arrival_s)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise NonsenseError(f"expected a chunk of an answer, got {str(event)[:100]!r}") from None

    def _add_choice(self, choice: dict[str, Any], arrival_s: float) -> None:
        delta = choice.get("delta") or {"content": choice.get("text")}  # of a plain prompt
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            parts = self.calls.setdefault(operator.index(call.get("index", 0)), {"name": "", "arguments": ""})
            for name in parts:
                parts[name] += call.get("function", {}).get(name) or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if any(delta.get(name) for name in _CONTENT):
            self.first_s = self.first_s or arrival_s
            self.last_s = arrival_s
        elif choice.get("finish_reason"):
            self.last_s = arrival_s

    def finish(self, start_s: float) -> TimedReply:
        """Return the whole answer with its times."""
        claimed = self.usage.get("completion_tokens")
        is_whole = self.first_s is not None and self.finish_reason is not None
        if self.usage and not (is_whole and isinstance(claimed, int) and claimed >= 2):
            raise NonsenseError(
                "expected a stream with content, two tokens or more and an end, got "
                f"{self.text[:60]!r} with {claimed!r} tokens, finish_reason "
                f"{self.finish_reason!r}"
            )
        calls = [{"function": parts} for _, parts in sorted(self.calls.items())]
        message = {"content": self.text, "tool_calls": calls}
        reply = read_reply(
            {
                "choices": [{"message": message, "finish_reason": self.finish_reason}],
                "usage": self.usage,
                "system_fingerprint": self.fingerprint,
            },
            self.last_s - start_s,
        )
        assert self.first_s is not None  # of an answer with a usage, and others are refused
        num_tokens = reply.num_completion_tokens
        per_token_s = (self.last_s - self.first_s) / (num_tokens - 1)
        return TimedReply(reply, 1000 * (self.first_s - start_s), 1000 * per_token_s)


async def ask(
    http: aiohttp.ClientSession,
    base_url: str,
    model: str,
    content: Content,
    *,
    num_tokens: int,
    tools: Sequence[dict[str, Any]] | None = None,
) -> TimedReply:
    """Ask once for a greedy answer of exactly so many tokens, and time it.

    Args:
        http: the connections; its timeout is the request's.
        base_url: of the server, without "/v1".
        model: the name to send.
        content: the prompt: a text, or a conversation in OpenAI's style.
        num_tokens: completion tokens to decode, whatever the model says about the end.
        tools: OpenAI tool declarations, or None.

    Raises:
        EngineError: no whole answer came.
    """
    body: dict[str, Any] = {
        "model": model,
        **({"prompt": content} if isinstance(content, str) else {"messages": content}),
        "temperature": 0,
        "max_tokens": num_tokens,
        "min_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if tools:
        body["tools"] = list(tools)
    url = f"{base_url}/v1/{'' if isinstance(content, str) else 'chat/'}completions"
    try:
        return await _read(http, url, orjson.dumps(body))
    except NonsenseError as error:
        raise EngineError(f"{url}: {error}") from None
    except TimeoutError:
        raise EngineError(
            f"{url}: no whole answer within {http.timeout.total:g} s, which is resources.request_timeout_s"
        ) from None
    except (aiohttp.ClientError, ValueError) as error:  # ValueError: a line beyond aiohttp's limit
        raise EngineError(f"{url}: expected a stream, got {' '.join(str(error).split())[:200]}") from None


async def _read(http: aiohttp.ClientSession, url: str, content: bytes) -> TimedReply:
    stream, start_s = _Stream(), time.perf_counter()
    async with http.post(url, data=content, headers={"content-type": "application/json"}) as response:
        if response.status != 200:
            raise NonsenseError(f"HTTP {response.status}: {read_refusal(await response.read())}")
        async for line in response.content:
            arrival_s = time.perf_counter()
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                stream.add(read_json(data), arrival_s)
    return stream.finish(start_s)
