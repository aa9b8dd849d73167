"""One endpoint of a candidate, which evaluates shards of its cases (`pipeline/running/shards.py`).

Shards that are asked for at once share the endpoint's places: where the last cases of one leave a server idle, those of
another fill it. Once all shards are done, each endpoint answers its part of the canary, as each server of one machine
does, and one of them measures the margins of all answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from pipeline.errors import EvidenceError
from pipeline.product import OpenReplica
from pipeline.products.text.evals.canary import ask_canary
from pipeline.products.text.evals.eval_records import Served, make_context, make_served
from pipeline.products.text.evals.evaluate import can_be_served, evaluate_candidate
from pipeline.products.text.evals.jobs import EvalJob, describe_evals, load_evalsets, pick_canary
from pipeline.products.text.evals.registry import EVALS
from pipeline.products.text.serving.engines.engine import gather
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.settings import TextProduct
from pipeline.records.canary import CanaryPart
from pipeline.records.evaluations import Candidate, format_failures
from pipeline.running.shards import AttemptFolder, Shard

_Work = Callable[[Served], Awaitable[Any]]


@contextlib.contextmanager
def open_replica(candidate: Candidate, product: TextProduct, *, root: Path, build: Path) -> Iterator[OpenReplica]:
    """Yield what asks the cases of shards; its servers start first.

    Args:
        candidate: what stage optimize wrote, with its serving config.
        product: settings.
        root: project root.
        build: folder of the product's results.

    Raises:
        EngineError: the endpoint did not come up or died; what was finished is kept.
        EvidenceError: cases could not be judged; those that could are kept.
    """
    orders: queue.SimpleQueue[tuple[_Work, Future[Any]] | None] = queue.SimpleQueue()
    ready: Future[None] = Future()
    whole = partial(evaluate_candidate, candidate, product, root=root, build=build)

    async def answer(served: Served, work: _Work, done: Future[Any]) -> None:
        try:
            done.set_result(await work(served))
        except Exception as error:
            done.set_exception(error)
        finally:
            done.cancel()  # where the endpoint ends meanwhile; else nothing

    async def serve() -> None:
        at_work: set[asyncio.Task[None]] = set()
        # importing lm-eval takes as long as starting servers does
        describing = pool.submit(describe_evals, product, candidate, load_evalsets(product, root), root)
        logs = build / "logs" / candidate.name
        starting = start_engine(candidate, product.resources, evals=product.evals, root=root, logs=logs)
        async with starting as (engine, client):
            served = make_served(candidate, engine, client, await asyncio.wrap_future(describing))
            ready.set_result(None)
            while (order := await asyncio.to_thread(orders.get)) is not None:
                task = asyncio.create_task(answer(served, *order))
                at_work.add(task)  # the loop itself keeps no task alive
                task.add_done_callback(at_work.discard)

    def ask(work: _Work) -> Any:
        done: Future[Any] = Future()
        orders.put((work, done))
        return done.result()

    async def evaluate(canary: Sequence[CanaryPart], served: Served) -> None:
        await whole(served=replace(served, canary=canary))

    def run(shard: Shard) -> int:
        return int(ask(partial(_run, AttemptFolder(build, candidate.name, shard), shard, root)))

    def prepare(number: int, count: int) -> bytes | None:
        # an attached server may be that of the other replicas, whose requests would be in flight beside those "alone"
        if not can_be_served(candidate, product) or candidate.serving.engine == "openai":
            return None
        part: CanaryPart = ask(partial(_ask_part, product, number, count))
        return part.model_dump_json().encode()

    def finish(prepared: Sequence[bytes]) -> None:
        if can_be_served(candidate, product):
            ask(partial(evaluate, [CanaryPart.model_validate_json(part) for part in prepared]))
        else:
            orders.put(None)
            serving.result()
            uvloop.run(whole())

    with ThreadPoolExecutor(2) as pool:
        serving = pool.submit(uvloop.run, serve())
        if serving in wait([ready, serving], return_when=FIRST_COMPLETED).done:
            serving.result()  # raises what kept it from starting
        try:
            yield OpenReplica(run, finish, prepare)
        finally:
            orders.put(None)
        serving.result()


async def _run(attempt: AttemptFolder, shard: Shard, root: Path, served: Served) -> int:
    """Ask the cases of a shard, evals side by side."""

    async def run(job: EvalJob) -> str:
        with (
            attempt.open_journal(job.name, served.engine.facts, key=job.key) as journal,
            TemporaryDirectory() as unused,  # arrays of all cases are made of what the journal holds of each
        ):
            context = make_context(job, served, journal, root=root, folder=Path(unused))
            problem = format_failures(await EVALS[job.settings.kind](replace(context, shard=shard)))
        return f"{job.name}: {problem}" if problem else ""

    if problems := [problem for problem in await gather(*map(run, served.evals)) if problem]:
        raise EvidenceError(f"{served.candidate.name}: shard {shard}: {'; '.join(problems)}; the judged cases are kept")
    return attempt.finish()


async def _ask_part(product: TextProduct, number: int, count: int, served: Served) -> CanaryPart:
    """Ask one of `count` parts of the canary's prompts; `number` counts from 1."""
    prompts = pick_canary(product, served.evals)
    part = {place: prompts[place] for place in range(number - 1, len(prompts), count)}
    limit = served.candidate.serving.max_tokens
    return await ask_canary(served.engine, served.client, part, product.resources, max_tokens=limit)
