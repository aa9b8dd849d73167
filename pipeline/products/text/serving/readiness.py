"""Find out before the first case whether an endpoint can answer every kind of request that the evals will send.

An eval that needs something which the endpoint lacks would fail case after case, hours into a run. So
one small request of each kind that the evals will send goes out first, and none of a kind that they
will not: a server without log-probabilities is good enough for evals that only chat.

A server may also take a request and ignore a part of it. Where the answers show it, it is refused
here and by the client. An answer is too long, or another model's; tools cost no prompt token; the same
request is answered in two ways.

Not covered: whether the answers are right; a server that samples so seldom that it is not seen here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pipeline.errors import EngineError, IgnoredFieldError
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.vllm_config import SCORE_TOKENS
from pipeline.products.text.settings import ChatEval, EvalSettings

PROBE_TOKENS = 32  # of each of two answers that must agree
# many continuations are about as likely: a server that samples hardly says the same twice
_QUESTION = [{"role": "user", "content": "Write down eight words at random."}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "wait",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True)
class _Need:
    """Something that evals ask of an endpoint, and what would give it."""

    what: str
    remedy: str
    ask: Callable[[Client], Awaitable[object]]


async def _ask_for_scores(client: Client) -> None:
    await client.tokenize(["a"])
    await client.score([[0, 1, 2]], top_logprobs=1)


async def _ask_with_tools(client: Client) -> None:
    replies = [await client.chat(_QUESTION, max_tokens=1, tools=tools) for tools in ([_TOOL], None)]
    shown, plain = (reply.num_prompt_tokens for reply in replies)
    if shown == plain > 0:  # 0: a server that does not count them
        raise IgnoredFieldError(
            f"a request took {plain} prompt tokens with a tool and without; the server or its chat "
            "template ignores tools: use a template that shows them to the model, or set "
            "send_tools to false"
        )


_SCORES = _Need(
    "the log-probabilities of given tokens (/tokenize, and /v1/completions with echo and logprobs)",
    "vLLM",
    _ask_for_scores,
)
_CHAT = _Need("chat answers (/v1/chat/completions)", "a chat template", lambda c: c.chat(_QUESTION, max_tokens=1))
_TOOLS = _Need(
    "chat answers to requests with tools, as its send_tools is set (/v1/chat/completions)",
    "automatic tool choice, set send_tools to false",
    _ask_with_tools,
)


async def probe(client: Client, evals: Mapping[str, EvalSettings], *, attached_as: str | None = None) -> None:
    """Send a small request of each kind that the evals will send: ready means that they were answered as asked.

    Args:
        client: of the endpoint.
        evals: what will be run, by name.
        attached_as: the name of the candidate whose settings name the endpoint; None for our own server.

    Raises:
        EngineError: the endpoint does not give what an eval needs; names the first such eval.
        IgnoredFieldError: it answers, and ignores what was asked.
    """
    needs: dict[_Need, str] = {}
    for name, settings in evals.items():
        needs.setdefault(_find_need(settings), name)
    for need, name in needs.items():
        try:
            await need.ask(client)
        except IgnoredFieldError as error:
            raise IgnoredFieldError(f"evals.{name}: {error}") from error
        except EngineError as error:
            client.check_alive()  # a server that has died lacks nothing in particular
            remedy = (
                f"; if the server can't give that, serve candidates.{attached_as}.engine with {need.remedy}, "
                "or remove the eval"
                if attached_as
                else ""
            )
            raise EngineError(f"evals.{name}: {evals[name].kind} needs {need.what}, got: {error}{remedy}") from error
    chatting = next((name for need, name in needs.items() if need is not _SCORES), None)
    if chatting and attached_as:  # our own server proves it before it takes requests
        await _check_greedy(client, chatting)


async def _check_greedy(client: Client, name: str) -> None:
    # what was asked before has filled the server's cache of prompts: these two are computed alike
    first, second = [(await client.chat(_QUESTION, max_tokens=PROBE_TOKENS)).text for _ in range(2)]
    if first != second:
        raise IgnoredFieldError(
            f"evals.{name}: expected one answer to one request, got {first[:60]!r}, then "
            f"{second[:60]!r}; the server samples as if it ignored temperature 0, or others keep "
            "it busy: have it decode greedily, and to itself"
        )


def check_context(context_length: int, longest: int | None, evals: Mapping[str, EvalSettings], *, where: str) -> None:
    """Refuse a context that a server can't hold; a server that does not state its own is not checked.

    Args:
        context_length: tokens, of the settings.
        longest: `max_model_len` of the server, tokens.
        evals: what will be run, by name.
        where: the server.
    """
    extra = SCORE_TOKENS if needs_scores(evals) else 0
    if longest is None or context_length + extra <= longest:
        return
    why = f", and a score request takes {extra} tokens more" if extra else ""
    raise EngineError(
        f"serving.context_length: expected at most {longest - extra}, as {where} has max_model_len "
        f"{longest}{why}, got {context_length}; set it to {longest - extra}, or start the server with "
        f"--max-model-len {context_length + extra}"
    )


def needs_scores(evals: Mapping[str, EvalSettings]) -> bool:
    """Say whether some eval asks for the log-probabilities of given tokens."""
    return any(settings.needs_logprobs for settings in evals.values())


def _find_need(settings: EvalSettings) -> _Need:
    if settings.needs_logprobs:
        return _SCORES
    return _TOOLS if isinstance(settings, ChatEval) and settings.send_tools else _CHAT
