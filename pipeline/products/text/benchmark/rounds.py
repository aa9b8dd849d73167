"""The timed rounds: every cell of the grid, both sides in turn, the same prompts in the same round.

The order of the sides changes from round to round, so that no side gains by being first or second. A round goes
through all cells before the next begins. So a machine that slows down for a minute slows down every cell a little,
not one cell for good.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from pipeline.errors import EngineError, UnequalWorkError
from pipeline.products.text.benchmark.audits import (
    check_stream,
    check_text,
    check_work,
    format_change,
    is_evaluated_answer,
)
from pipeline.products.text.benchmark.prompts import Plan, Prompt
from pipeline.products.text.benchmark.streaming import TimedReply, ask
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.engine import Engine
from pipeline.products.text.serving.failures import find_error
from pipeline.records.benchmarks import Batch, Cell
from pipeline.records.speculation import SpeculationCounts, sum_speculation
from pipeline.running.progress import Progress


@dataclass
class Contender:
    """One of the two servers, what it must answer, and what was counted on the way."""

    role: str  # "reference" or "candidate"
    engine: Engine
    client: Client
    http: aiohttp.ClientSession
    expected: Mapping[str, str]  # by name of the prompt: the evaluated first turn
    is_exact: bool  # served so that a batch changes no answer: one that differs from the evaluated one is refused
    has_drafts: bool  # served with speculative decoding
    num_requests: int = 0
    num_changed: int = 0
    speculation: SpeculationCounts | None = None

    async def answer(self, prompts: Sequence[Prompt], *, concurrency: int, num_tokens: int) -> list[TimedReply]:
        """Send prompts, so many in flight, and return the answers in their order."""
        queue = iter(enumerate(prompts))
        replies: dict[int, TimedReply] = {}

        async def work() -> None:
            for number, prompt in queue:
                replies[number] = await ask(
                    self.http,
                    self.engine.base_urls[0],
                    self.engine.model,
                    prompt.content,
                    num_tokens=num_tokens,
                    tools=prompt.tools,
                )

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
        except ExceptionGroup as group:
            if (failed := find_error(group, EngineError)) is None:
                raise
            self.engine.check_alive()  # a server that has died says more in its log
            raise failed from None
        return [replies[number] for number in range(len(prompts))]

    async def time_batch(self, plan: Plan, prompts: Sequence[Prompt], *, num_tokens: int) -> Batch:
        """Send one batch of a cell, time it and audit every answer.

        Raises:
            UnequalWorkError: an answer is not the work that was asked for; names cell and request.
        """
        start = time.perf_counter()
        replies = await self.answer(prompts, concurrency=plan.concurrency, num_tokens=num_tokens)
        seconds = time.perf_counter() - start
        tokens = await self.client.tokenize([r.reply.text for r in replies], add_special_tokens=False)
        for prompt, reply, ids in zip(prompts, replies, tokens, strict=True):
            try:
                check_work(reply, prompt, plan, num_tokens)
                check_text(reply, self.expected[prompt.name], len(ids), prompt)
                self._audit(reply, prompt)
            except UnequalWorkError as error:
                raise UnequalWorkError(f"{self.role}, {plan.name}: {error}") from None
        latency_ms = statistics.median(r.inter_token_latency_ms for r in replies)
        if not latency_ms:
            check_stream([latency_ms], f"{self.role}, {plan.name}")
        return Batch(
            throughput_tokens_per_s=sum(r.reply.num_completion_tokens for r in replies) / seconds,
            ttft_ms=statistics.median(r.ttft_ms for r in replies),
            inter_token_latency_ms=latency_ms,
        )

    def _audit(self, timed: TimedReply, prompt: Prompt) -> None:
        self.num_requests += 1
        self.speculation = sum_speculation((self.speculation, timed.reply.speculation))
        expected = self.expected[prompt.name]
        if not is_evaluated_answer(timed, expected):
            self.num_changed += 1
            if self.is_exact:
                raise UnequalWorkError(f"{prompt.name}: {format_change(timed, expected)}")


async def warm_up(plans: Sequence[Plan], sides: Sequence[Contender], *, num_tokens: int) -> None:
    """Send every cell's first batch, which is not timed."""
    for plan in plans:
        for side in sides:
            await side.answer(plan.warm_up, concurrency=plan.concurrency, num_tokens=num_tokens)


async def run_rounds(
    plans: Sequence[Plan], reference: Contender, candidate: Contender, *, num_tokens: int
) -> list[Cell]:
    """Time every cell round by round, on servers that were warmed up.

    Raises:
        UnequalWorkError: work that is not equal.
        EngineError: a server did not answer.
    """
    timed: list[dict[str, list[Batch]]] = [{reference.role: [], candidate.role: []} for _ in plans]
    num_rounds = len(plans[0].rounds)
    progress = Progress("speed", total=num_rounds, unit="rounds")
    for number in range(num_rounds):
        for plan, batches_by_role in zip(plans, timed, strict=True):
            for side in (reference, candidate) if number % 2 == 0 else (candidate, reference):
                batches_by_role[side.role].append(
                    await side.time_batch(plan, plan.rounds[number], num_tokens=num_tokens)
                )
        progress.advance()
    for plan, batches_by_role in zip(plans, timed, strict=True):
        for role, batches in batches_by_role.items():
            check_stream([batch.inter_token_latency_ms for batch in batches], f"{role}, {plan.name}")
    for side in (reference, candidate):
        if side.has_drafts and not (side.speculation and side.speculation.num_drafted):
            raise UnequalWorkError(f"{side.role}: expected drafted tokens, as it is served with speculation, got none")
    return [
        Cell(
            concurrency=plan.concurrency,
            prompt_tokens=plan.band,
            num_requests=len(plan.warm_up),
            reference=tuple(batches_by_role[reference.role]),
            candidate=tuple(batches_by_role[candidate.role]),
        )
        for plan, batches_by_role in zip(plans, timed, strict=True)
    ]


async def time_repeats(plan: Plan, side: Contender, *, num_tokens: int, first_ms: float) -> float:
    """Send the prompts of a cell's last round once more, and return their TTFT relative to the first time.

    A benchmark that repeats its prompts would have claimed this gain for the server.

    Args:
        plan: of the cell.
        side: the server that has answered them.
        num_tokens: completion tokens of every request.
        first_ms: median TTFT of the first time.
    """
    replies = await side.answer(plan.rounds[-1], concurrency=plan.concurrency, num_tokens=num_tokens)
    return statistics.median(reply.ttft_ms for reply in replies) / first_ms
