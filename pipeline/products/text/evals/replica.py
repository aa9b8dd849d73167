"""One endpoint of a candidate, which evaluates shards of its cases one after another (`pipeline/running/shards.py`).

Not covered: the canary, which asks one endpoint the same prompts several ways. The stage does so, once all shards are
done.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.errors import EvidenceError
from pipeline.products.text.evals.evaluate import make_context
from pipeline.products.text.evals.jobs import EvalJob, describe_evals, load_evalsets
from pipeline.products.text.evals.registry import EVALS
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.engine import Engine
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.settings import TextProduct
from pipeline.records.evaluations import Candidate, format_failures
from pipeline.running.shards import AttemptFolder, Shard

_Order = tuple[Shard, "Future[int]"]


@contextlib.contextmanager
def open_replica(
    candidate: Candidate, product: TextProduct, *, root: Path, build: Path
) -> Iterator[Callable[[Shard], int]]:
    """Yield a function that asks the cases of a shard and returns the number of entries; its servers start first.

    Args:
        candidate: what stage optimize wrote, with its serving config.
        product: settings.
        root: project root.
        build: folder of the product's results.

    Raises:
        EngineError: the endpoint did not come up or died; what was finished is kept.
        EvidenceError: cases could not be judged; those that could are kept.
    """
    orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
    ready: Future[None] = Future()

    async def serve() -> None:
        jobs = describe_evals(product, candidate, load_evalsets(product, root), root)
        logs = build / "logs" / candidate.name
        async with start_engine(candidate, product.resources, evals=product.evals, root=root, logs=logs) as served:
            ready.set_result(None)
            while (order := await asyncio.to_thread(orders.get)) is not None:
                shard, done = order
                try:
                    attempt = AttemptFolder(build, candidate.name, shard)
                    done.set_result(await _run(jobs, candidate, *served, attempt, shard, root))
                except Exception as error:
                    done.set_exception(error)

    def run(shard: Shard) -> int:
        done: Future[int] = Future()
        orders.put((shard, done))
        return done.result()

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(asyncio.run, serve())
        if serving in wait([ready, serving], return_when=FIRST_COMPLETED).done:
            serving.result()  # raises what kept it from starting
        try:
            yield run
        finally:
            orders.put(None)
        serving.result()


async def _run(
    jobs: list[EvalJob],
    candidate: Candidate,
    engine: Engine,
    client: Client,
    attempt: AttemptFolder,
    shard: Shard,
    root: Path,
) -> int:
    """Ask the cases of a shard, eval by eval."""
    for job in jobs:
        with (
            attempt.open_journal(job.name, engine.facts, key=job.key) as journal,
            TemporaryDirectory() as unused,  # arrays of all cases are made of what the journal holds of each
        ):
            context = make_context(job, candidate, engine, client, journal, root, Path(unused))
            records = await EVALS[job.settings.kind](replace(context, shard=shard))
        if problem := format_failures(records):
            raise EvidenceError(f"{candidate.name}: shard {shard}: {job.name}: {problem}; the judged cases are kept")
    return attempt.finish()
