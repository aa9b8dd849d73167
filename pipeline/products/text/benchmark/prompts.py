"""The prompts of the benchmark, sorted into bands of length: those of the evals that have the model write texts.

A prompt is used once. Prefix caches answer a repeated one in a fraction of the time, so a benchmark that repeats
its prompts measures the cache. That the evals have asked them before is what `probes` looks into. Lengths are
those that the reference's server counts, template included. An eval that chats gives the first turns of its cases, an
lm-eval task the prompts that were answered in words.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import SettingsError
from pipeline.evalsets.cards import load_evalset
from pipeline.products.text.benchmark.prefix_cache import NUM_PROBES
from pipeline.products.text.chat_templates import has_chat_template
from pipeline.products.text.evals.calls import declare_tools
from pipeline.products.text.evals.generation import Content, Question, count_tokens
from pipeline.products.text.first_turns import format_answer, load_evaluated, read_answered, read_first_turns
from pipeline.products.text.serving.client import Client
from pipeline.products.text.settings import BenchmarkSettings, TextProduct
from pipeline.records.digests import canonical_json
from pipeline.records.evaluations import Evaluation
from pipeline.records.record_files import read_record

MIN_REQUESTS = 4  # of a batch: the time of a lone request says little
_COUNTED_AT_ONCE = 64


@dataclass(frozen=True)
class Prompt:
    """One prompt to send, and which case it is of."""

    eval_name: str
    case_id: str
    content: Content
    tools: list[dict[str, Any]] | None
    num_tokens: int = 0  # as the server counts; 0 until it was asked

    @property
    def name(self) -> str:
        """Eval and case."""
        return f"{self.eval_name}/{self.case_id}"


@dataclass(frozen=True)
class Plan:
    """What is sent in one cell of the grid: a warm-up, then a batch a round, no prompt twice."""

    concurrency: int
    band: tuple[int, int]  # prompt tokens, both ends included
    warm_up: list[Prompt]
    rounds: list[list[Prompt]]

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{self.concurrency} in flight, {self.band[0]} to {self.band[1]} prompt tokens"


@dataclass(frozen=True)
class Grid:
    """What is sent in all cells, and the prompts of each band that show what a server remembers."""

    plans: list[Plan]
    probes: dict[tuple[int, int], list[Prompt]]


def load_prompts(product: TextProduct, root: Path, of_tasks: Iterable[Prompt] = ()) -> list[Prompt]:
    """Return all distinct prompts of the evals, in an order that mixes them and is always the same.

    Args:
        product: the evals.
        root: project root.
        of_tasks: the prompts of lm-eval tasks that are answered in words.
    """
    prompts: dict[str, Prompt] = {}
    for name, settings in product.chat_evals.items():
        evalset = load_evalset(root / settings.evalset)
        tools = declare_tools(evalset.card.tools, settings)
        for case in evalset.cases:
            messages = [message.model_dump() for message in case.messages]
            # two cases may ask the same in different states: as a prompt they are one
            prompts.setdefault(canonical_json([messages, tools]), Prompt(name, case.id, messages, tools))
    for prompt in of_tasks:
        prompts.setdefault(canonical_json([prompt.content, None]), prompt)
    mixed = list(prompts.values())
    random.Random(0).shuffle(mixed)
    return mixed


def read_task_prompts(product: TextProduct, root: Path, evaluated: Path) -> Iterator[Prompt]:
    """Yield the prompts of tasks that were answered in words, as they were sent.

    Args:
        product: the tasks.
        root: project root.
        evaluated: folder of the reference's evaluation, whose records hold them.
    """
    is_plain = not has_chat_template(product, root)
    evaluation = read_record(evaluated / "evaluation.json", Evaluation)
    for name in product.task_evals:
        for record in read_answered(evaluated, evaluation, name):
            content = Question(record.case_id, record.prompt).build_content(is_plain=is_plain)
            yield Prompt(name, record.case_id, content, None)


def read_expected(product: TextProduct, root: Path, folder: Path, evaluation: Evaluation) -> dict[str, str]:
    """Return what a candidate answered when it was evaluated, in the words of `format_reply`, by the prompt's name.

    Raises:
        EvidenceError: the records are not as they were written, or the evalset was edited since.
    """
    expected: dict[str, str] = {}
    for name, settings in product.chat_evals.items():
        turns = read_first_turns(folder, evaluation, name)
        load_evaluated(settings, evaluation.evals[name], root)
        expected |= {f"{name}/{case_id}": text for case_id, text in turns.items()}
    for name in product.task_evals:
        answered = read_answered(folder, evaluation, name)
        expected |= {f"{name}/{record.case_id}": format_answer(record) for record in answered}
    return expected


async def plan_grid(prompts: Sequence[Prompt], client: Client, settings: BenchmarkSettings) -> Grid:
    """Sort prompts into the bands and deal them out to the cells, the warm-up, the rounds and the probes.

    Args:
        prompts: what there is, in the order in which it is to be used.
        client: of the server that counts their tokens. Counting leaves nothing in its prefix cache.
        settings: the grid.

    Raises:
        SettingsError: a band has fewer prompts than its cells need.
    """
    sizes = {concurrency: max(concurrency, MIN_REQUESTS) for concurrency in settings.concurrency}
    needed = (settings.rounds + 1) * sum(sizes.values()) + NUM_PROBES
    bands = [(low, high) for low, high in settings.prompt_tokens]
    prompts_by_band = await _fill_bands(prompts, client, bands, needed)
    plans, probes = [], {}
    for number, band in enumerate(bands):
        if len(prompts_by_band[band]) < needed:
            raise SettingsError(
                f"benchmark.prompt_tokens.{number}: expected {needed} distinct prompts of {band[0]} to "
                f"{band[1]} tokens, so that none is sent twice, found {len(prompts_by_band[band])} in the evals "
                f"that generate text; widen the band, or lower benchmark.concurrency or benchmark.rounds"
            )
        rest = iter(prompts_by_band[band])
        plans += [_plan_cell(concurrency, band, rest, size, settings.rounds) for concurrency, size in sizes.items()]
        probes[band] = list(rest)
    return Grid(plans, probes)


def _plan_cell(concurrency: int, band: tuple[int, int], rest: Iterator[Prompt], size: int, rounds: int) -> Plan:
    warm_up, *timed = [[next(rest) for _ in range(size)] for _ in range(rounds + 1)]
    return Plan(concurrency, band, warm_up, timed)


async def _fill_bands(
    prompts: Sequence[Prompt], client: Client, bands: Sequence[tuple[int, int]], needed: int
) -> dict[tuple[int, int], list[Prompt]]:
    """Count tokens until every band is full, or all prompts were counted."""
    prompts_by_band: dict[tuple[int, int], list[Prompt]] = {band: [] for band in bands}
    for start in range(0, len(prompts), _COUNTED_AT_ONCE):
        if all(len(band) >= needed for band in prompts_by_band.values()):
            break
        some = prompts[start : start + _COUNTED_AT_ONCE]
        sizes = await asyncio.gather(*(count_tokens(client, p.content, tools=p.tools) for p in some))
        for prompt, size in zip(some, sizes, strict=True):
            band = next((band for band in bands if band[0] <= size <= band[1]), None)
            if band is not None and len(prompts_by_band[band]) < needed:
                prompts_by_band[band].append(replace(prompt, num_tokens=size))
    return prompts_by_band
