"""Read the answer of a server, and show its start when it is not the answer that was asked for.

A server may send anything: the page of a proxy, another API's JSON, an answer that lacks half of its
keys. Whatever it is becomes a `NonsenseError` that shows the start of it; how Python stumbled over it
helps nobody.

Not covered: sending and repeating, which is the client's.
"""

from __future__ import annotations

import email.utils
import itertools
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from pipeline.errors import NonsenseError
from pipeline.records.speculation import SpeculationCounts

MAX_RETRY_AFTER_S = 120.0
EXCERPT_CHARS = 100
# finish reasons of answers that a server ended before the model did; with none it can't be known
_BROKEN_OFF = ("abort", "error", "content_filter", None)
_UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True)
class Reply:
    """One answer: to a chat, or to a plain prompt."""

    text: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    latency_s: float  # of the request that succeeded, waiting for a free place not included
    fingerprint: str  # of the endpoint that answered, as the server states it; empty when it does not
    speculation: SpeculationCounts | None = None
    token_ids: tuple[int, ...] | None = None  # of the answer, where asked for and offered
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TokenScores:
    """Scores of one sequence of n tokens; row i is about token i + 1 given the tokens before it."""

    token_logprobs: np.ndarray  # float32 [n - 1], nats
    top_ids: np.ndarray  # int32 [n - 1, k]
    top_logprobs: np.ndarray  # float32 [n - 1, k], descending


def read_json(body: bytes) -> Any:
    """Return the JSON of an answer."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise NonsenseError(f"expected JSON, got {_excerpt(body)}") from None


def find_ignored(body: dict[str, Any], answer: Any) -> str | None:
    """Say which field of a request its answer shows to have been ignored; None when it shows none."""
    if not isinstance(answer, dict):
        return None
    if (name := answer.get("model")) is not None and name != body.get("model"):
        return (
            f"expected an answer of model {body.get('model')!r}, got one of {name!r}; the server ignores which "
            "model is asked for: correct its name, or serve that model alone"
        )
    usage = answer.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    # a score request asks for so many tokens after each of its prompts
    prompts = body.get("prompt")
    limit = body.get("max_tokens", 0) * (len(prompts) if isinstance(prompts, list) else 1)
    if limit and isinstance(count, int) and count > limit:
        return (
            f"expected at most {limit} completion tokens, as max_tokens asks, got {count}; the server ignores "
            "max_tokens: use one that obeys it"
        )
    return None


def read_reply(answer: Any, latency_s: float) -> Reply:
    """Read a chat completion."""
    try:
        choice, usage = answer["choices"][0], answer["usage"]
        text = choice["message"].get("content") or ""
        if not isinstance(text, str):
            raise TypeError
        return Reply(
            text=text,
            tool_calls=_read_calls(choice["message"].get("tool_calls")),
            finish_reason=_read_end(choice),
            num_prompt_tokens=operator.index(usage["prompt_tokens"]),
            num_completion_tokens=operator.index(usage["completion_tokens"]),
            latency_s=latency_s,
            fingerprint=answer.get("system_fingerprint") or "",
            speculation=_read_speculation(answer),
            token_ids=_read_ids(choice.get("token_ids")),
            prompt_token_ids=_read_ids(answer.get("prompt_token_ids")),
        )
    except _UNREADABLE:
        raise NonsenseError(f"expected a chat completion with its usage, got {_excerpt(answer)}") from None


def read_completion(answer: Any, latency_s: float) -> Reply:
    """Read the continuation of a plain prompt."""
    try:
        choice, usage = answer["choices"][0], answer["usage"]
        if not isinstance(choice["text"], str):
            raise TypeError
        return Reply(
            text=choice["text"],
            tool_calls=(),
            finish_reason=_read_end(choice),
            num_prompt_tokens=operator.index(usage["prompt_tokens"]),
            num_completion_tokens=operator.index(usage["completion_tokens"]),
            latency_s=latency_s,
            fingerprint=answer.get("system_fingerprint") or "",
            speculation=_read_speculation(answer),
            token_ids=_read_ids(choice.get("token_ids")),
            prompt_token_ids=_read_ids(choice.get("prompt_token_ids")),
        )
    except _UNREADABLE:
        raise NonsenseError(f"expected a completion with its usage, got {_excerpt(answer)}") from None


def _read_calls(calls: Any) -> tuple[dict[str, Any], ...]:
    """Read tool calls. Whether their arguments are JSON is the model's doing; that they are text is the server's."""
    try:
        read = tuple((call, call["function"]["name"], call["function"].get("arguments") or "") for call in calls or ())
        if not all(isinstance(part, str) for _, *parts in read for part in parts):
            raise TypeError
    except _UNREADABLE:
        raise NonsenseError(
            f"expected tool calls with a name and with arguments as text, got {_excerpt(calls)}"
        ) from None
    return tuple(call for call, _, _ in read)


def _read_end(choice: Any) -> Any:
    """Return why an answer ended; refuse one that the server broke off, as half of an answer is no wrong one."""
    if (reason := choice["finish_reason"]) in _BROKEN_OFF:
        raise NonsenseError(
            f"expected an answer that the model ended, got one that the server did ({reason!r}), which begins "
            f"{_excerpt(choice)}"
        )
    return reason


def _read_ids(ids: Any) -> tuple[int, ...] | None:
    return None if ids is None else tuple(int(token) for token in ids)


def _read_speculation(answer: Any) -> SpeculationCounts | None:
    """Read the counts of one request: ours, or vLLM's `per-request-spec-decode-metrics`."""
    usage = answer["usage"]
    if usage.get("speculation"):
        return SpeculationCounts(**usage["speculation"])
    metrics = (answer.get("metrics") or {}).get("speculative_decoding")
    if not metrics:
        return None
    histogram, num_accepted = metrics["acceptance_histogram"], metrics["num_accepted_draft_tokens"]
    return SpeculationCounts(
        method="",  # it does not say
        num_tokens=metrics["num_spec_tokens"],
        # one for the prompt, one for each step with drafts; without drafts each token is a pass of its own
        num_target_forwards=max(metrics["num_spec_steps"] + 1, usage["completion_tokens"] - num_accepted),
        num_completion_tokens=usage["completion_tokens"],
        num_drafted=metrics["num_draft_tokens"],
        accepted_by_position=tuple(sum(histogram[i:]) for i in range(1, len(histogram))),
    )


