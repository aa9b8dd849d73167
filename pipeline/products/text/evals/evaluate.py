"""Run every eval of one candidate through its endpoint and write the evaluation folder.

Evals run side by side: where the last cases of one leave a server idle, those of another fill it. Only lm-eval's
tasks follow each other, as its settings are those of the process. Records are
written to a temporary folder. It takes the place of the old one when every case of every eval has
been judged; until then finished cases live in the journal. Then a copy of the folder takes the place of
the journal: an eval that it holds just so (same endpoint, settings, cases and code) is taken over by the
next run, not repeated. DVC removes the folder itself before each run. What shards of it finished (`replica.py`) is in
the journal from the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import EngineError, EvidenceError
from pipeline.gate.harm_stop import HarmWatch
from pipeline.products.text.evals.canary import (
    ask_canary,
    join_parts,
    measure_margins,
    merge_records,
    write_canary,
)
from pipeline.products.text.evals.canary_prompts import Prompt
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.jobs import EvalJob, describe_evals, load_evalsets, pick_canary
from pipeline.products.text.evals.places import Places
from pipeline.products.text.evals.registry import EVALS
from pipeline.products.text.evals.trace import trace_engine
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.engine import Engine, gather
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.serving.vllm_config import counts_by_request
from pipeline.products.text.serving.vllm_facts import read_drafts
from pipeline.products.text.settings import TextProduct, TrajectoriesEval
from pipeline.records.canary import CanaryPart, CanaryRecord
from pipeline.records.digests import digest_file, digest_text
from pipeline.records.evaluations import (
    Candidate,
    CaseRecord,
    EvalFile,
    Evaluation,
    format_cut,
    format_failures,
    read_cases,
)
from pipeline.records.files import replace_folder, write_text
from pipeline.records.record_files import read_record, write_cases, write_record
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculationCounts, sum_speculation
from pipeline.running.hub import locate_checkpoint
from pipeline.running.journal import Journal, lock_candidate
from pipeline.running.progress import tell_kept
from pipeline.running.shards import Shards, find_shards
from pipeline.running.tracing import TRACES, tolerate_failure
from pipeline.settings.metrics import MetricDefinition


class Paths:
    """Where one candidate's evaluation lies, the one in the making, its journals, the last copy, the server logs."""

    def __init__(self, build: Path, name: str) -> None:
        self.target = build / "evaluations" / name
        self.folder = self.target.with_name(f".{name}.tmp")
        self.journals = build / "journal" / name
        self.last = self.journals / "finished"
        self.logs = build / "logs" / name


@dataclass(frozen=True)
class Served:
    """An endpoint that runs already, and what it is asked, in as many cases at once as there are places."""

    engine: Engine
    client: Client
    evals: list[EvalJob]
    places: Places
    canary: Sequence[CanaryPart] = ()  # what endpoints like it answered; it is asked what is missing


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


def make_served(candidate: Candidate, engine: Engine, client: Client, evals: list[EvalJob]) -> Served:
    """Return an endpoint that has a place for each request that its servers may have in flight."""
    return Served(engine, client, evals, Places(candidate.serving.concurrency * len(engine.base_urls)))


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
        records = await _run_evals(candidate, served, paths, watches, shards, root)
        prompts = pick_canary(product, served.evals)
        canary = merge_records(plain, await _run_canary(candidate, product, served, prompts))
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


async def _run_evals(
    candidate: Candidate,
    served: Served,
    paths: Paths,
    watches: Mapping[str, HarmWatch],
    shards: Shards | None,
    root: Path,
) -> dict[str, list[CaseRecord]]:
    """Return the records of each eval, asked or taken over.

    Raises:
        EvidenceError: cases could not be judged.
    """
    kept = _read_kept(paths.last, candidate, served.engine)

    async def run(job: EvalJob) -> list[CaseRecord]:
        watch = watches.get(job.name)
        if (file := kept.get(job.name)) is not None and file.key == job.key:
            return _take_over(paths, job, file, watch)
        return await _run_eval(job, candidate, served, paths, watch, shards, root)

    results = await gather(*map(run, served.evals))
    records = {job.name: cases for job, cases in zip(served.evals, results, strict=True)}
    _check_judged(candidate.name, records)
    return records


def _put_in_place(evaluation: Evaluation, paths: Paths) -> None:
    """Write what says that an evaluation is whole; its folder takes the place of the last one, a copy the journal's."""
    write_record(paths.folder / "evaluation.json", evaluation)
    replace_folder(paths.folder, paths.target)
    shutil.rmtree(paths.journals, ignore_errors=True)
    shutil.copytree(paths.target, paths.last, ignore=shutil.ignore_patterns(TRACES))


async def _read_drafts(client: Client, serving: ServingConfig) -> SpeculationCounts | None:
    """Return what a vLLM that counts no drafts by request counted over all requests since its start, else None."""
    if serving.speculative is None or serving.engine != "vllm" or counts_by_request(str(serving.version)):
        return None
    return read_drafts(await client.get_text("/metrics"), serving.speculative)


async def _ask_plain(
    candidate: Candidate, product: TextProduct, evals: list[EvalJob], root: Path, logs: Path
) -> list[CanaryRecord]:
    """Ask the canary of a candidate with drafts without them."""
    if not (prompts := pick_canary(product, evals)):
        return []
    off = candidate.model_copy(update={"serving": candidate.serving.model_copy(update={"speculative": None})})
    starting = start_engine(off, product.resources, evals=product.evals, root=root, logs=logs / "plain")
    async with starting as (engine, client):
        return await _run_canary(off, product, make_served(off, engine, client, evals), prompts, prefix="plain ")


