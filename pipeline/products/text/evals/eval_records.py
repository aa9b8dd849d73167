"""The records of each eval of an endpoint: taken over from the last evaluation, or asked.

Evals run side by side: where the last cases of one leave a server idle, those of another fill it. Only lm-eval's
tasks follow each other, as its settings are those of the process. Finished cases live in a journal until every case of
every eval has been judged. An eval that the copy of the last evaluation holds just so (same endpoint, settings, cases
and code) is taken over, not repeated. What shards of it finished (`replica.py`) is in the journal from the start.

Not covered: starting the endpoint, the canary and the evaluation as a whole (`evaluate.py`).
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import EngineError, EvidenceError
from pipeline.gate.harm_stop import HarmWatch
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.jobs import EvalJob
from pipeline.products.text.evals.places import Places
from pipeline.products.text.evals.registry import EVALS
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.engine import Engine, gather
from pipeline.products.text.settings import TrajectoriesEval
from pipeline.records.canary import CanaryPart
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import (
    Candidate,
    CaseRecord,
    EvalFile,
    Evaluation,
    format_cut,
    format_failures,
    read_cases,
)
from pipeline.records.record_files import read_record, write_cases
from pipeline.running.hub import locate_checkpoint
from pipeline.running.journal import Journal
from pipeline.running.progress import tell_kept
from pipeline.running.shards import Shards
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
    """An endpoint of a candidate that runs, and what it is asked, in as many cases at once as there are places."""

    candidate: Candidate
    engine: Engine
    client: Client
    evals: list[EvalJob]
    places: Places
    canary: Sequence[CanaryPart] = ()  # what endpoints like it answered; it is asked what is missing


def make_served(candidate: Candidate, engine: Engine, client: Client, evals: list[EvalJob]) -> Served:
    """Return an endpoint that has a place for each request that its servers may have in flight."""
    return Served(candidate, engine, client, evals, Places(candidate.serving.concurrency * len(engine.base_urls)))


async def collect_records(
    served: Served, paths: Paths, *, watches: Mapping[str, HarmWatch], shards: Shards | None, root: Path
) -> dict[str, list[CaseRecord]]:
    """Return the records of each eval, asked or taken over, and write them into the folder in the making.

    Args:
        served: the endpoint.
        paths: of its candidate.
        watches: by eval, what may end it early.
        shards: of which the answers are there already.
        root: project root.

    Raises:
        EngineError: a case was answered by another endpoint, or the endpoint died.
        EvidenceError: cases could not be judged.
    """
    kept = _read_kept(paths.last, served)

    async def run(job: EvalJob) -> list[CaseRecord]:
        watch = watches.get(job.name)
        if (file := kept.get(job.name)) is not None and file.key == job.key:
            return _take_over(paths, job, file, watch)
        return await _run_eval(job, served, paths=paths, watch=watch, shards=shards, root=root)

    results = await gather(*map(run, served.evals))
    records = {job.name: cases for job, cases in zip(served.evals, results, strict=True)}
    _check_judged(served.candidate.name, records)
    return records


async def _run_eval(
    job: EvalJob, served: Served, *, paths: Paths, watch: HarmWatch | None, shards: Shards | None, root: Path
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
        context = replace(make_context(job, served, journal, root=root, folder=paths.folder), watch=watch)
        records = await EVALS[job.settings.kind](context)
    if foreign := next((r for r in records if r.fingerprint != engine.fingerprint), None):
        raise EngineError(
            f"{job.name}: case {foreign.case_id!r} was answered by fingerprint "
            f"{foreign.fingerprint[:12]!r}, expected {engine.fingerprint[:12]!r}"
        )
    write_cases(paths.folder / f"{job.name}.jsonl", records)
    shown = _format_headline(job.settings.metrics[0], records)
    if cut := format_cut(records):
        shown += f", {cut} (raise it)"
    print(f"  {job.name}: n={len(records)}, {shown}, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    return records


def make_context(job: EvalJob, served: Served, journal: Journal, *, root: Path, folder: Path) -> EvalContext:
    """Return what one eval of a candidate is given to work with.

    Args:
        job: the eval.
        served: the endpoint that it asks.
        journal: where its finished cases are kept.
        root: project root.
        folder: where it may write files beside its records.
    """
    candidate = served.candidate
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


def _read_kept(folder: Path, served: Served) -> dict[str, EvalFile]:
    """Return the evals of the last evaluation that came from the same endpoint and are as they were written."""
    if served.candidate.serving.engine == "openai":
        return {}  # what runs behind it now may be another model than then
    try:
        last = read_record(folder / "evaluation.json", Evaluation)
    except (EvidenceError, NotADirectoryError):
        return {}
    return {
        name: file
        for name, file in last.evals.items()
        if last.fingerprint == served.engine.fingerprint and _is_intact(folder, name, file)
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