def read_models(answer: Any) -> dict[str, int | None]:
    """Read the list of models: the longest context of each, in tokens, where the server states it."""
    try:
        lengths = {entry["id"]: entry.get("max_model_len") for entry in answer["data"]}
    except _UNREADABLE:
        raise NonsenseError(f"expected a list of models, got {_excerpt(answer)}") from None
    return {name: length if isinstance(length, int) else None for name, length in lengths.items()}


def read_tokens(answer: Any, num_texts: int | None = None) -> list[list[int]]:
    """Read the token ids of a list of texts, or of one text when it was not sent as a list."""
    try:
        tokens = answer["tokens"] if num_texts is not None else [answer["tokens"]]
        if [type(ids) for ids in tokens] != [list] * (1 if num_texts is None else num_texts):
            raise TypeError
    except _UNREADABLE:
        what = "the text" if num_texts is None else f"each text ({num_texts} sent)"
        raise NonsenseError(f"expected token ids for {what}, got {_excerpt(answer)}") from None
    return tokens


def read_scores(answer: Any, num_tokens: Sequence[int], num_top: int) -> list[TokenScores]:
    """Read the scores of sequences of so many tokens from one completion with echoed prompts."""
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        logprobs_by_choice = [choice.get("logprobs") for choice in choices]
    except _UNREADABLE:
        raise NonsenseError(f"expected echoed logprobs, got {_excerpt(answer)}") from None
    if len(logprobs_by_choice) != len(num_tokens):
        raise NonsenseError(
            f"expected echoed logprobs of each sequence ({len(num_tokens)} sent), got {len(logprobs_by_choice)}"
        )
    return [
        _read_sequence(logprobs, size, num_top) for logprobs, size in zip(logprobs_by_choice, num_tokens, strict=True)
    ]


def read_refusal(body: bytes) -> str:
    """Return a server's own words about a request that it refused, as one line."""
    try:
        data = orjson.loads(body)
        detail = data.get("error", data.get("detail", data)) if isinstance(data, dict) else data
        text = detail.get("message", detail) if isinstance(detail, dict) else detail
    except ValueError:
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:300]


def read_retry_after(value: str) -> float | None:
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


class _Tokens(dict[str, int]):
    """Token ids by their names; a likelihood eval reads a million of them."""

    def __missing__(self, name: str) -> int:
        self[name] = token = int(name[len("token_id:") :])
        return token


_TOKENS = _Tokens()


def _read_sequence(logprobs: Any, num_tokens: int, num_top: int) -> TokenScores:
    """Read one choice's echoed logprobs; entries past the prompt (a generated token) are dropped."""
    expected = f"expected echoed logprobs of {num_tokens} tokens"
    try:
        tops = logprobs["top_logprobs"][1:num_tokens]
        token_logprobs = np.array(logprobs["token_logprobs"][1:num_tokens], dtype=np.float32)
        if len(tops) != num_tokens - 1 or token_logprobs.shape != (num_tokens - 1,):
            raise NonsenseError(f"{expected}, got those of {len(tops) + 1}")
        if not np.isfinite(token_logprobs).all():
            raise NonsenseError(
                f"{expected}, got log-probabilities that are not numbers, as of a model whose logits overflow: look at "
                "its weights, or serve it in another serving.dtype"
            )
        # servers may add the given token to the top list, in front of it: sort, then cut
        rows = [
            row if len(row) == num_top else dict(sorted(row.items(), key=lambda kv: -kv[1])[:num_top]) for row in tops
        ]
        if len(set(map(len, rows))) > 1:
            raise NonsenseError(f"{expected}, got unlike numbers of likely ones")
        flat = itertools.chain.from_iterable
        ids = np.fromiter(map(_TOKENS.__getitem__, flat(rows)), np.int32).reshape(len(rows), -1)
        values = np.fromiter(flat(map(dict.values, rows)), np.float32).reshape(len(rows), -1)
        order = np.argsort(-values, axis=1, kind="stable")
    except _UNREADABLE:
        raise NonsenseError(f"{expected}, got {_excerpt(logprobs)}") from None
    return TokenScores(token_logprobs, np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1))


def _excerpt(answer: Any) -> str:
    """Return the start of an answer, on one line."""
    text = (answer if isinstance(answer, bytes) else orjson.dumps(answer)).decode(errors="replace")
    return repr(" ".join(text.split())[:EXCERPT_CHARS]) if text.strip() else "nothing"