async def _run_canary(
    candidate: Candidate, product: TextProduct, served: Served, prompts: Sequence[Prompt], *, prefix: str = ""
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
            max_tokens=candidate.serving.max_tokens,
            prefix=prefix,
        )
        answered = join_parts(served.engine.fingerprint, [answered, asked])
    records = await measure_margins(served.client, answered, f"{prefix}loaded")
    print(f"  {prefix}canary: {len(prompts)} prompts, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    return records


def _write_config(folder: Path, config: dict[str, str]) -> dict[str, str]:
    for name, text in config.items():
        write_text(folder / "config" / name, text)
    return {name: digest_text(text) for name, text in config.items()}


def _read_kept(folder: Path, candidate: Candidate, engine: Engine) -> dict[str, EvalFile]:
    """Return the evals of the last evaluation that came from the same endpoint and are as they were written."""
    if candidate.serving.engine == "openai":
        return {}  # what runs behind it now may be another model than then
    try:
        last = read_record(folder / "evaluation.json", Evaluation)
    except (EvidenceError, NotADirectoryError):
        return {}
    return {
        name: file
        for name, file in last.evals.items()
        if last.fingerprint == engine.fingerprint and _is_intact(folder, name, file)
    }


def _is_intact(folder: Path, name: str, file: EvalFile) -> bool:
    seals = {f"{name}.jsonl": file.sha256} | ({f"{name}.npz": file.arrays_sha256} if file.arrays_sha256 else {})
    return all((folder / path).is_file() and digest_file(folder / path) == sha256 for path, sha256 in seals.items())


def _take_over(paths: Paths, job: EvalJob, file: EvalFile, watch: HarmWatch | None) -> list[CaseRecord]:
    for suffix in (".jsonl", ".npz") if file.arrays_sha256 else (".jsonl",):
        shutil.copyfile(paths.last / f"{job.name}{suffix}", paths.folder / f"{job.name}{suffix}")
    print(f"  {job.name}: n={file.num_cases}, unchanged, taken from the last evaluation", file=sys.stderr, flush=True)
    tell_kept(job.name, file.num_cases)
    records = read_cases(paths.folder / f"{job.name}.jsonl")
    if watch is not None:
        for record in records:
            watch.add(record)
    return records


async def _run_eval(
    job: EvalJob,
    candidate: Candidate,
    served: Served,
    paths: Paths,
    watch: HarmWatch | None,
    shards: Shards | None,
    root: Path,
) -> list[CaseRecord]:
    engine = served.engine
    start = time.monotonic()
    path = paths.journals / f"{job.name}.jsonl"
    with Journal(path, fingerprint=engine.fingerprint, key=job.key) as journal:
        if journal.num_torn_bytes:
            print(f"  {job.name}: dropped an unfinished last line of {path}", file=sys.stderr)
        for problem in journal.damaged:
            print(f"  {job.name}: {problem}; passed over, its case is asked again", file=sys.stderr)
        if shards:
            shards.merge(job.name, engine.facts, key=job.key, journal=journal)
        context = replace(make_context(job, candidate, served, journal, root, paths.folder), watch=watch)
        records = await EVALS[job.settings.kind](context)
    if foreign := next((r for r in records if r.fingerprint != engine.fingerprint), None):
        raise EngineError(
            f"{job.name}: case {foreign.case_id!r} was answered by fingerprint "
            f"{foreign.fingerprint[:12]!r}, expected {engine.fingerprint[:12]!r}"
        )
    write_cases(paths.folder / f"{job.name}.jsonl", records)
    shown = ", ".join(filter(None, (_format_headline(job.settings.metrics[0], records), format_cut(records))))
    print(f"  {job.name}: n={len(records)}, {shown}, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    return records


def make_context(
    job: EvalJob, candidate: Candidate, served: Served, journal: Journal, root: Path, folder: Path
) -> EvalContext:
    """Return what one eval of a candidate is given to work with."""
    return EvalContext(
        name=job.name,
        settings=job.settings,
        evalset=job.evalset,
        client=served.client,
        journal=journal,
        checkpoint=locate_checkpoint(candidate.checkpoint.path, root),
        folder=folder,
        places=served.places,
        max_tokens=candidate.serving.max_tokens,
        context_length=candidate.serving.context_length,
        fingerprint=served.engine.fingerprint,
        num_turns=job.settings.max_turns if isinstance(job.settings, TrajectoriesEval) else 1,
        is_plain=job.is_plain,
    )


def _format_headline(metric: MetricDefinition, records: list[CaseRecord]) -> str:
    """Return the first metric of an eval as text; the gate computes the ones that count."""
    judged = [r for r in records if r.failure is None]
    if not judged:
        return f"{metric.name} none"
    total = math.fsum(r.scores[metric.score] for r in judged)
    if metric.weight is None:
        return f"{metric.name} {total / len(judged):.4f}"
    ratio = total / math.fsum(r.scores[metric.weight] for r in judged)
    return f"{metric.name} {math.exp(ratio) if metric.harm == 'relative' else ratio:.4f}"


def _check_judged(name: str, records: dict[str, list[CaseRecord]]) -> None:
    problems = [
        f"{eval_name}: {problem}" for eval_name, cases in records.items() if (problem := format_failures(cases))
    ]
    if problems:
        raise EvidenceError(
            f"{name}: {'; '.join(problems)}; the judged cases are kept, remove the cause and run "
            "`dvc repro` to try the others again"
        )


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
