"""Evaluate one candidate through its endpoint and write the evaluation folder.

The endpoint starts while its evals are described; then it answers them (`eval_records.py`) and the canary. All is
written to a temporary folder. It takes the place of the old one when every case of every eval has been judged. Then a
copy of the folder takes the place of the journal, for the next run to take evals over from. DVC removes the folder
itself before each run.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pipeline.gate.harm_stop import HarmWatch
from pipeline.products.text.evals.canary import (
    ask_canary,
    join_parts,
    measure_margins,
    merge_records,
    write_canary,
)
from pipeline.products.text.evals.canary_prompts import Prompt
from pipeline.products.text.evals.eval_records import Paths, Served, collect_records, make_served
from pipeline.products.text.evals.jobs import EvalJob, describe_evals, load_evalsets, pick_canary
from pipeline.products.text.evals.trace import trace_engine
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.serving.vllm_config import counts_by_request
from pipeline.products.text.serving.vllm_facts import read_drafts
from pipeline.products.text.settings import TextProduct
from pipeline.records.canary import CanaryRecord
from pipeline.records.digests import digest_file, digest_text
from pipeline.records.evaluations import (
    Candidate,
    EvalFile,
    Evaluation,
)
from pipeline.records.files import link_or_copy, replace_folder, write_text
from pipeline.records.record_files import write_record
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculationCounts, sum_speculation
from pipeline.running.journal import lock_candidate
from pipeline.running.shards import find_shards
from pipeline.running.tracing import TRACES, tolerate_failure


async def evaluate_candidate(
    candidate: Candidate,
    product: TextProduct,
    *,
    root: Path,
    build: Path,
    watches: Mapping[str, HarmWatch] | None = None,
    served: Served | None = None,
) -> Evaluation:
    """Evaluate one candidate and write `evaluations/<name>/` under `build`.

    Args:
        candidate: what the optimize stage wrote.
        product: the evals to run and how to serve.
        root: project root, which paths of checkpoint and evalsets are relative to.
        build: folder for the evaluation, its journal and the server logs.
        watches: by eval, what may end it early.
        served: the candidate's endpoint where it runs already (`can_be_served`); it goes on running.

    Raises:
        HarmFound: a watch has seen enough; what was finished is journaled.
        EngineError: the endpoint did not come up or died; what was finished is journaled.
        EvidenceError: cases could not be judged; those that could are journaled.
        JournalError: another process evaluates the candidate.
    """
    with lock_candidate(build, candidate.name), ThreadPoolExecutor(1) as pool:
        return await _evaluate(candidate, product, watches or {}, pool, served, root=root, build=build)


def can_be_served(candidate: Candidate, product: TextProduct) -> bool:
    """Tell whether one endpoint is enough, started like any: drafts are compared with none, a trace is asked ahead."""
    return candidate.serving.speculative is None and not product.candidates[candidate.name].trace


async def _evaluate(
    candidate: Candidate,
    product: TextProduct,
    watches: Mapping[str, HarmWatch],
    pool: ThreadPoolExecutor,
    served: Served | None,
    *,
    root: Path,
    build: Path,
) -> Evaluation:
    start = time.monotonic()
    paths = Paths(build, candidate.name)
    shards = find_shards(build, candidate.name)
    shutil.rmtree(paths.folder, ignore_errors=True)
    paths.folder.mkdir(parents=True)
    plain: list[CanaryRecord] = []
    async with contextlib.AsyncExitStack() as stack:
        if served is None:
            # importing lm-eval takes as long as starting servers does
            describing = pool.submit(describe_evals, product, candidate, load_evalsets(product, root), root)
            if candidate.serving.engine == "openai":
                await asyncio.wrap_future(describing)  # nothing starts, and an import may keep an answer waiting
            elif candidate.serving.speculative is not None:
                plain = await _ask_plain(candidate, product, await asyncio.wrap_future(describing), root, paths.logs)
            served = await stack.enter_async_context(_serve(candidate, product, describing, paths, root))
        records = await collect_records(served, paths, watches=watches, shards=shards, root=root)
        prompts = pick_canary(product, served.evals)
        canary = merge_records(plain, await _run_canary(product, served, prompts))
        speculation = sum_speculation(r.speculation for cases in records.values() for r in cases)
        if speculation is None:
            speculation = await _read_drafts(served.client, candidate.serving)
        seconds = round(time.monotonic() - start, 3)
        if product.candidates[candidate.name].trace:
            with tolerate_failure(candidate.name):
                await trace_engine(served.engine, product.resources, prompts, evaluation=paths.folder)
    engine = served.engine
    evaluation = Evaluation(
        candidate=candidate.name,
        fingerprint=engine.fingerprint,
        checkpoint_digest=candidate.checkpoint.digest,
        serving=candidate.serving,
        evals={job.name: _build_eval_file(job, paths.folder, len(records[job.name])) for job in served.evals},
        served_by=engine.facts,
        proof=engine.proof,
        is_declared=engine.is_declared,
        config=_write_config(paths.folder, engine.config),
        canary=write_canary(paths.folder, canary, product.canary.num_prompts),
        speculation=speculation,
        shards=shards.counts if shards else None,
        seconds=seconds,
    )
    _put_in_place(evaluation, paths)
    if shards:
        shards.remove()
    return evaluation


@contextlib.asynccontextmanager
async def _serve(
    candidate: Candidate, product: TextProduct, describing: Future[list[EvalJob]], paths: Paths, root: Path
) -> AsyncIterator[Served]:
    """Start the candidate's endpoint while its evals are described."""
    start = time.monotonic()
    traces = paths.folder / TRACES if product.candidates[candidate.name].trace else None
    starting = start_engine(
        candidate, product.resources, evals=product.evals, root=root, logs=paths.logs, traces=traces
    )
    async with starting as (engine, client):
        servers = "1 server" if len(engine.base_urls) == 1 else f"{len(engine.base_urls)} servers"
        print(f"{candidate.name}: {servers} ready after {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        yield make_served(candidate, engine, client, await asyncio.wrap_future(describing))


async def _ask_plain(
    candidate: Candidate, product: TextProduct, evals: list[EvalJob], root: Path, logs: Path
) -> list[CanaryRecord]:
    """Ask the canary of a candidate with drafts without them."""
    if not (prompts := pick_canary(product, evals)):
        return []
    off = candidate.model_copy(update={"serving": candidate.serving.model_copy(update={"speculative": None})})
    starting = start_engine(off, product.resources, evals=product.evals, root=root, logs=logs / "plain")
    async with starting as (engine, client):
        return await _run_canary(product, make_served(off, engine, client, evals), prompts, prefix="plain ")


async def _run_canary(
    product: TextProduct, served: Served, prompts: Sequence[Prompt], *, prefix: str = ""
) -> list[CanaryRecord]:
    """Ask what no other endpoint has answered, and measure the margins of all."""
    if not prompts:
        return []
    start = time.monotonic()
    answered = join_parts(served.engine.fingerprint, served.canary)
    if missing := {place: prompt for place, prompt in enumerate(prompts) if place not in answered.records}:
        asked = await ask_canary(
            served.engine,
            served.client,
            missing,
            product.resources,
            max_tokens=served.candidate.serving.max_tokens,
            prefix=prefix,
        )
        answered = join_parts(served.engine.fingerprint, [answered, asked])
    records = await measure_margins(served.client, answered, f"{prefix}loaded")
    print(f"  {prefix}canary: {len(prompts)} prompts, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    return records


async def _read_drafts(client: Client, serving: ServingConfig) -> SpeculationCounts | None:
    """Return what a vLLM that counts no drafts by request counted over all requests since its start, else None."""
    if serving.speculative is None or serving.engine != "vllm" or counts_by_request(str(serving.version)):
        return None
    return read_drafts(await client.get_text("/metrics"), serving.speculative)


def _write_config(folder: Path, config: dict[str, str]) -> dict[str, str]:
    for name, text in config.items():
        write_text(folder / "config" / name, text)
    return {name: digest_text(text) for name, text in config.items()}


def _build_eval_file(job: EvalJob, folder: Path, num_cases: int) -> EvalFile:
    records, arrays = folder / f"{job.name}.jsonl", folder / f"{job.name}.npz"
    return EvalFile(
        kind=job.settings.kind,
        settings=job.settings.model_dump(mode="json"),
        key=job.key,
        evalset_digest=job.evalset_digest,
        num_cases=num_cases,
        records=records.name,
        sha256=digest_file(records),
        arrays_sha256=digest_file(arrays) if arrays.is_file() else None,
    )


def _put_in_place(evaluation: Evaluation, paths: Paths) -> None:
    """Write what says that an evaluation is whole; its folder takes the last one's place, and names in the journal."""
    write_record(paths.folder / "evaluation.json", evaluation)
    replace_folder(paths.folder, paths.target)
    # a folder with the names takes the journals' place: killed in between, one of both is there for the next run
    finished = paths.journals.with_name(f".{paths.journals.name}.tmp")
    shutil.rmtree(finished, ignore_errors=True)
    ignore = shutil.ignore_patterns(TRACES)
    shutil.copytree(paths.target, finished / paths.last.name, ignore=ignore, copy_function=link_or_copy)
    replace_folder(finished, paths.journals)
