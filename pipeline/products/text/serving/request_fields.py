"""Check the fields of a request before it costs anything.

The server decodes greedily. A field that changes no greedy answer is accepted. One that would change it is refused by
name, in the shape of OpenAI's errors. So no request is answered otherwise than it asks.

Not covered: roles and their order, which the chat template judges, and the length of a prompt, which its tokens tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

MAX_CHAT_LOGPROBS = 20
MAX_LOGPROBS = 100

# they change no greedy answer, whatever they say
_ACCEPTED = frozenset(
    {"top_p", "seed", "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
)
# they change none as long as they say this
_NEUTRAL: dict[str, Any] = {
    "temperature": 0,
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "best_of": 1,
    "suffix": "",
}
_COMMON = _ACCEPTED | {"model", "temperature", "n", "frequency_penalty", "presence_penalty", "logit_bias"}
_COMMON |= {"max_tokens", "stop", "stream", "stream_options", "logprobs"}
_EXACT_LENGTH = frozenset({"ignore_eos", "min_tokens"})
CHAT_FIELDS = _COMMON | _EXACT_LENGTH
CHAT_FIELDS |= {"messages", "max_completion_tokens", "top_logprobs", "response_format", "return_token_ids"}
CHAT_FIELDS |= {"tools", "tool_choice", "parallel_tool_calls"}
COMPLETION_FIELDS = _COMMON | _EXACT_LENGTH
COMPLETION_FIELDS |= {"prompt", "echo", "best_of", "suffix", "return_tokens_as_token_ids", "return_token_ids"}


class FieldError(HTTPException):
    """A request that is refused, with what OpenAI's clients read of an error."""

    def __init__(self, field: str, problem: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(status, f"{field}: {problem}")
        self.field, self.code = field, code


@dataclass(frozen=True)
class ChatRequest:
    """What a chat asks for, beside its messages."""

    tools: list[dict[str, Any]]  # empty: none are shown to the model, and no call is read out of its answer
    max_tokens: int | None  # None: as many as the context has room for
    stops: tuple[str, ...]
    streams: bool
    includes_usage: bool  # in a last chunk of a stream
    num_logprobs: int | None  # likely tokens beside each token; None: no log-probabilities
    ignores_end: bool  # decode max_tokens tokens, whatever the model says about the end
    calls_once: bool  # one tool call at most
    returns_token_ids: bool


@dataclass(frozen=True)
class CompletionRequest:
    """What a completion asks for, beside its prompts."""

    max_tokens: int
    stops: tuple[str, ...]
    echoes: bool
    num_logprobs: int | None  # likely tokens at each place; None: no log-probabilities
    names_ids: bool  # tokens are written "token_id:<id>", as vLLM does when asked to
    streams: bool
    includes_usage: bool  # in a last chunk of a stream
    ignores_end: bool  # decode max_tokens tokens, whatever the model says about the end
    returns_token_ids: bool

    @property
    def scores_alone(self) -> bool:
        """Whether it asks as the gate's client does, which wants no generated token."""
        return self.echoes and self.names_ids and self.num_logprobs is not None and self.max_tokens <= 1


def read_chat(body: dict[str, Any]) -> ChatRequest:
    """Read a chat request.

    Raises:
        FieldError: a field is unknown, malformed, or would change a greedy answer.
    """
    asked = _drop_nulls(body, CHAT_FIELDS)
    if not isinstance(asked.get("messages"), list) or not asked["messages"]:
        raise FieldError("messages", "expected at least one message")
    for i, message in enumerate(asked["messages"]):
        _check_message(message, i)
    tools, choice = asked.get("tools", []), asked.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise FieldError("tools", f"expected functions with a name, got {tools!r:.80}")
    if choice not in ("auto", "none"):
        raise FieldError("tool_choice", f"expected 'auto' or 'none', as no call can be forced, got {choice!r:.80}")
    stops, streams = _read_stops(asked), _read_flag(asked, "stream")
    num_logprobs = asked.get("top_logprobs", 0) if _read_flag(asked, "logprobs") else None
    if num_logprobs is None and "top_logprobs" in asked:
        raise FieldError("top_logprobs", "expected logprobs true beside it")
    _check_number("top_logprobs", num_logprobs or 0, 0, MAX_CHAT_LOGPROBS)
    returns_ids = _read_flag(asked, "return_token_ids")
    for name, is_asked in (("logprobs", num_logprobs is not None), ("return_token_ids", returns_ids)):
        if is_asked and (streams or stops):
            raise FieldError(name, f"expected neither stream nor stop beside it, got {'stream' if streams else 'stop'}")
    max_tokens = _read_limit(asked)
    return ChatRequest(
        tools=tools if choice == "auto" else [],
        max_tokens=max_tokens,
        stops=stops,
        streams=streams,
        includes_usage=_read_stream_options(asked),
        num_logprobs=num_logprobs,
        ignores_end=_reads_exact_length(asked, max_tokens),
        calls_once=not _read_flag(asked, "parallel_tool_calls", default=True),
        returns_token_ids=returns_ids,
    )


def read_completion(body: dict[str, Any]) -> CompletionRequest:
    """Read a request to complete or score texts.

    Raises:
        FieldError: a field is unknown, malformed, or would change a greedy answer.
    """
    asked = _drop_nulls(body, COMPLETION_FIELDS)
    stops, num_logprobs, streams = _read_stops(asked), asked.get("logprobs"), _read_flag(asked, "stream")
    if num_logprobs is not None:
        _check_number("logprobs", num_logprobs, 1, MAX_LOGPROBS)
        if stops:
            raise FieldError("logprobs", "expected no stop beside it, got both")
    max_tokens, echoes = asked.get("max_tokens", 16), _read_flag(asked, "echo")  # 16: OpenAI's own
    _check_number("max_tokens", max_tokens, 0 if echoes else 1)
    returns_ids = _read_flag(asked, "return_token_ids")
    beside = {
        "stop": bool(stops),
        "echo": echoes,
        "logprobs": num_logprobs is not None,
        "return_token_ids": returns_ids,
    }
    if streams and (name := next((name for name, is_asked in beside.items() if is_asked), None)):
        raise FieldError(name, "expected no stream beside it, got both; chats have streams with more")
    return CompletionRequest(
        max_tokens,
        stops,
        echoes,
        num_logprobs,
        names_ids=_read_flag(asked, "return_tokens_as_token_ids"),
        streams=streams,
        includes_usage=_read_stream_options(asked),
        ignores_end=_reads_exact_length(asked, max_tokens),
        returns_token_ids=returns_ids,
    )


def _drop_nulls(body: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return the fields that say something; refuse unknown ones, and those that would change a greedy answer."""
    asked = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(asked.keys() - known):
        supported = ", ".join(sorted(known))
        raise FieldError(unknown[0], f"unsupported field; supported: {supported}", code="unsupported_parameter")
    for name in sorted(_NEUTRAL.keys() & asked.keys()):
        if isinstance(asked[name], bool) or asked[name] != _NEUTRAL[name]:
            problem = f"expected {_NEUTRAL[name]!r}, got {asked[name]!r:.80}; this server decodes greedily"
            raise FieldError(name, problem, code="unsupported_value")
    return asked


def _check_message(message: Any, place: int) -> None:
    """Refuse what a template would drop in silence: no content, or parts of it that are no text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise FieldError("messages", f"expected objects with a role, got {message!r:.80} as message {place}")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    parts = content if isinstance(content, list) and content else [content]
    for part in parts:
        if not _is_text(part):
            raise FieldError("messages", f"expected text as content of message {place}, got {part!r:.80}")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _check_number(name: str, value: Any, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        numbers = f"a whole number from {least}" + (f" to {most}" if most is not None else "")
        raise FieldError(name, f"expected {numbers}, got {value!r:.80}")


def _read_flag(asked: dict[str, Any], name: str, *, default: bool = False) -> bool:
    if not isinstance(value := asked.get(name, default), bool):
        raise FieldError(name, f"expected true or false, got {value!r:.80}")
    return value


def _read_limit(asked: dict[str, Any]) -> int | None:
    """Return the number of tokens at most; `max_tokens` is the old name of `max_completion_tokens`."""
    limits = {name: asked[name] for name in ("max_tokens", "max_completion_tokens") if name in asked}
    for name, value in limits.items():
        _check_number(name, value, 1)
    if len(set(limits.values())) > 1:
        raise FieldError("max_completion_tokens", f"expected the number of max_tokens, got {limits!r}")
    return next(iter(limits.values()), None)


def _read_stops(asked: dict[str, Any]) -> tuple[str, ...]:
    """Return the stop strings; more than OpenAI's four do no harm, and lm-eval sends them."""
    value = asked.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise FieldError("stop", f"expected a text or a list of texts, none of them empty, got {value!r:.80}")
    return tuple(stops)


def _read_stream_options(asked: dict[str, Any]) -> bool:
    options = asked.get("stream_options", {})
    is_known = isinstance(options, dict) and not options.keys() - {"include_usage", "include_obfuscation"}
    if not is_known or not isinstance(includes := options.get("include_usage", False), bool):
        raise FieldError("stream_options", f"expected include_usage true or false, got {options!r:.80}")
    return includes


def _reads_exact_length(asked: dict[str, Any], max_tokens: int | None) -> bool:
    """Say whether exactly `max_tokens` tokens are asked for, as `ignore_eos` and `min_tokens` do together."""
    exact = {name: asked[name] for name in sorted(_EXACT_LENGTH & asked.keys())}
    if exact not in ({}, {"ignore_eos": True, "min_tokens": max_tokens}):
        problem = f"expected true and the number of max_tokens ({max_tokens}), or neither field, got {exact!r}"
        raise FieldError("ignore_eos and min_tokens", problem)
    return bool(exact)


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
