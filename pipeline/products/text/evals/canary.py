"""The canary: prompts that every candidate answers several ways, so that its paths can be compared.

Each prompt is the first turn of a case, or one of an lm-eval task that is answered in words. All are greedy.
"alone" asks one request at a time, "loaded" asks all at once at the concurrency that is deployed, "again" repeats
that. Several servers share the prompts: each is asked its part, one at a time, then as many at once as it has, which
may be fewer than are deployed. A candidate with drafts is asked first without them, on a server of its own: "plain
alone" and "plain loaded". Where the endpoint gives token ids and scores, each token's margin over the second most
likely one is kept too. A small margin marks a token at risk even where nothing flipped.

What the differences mean is for the gate (`pipeline/products/text/findings/canary.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.errors import RequestError
from pipeline.evalsets.cards import Evalset
from pipeline.evalsets.cases import ToolCallCase, TrajectoryCase, spread
from pipeline.products.text.evals import generation
from pipeline.products.text.evals.calls import declare_tools, format_reply
from pipeline.products.text.evals.generation import Question
from pipeline.products.text.serving.client import Client, Reply
from pipeline.products.text.serving.engines.engine import Engine
from pipeline.products.text.settings import ChatEval, EvalSettings, ResourceSettings
from pipeline.records.canary import CanaryAnswer, CanaryRecord
from pipeline.running.progress import Progress

Answers = dict[str, list[CanaryAnswer]]


@dataclass(frozen=True)
class Prompt:
    """One prompt of the canary."""

    case_id: str  # "<eval>/<case>"
    digest: str
    content: generation.Content
    tools: list[dict[str, Any]] | None = None
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None  # where the task has a limit of its own


def pick_prompts(
    evals: Mapping[str, tuple[EvalSettings, Evalset | None]],
    num_prompts: int,
    *,
    questions: Mapping[str, Sequence[Question]] = {},
    is_plain: bool = False,
) -> list[Prompt]:
    """Return prompts of cases spread evenly over the evals that generate text, as many as asked for where there are.

    Args:
        evals: settings and cases, by name.
        num_prompts: how many.
        questions: of the tasks that have any, by the eval's name.
        is_plain: whether these are sent as they stand.
    """
    sources: list[tuple[Sequence[Any], Callable[[Any], Prompt]]] = []
    for name, (settings, evalset) in evals.items():
        if isinstance(settings, ChatEval) and evalset is not None:
            tools = declare_tools(evalset.card.tools, settings)
            sources.append((evalset.cases, partial(_ask_first_turn, name, tools)))
        elif name in questions:
            sources.append((questions[name], partial(_ask_question, name, is_plain)))
    shares = _share_out(num_prompts, [len(cases) for cases, _ in sources])
    return [build(case) for (cases, build), count in zip(sources, shares, strict=True) for case in spread(cases, count)]


def _ask_first_turn(name: str, tools: list[dict[str, Any]] | None, case: ToolCallCase | TrajectoryCase) -> Prompt:
    return Prompt(f"{name}/{case.id}", case.digest, [m.model_dump() for m in case.messages], tools)


def _ask_question(name: str, is_plain: bool, question: Question) -> Prompt:
    content = question.build_content(is_plain=is_plain)
    return Prompt(f"{name}/{question.case_id}", question.digest, content, None, question.stops, question.max_tokens)


def _share_out(total: int, sizes: Sequence[int]) -> list[int]:
    """Share a number out evenly, to none more than its size: what one can't take goes to the others."""
    shares = [0] * len(sizes)
    while (left := total - sum(shares)) and (takers := [i for i, size in enumerate(sizes) if shares[i] < size]):
        for place, i in enumerate(takers):
            shares[i] = min(sizes[i], shares[i] + left // len(takers) + (place < left % len(takers)))
    return shares


async def ask_canary(
    engine: Engine,
    client: Client,
    prompts: Sequence[Prompt],
    resources: ResourceSettings,
    *,
    max_tokens: int,
    prefix: str,
) -> tuple[Answers, list[Reply]]:
    """Ask all prompts alone, loaded and again.

    Args:
        engine: the endpoint.
        client: of it, at the deployed concurrency.
        prompts: what to ask.
        resources: for a second client, with one request in flight.
        max_tokens: completion tokens a request.
        prefix: put before the name of each run.

    Returns:
        The answers by run, in the order of the prompts; and the replies of "loaded".
    """
    progress = Progress(f"{prefix}canary", total=3 * len(prompts), unit="answers")
    async with engine.connect(resources, concurrency=1) as single:
        alone = await _ask(single, prompts, max_tokens, progress)
    loaded = await _ask(client, prompts, max_tokens, progress)
    again = await _ask(client, prompts, max_tokens, progress)
    runs = {"alone": alone, "loaded": loaded, "again": again}
    return {prefix + name: [_build_answer(reply) for reply in replies] for name, replies in runs.items()}, loaded


async def measure_margins(client: Client, replies: Sequence[Reply]) -> list[tuple[float, ...]]:
    """Return how far each token of an answer is ahead of the second most likely one, in nat; empty where unknown."""
    known = [r for r in replies if r.token_ids and r.prompt_token_ids]
    try:
        scores = await client.score(
            [[*r.prompt_token_ids, *r.token_ids] for r in known if r.prompt_token_ids and r.token_ids], top_logprobs=2
        )
    except RequestError:
        return [() for _ in replies]
    margins = {}
    for reply, score in zip(known, scores, strict=True):
        top = score.top_logprobs[len(reply.prompt_token_ids or ()) - 1 :]
        margins[id(reply)] = tuple(round(float(gap), 6) for gap in top[:, 0] - top[:, 1])
    return [margins.get(id(reply), ()) for reply in replies]


def make_records(
    prompts: Sequence[Prompt], answers: Answers, margins: Mapping[str, Sequence[tuple[float, ...]]]
) -> list[CanaryRecord]:
    """Put the runs of each prompt side by side; `margins` are by the run whose tokens they belong to."""
    return [
        CanaryRecord(
            case_id=prompt.case_id,
            input_digest=prompt.digest,
            answers={run: by_prompt[i] for run, by_prompt in answers.items()},
            margins={run: by_prompt[i] for run, by_prompt in margins.items() if by_prompt[i]},
        )
        for i, prompt in enumerate(prompts)
    ]


def merge_records(first: Sequence[CanaryRecord], second: Sequence[CanaryRecord]) -> list[CanaryRecord]:
    """Put the runs of two servers side by side, prompt by prompt."""
    if not first:
        return list(second)
    return [
        b.model_copy(update={"answers": a.answers | b.answers, "margins": a.margins | b.margins})
        for a, b in zip(first, second, strict=True)
    ]


async def _ask(client: Client, prompts: Sequence[Prompt], max_tokens: int, progress: Progress) -> list[Reply]:
    async def ask(prompt: Prompt) -> Reply:
        limit = min(max_tokens, prompt.max_tokens or max_tokens)
        try:
            reply = await generation.ask(
                client, prompt.content, max_tokens=limit, stops=prompt.stops, tools=prompt.tools, return_token_ids=True
            )
        except RequestError as error:
            raise RequestError(f"canary: case {prompt.case_id!r}: {error}") from error
        progress.advance()
        return reply

    return list(await asyncio.gather(*map(ask, prompts)))


def _build_answer(reply: Reply) -> CanaryAnswer:
    return CanaryAnswer(text=format_reply(reply), token_ids=reply.token_ids)
