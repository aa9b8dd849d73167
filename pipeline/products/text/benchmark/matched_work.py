"""Time a candidate against the reference: both served side by side, the same prompts, the same number of tokens.

The two servers are the ones that would ship, one of each, on the same machine; while one is asked the other
waits. Either must be the very endpoint that was evaluated, and answer as it did. Whatever is not equal work
refuses the benchmark: the result then says why and holds no number.

Not covered: speed at another sampling than the deployed one, which is greedy.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

from pipeline.errors import SettingsError, UnequalWorkError
from pipeline.products.text.benchmark.audits import read_gpu_memory_mib, read_peak_memory_mib
from pipeline.products.text.benchmark.prefix_cache import find_prefix_cache_hits
from pipeline.products.text.benchmark.probes import probe, read_text
from pipeline.products.text.benchmark.prompts import (
    Grid,
    Plan,
    load_prompts,
    plan_grid,
    read_expected,
    read_task_prompts,
)
from pipeline.products.text.benchmark.rounds import Contender, run_rounds, time_repeats, warm_up
from pipeline.products.text.benchmark.streaming import DEFINITIONS
from pipeline.products.text.serving.addresses import authorize, strip_address
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.serving.exactness import is_exact
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import TextProduct
from pipeline.records.benchmarks import Benchmark, Cell, Machine, Probe, Side
from pipeline.records.evaluations import Candidate, Evaluation
from pipeline.records.record_files import read_record
from pipeline.running.environment import read_machine

_ROLES = ("reference", "candidate")


async def run_benchmark(name: str, product: TextProduct, *, root: Path, build: Path) -> Benchmark:
    """Benchmark one candidate.

    Args:
        name: of the candidate.
        product: the grid, how to serve, and the evals whose prompts are used.
        root: project root, which paths of checkpoints and evalsets are relative to.
        build: the folder of candidates, evaluations and server logs.

    Returns:
        The rounds as they were timed, or the reason why the work was not equal.

    Raises:
        SettingsError: too few prompts, or one server for both sides.
        EvidenceError: a candidate or an evaluation is missing, or not what was written.
        EngineError: a server did not come up, died or did not answer.
    """
    pair = [read_candidate(build, side, product) for side in (product.reference, name)]
    _check_two_servers(pair)
    benchmark = Benchmark(
        name=name, work=product.benchmark.build_work(), machine=_build_machine(), definitions=DEFINITIONS
    )
    reference, candidate = (
        _serve(side, role, product, root=root, build=build, logs=build / "logs" / name / role)
        for side, role in zip(pair, _ROLES, strict=True)
    )
    try:
        async with reference as (ours, client), candidate as (theirs, _):
            cells, sides = await _measure(ours, theirs, client, product, root=root, build=build, name=name)
    except UnequalWorkError as error:
        return benchmark.model_copy(update={"refusal": str(error)})
    return benchmark.model_copy(update={"cells": tuple(cells), **sides})


async def _measure(
    ours: Contender, theirs: Contender, client: Client, product: TextProduct, *, root: Path, build: Path, name: str
) -> tuple[list[Cell], dict[str, Side]]:
    """Plan, warm up, probe and time; return the cells, and by role what is known of each side."""
    prompts = load_prompts(product, root, read_task_prompts(product, root, build / "evaluations" / product.reference))
    num_tokens = product.benchmark.num_tokens
    grid = await plan_grid(prompts, client, product.benchmark)
    plans, texts = grid.plans, sorted(map(read_text, prompts))
    await warm_up(plans, (ours, theirs), num_tokens=num_tokens)
    probes = {
        side.role: await _probe_side(side, grid, texts, name=name, num_tokens=num_tokens) for side in (ours, theirs)
    }
    cells = await run_rounds(plans, ours, theirs, num_tokens=num_tokens)
    # the longest prompts with the fewest in flight: where a cached prefix shows best
    number = min(range(len(plans)), key=lambda i: (-plans[i].band[0], plans[i].concurrency))
    sides = {
        side.role: await _build_side(
            side,
            plans[number],
            getattr(cells[number], side.role)[-1].ttft_ms,
            probes=probes[side.role],
            num_tokens=num_tokens,
        )
        for side in (ours, theirs)
    }
    return cells, sides


def _check_two_servers(pair: list[Candidate]) -> None:
    url, other = (c.serving.base_url for c in pair)
    if url and other and strip_address(url) == strip_address(other):
        raise SettingsError(
            f"candidates.{pair[1].name}.engine.base_url: expected another server than the "
            f"reference's, which would be sent each prompt twice, got {other!r}"
        )


@contextlib.asynccontextmanager
async def _serve(
    candidate: Candidate, role: str, product: TextProduct, *, root: Path, build: Path, logs: Path
) -> AsyncIterator[tuple[Contender, Client]]:
    """Bring up one side, and check that it is what was evaluated."""
    folder = build / "evaluations" / candidate.name
    evaluation = read_record(folder / "evaluation.json", Evaluation)
    expected = read_expected(product, root, folder, evaluation)
    resources = product.resources.model_copy(update={"num_servers": 1})
    starting = start_engine(
        candidate,
        resources,
        evals=product.evals,
        root=root,
        logs=logs,
        num_engines=len(_ROLES),
        engine_index=_ROLES.index(role),
    )
    async with starting as (engine, client):
        if engine.fingerprint != evaluation.fingerprint:
            raise UnequalWorkError(
                f"{role}: its server has the fingerprint {engine.fingerprint[:12]}, evaluated was "
                f"{evaluation.fingerprint[:12]}; run `dvc repro`"
            )
        is_ours = candidate.serving.engine == "transformers"  # others don't count drafts while they stream
        # a connection for each request: while the other side is timed a server may close one that was kept open
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=resources.request_timeout_s),
            headers=authorize(engine.api_key),
        ) as http:
            contender = Contender(
                role,
                engine,
                client,
                http,
                expected,
                is_exact=is_ours and is_exact(candidate.serving.dtype, engine.facts),
                has_drafts=is_ours and candidate.serving.speculative is not None,
            )
            yield contender, client


async def _probe_side(
    side: Contender, grid: Grid, texts: Sequence[str], *, name: str, num_tokens: int
) -> tuple[Probe, ...]:
    """Find out whether a server knows the prompts, before minutes are spent on timing it."""
    probes = await probe(grid.probes, side, texts, num_tokens=num_tokens)
    if hits := find_prefix_cache_hits(probes, list(grid.probes), role=side.role, name=name):
        raise UnequalWorkError(hits)
    return probes


async def _build_side(
    side: Contender, plan: Plan, first_ms: float, *, probes: tuple[Probe, ...], num_tokens: int
) -> Side:
    pids = [process.popen.pid for process in side.engine.processes]
    return Side(
        fingerprint=side.engine.fingerprint,
        peak_memory_mib=read_peak_memory_mib(pids),
        gpu_memory_mib=read_gpu_memory_mib(pids),
        num_requests=side.num_requests,
        num_changed=side.num_changed,
        speculation=side.speculation,
        probes=probes,
        repeat_ttft_ratio=await time_repeats(plan, side, num_tokens=num_tokens, first_ms=first_ms),
    )


def _build_machine() -> Machine:
    machine = read_machine()
    return Machine(cpu=machine.cpu, num_cores=machine.num_cores, gpus=tuple(gpu.name for gpu in machine.gpus))
