"""Run every eval of one candidate through its endpoint and write the evaluation folder.

Evals run one after another in the order of params.yaml, each keeping all servers busy. Records are
written to a temporary folder that takes the place of the old one when all evals are done; until
then finished cases live in the journal, which is deleted at the end.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from pathlib import Path

from pipeline.digests import digest_file, digest_json
from pipeline.errors import EngineError
from pipeline.evals.context import EvalContext
from pipeline.evals.harness import task_digest
from pipeline.evals.journal import Journal
from pipeline.evals.registry import EVALS
from pipeline.evalsets import Evalset, load_evalset
from pipeline.gate.metrics import METRICS_BY_EVAL_KIND
from pipeline.params import EvalSettings, HarnessEval, Params
from pipeline.records import (
    Candidate,
    CaseRecord,
    EvalFile,
    Evaluation,
    SpeculationCounts,
    sum_speculation,
    write_cases,
    write_record,
)
from pipeline.serving.client import Client
from pipeline.serving.engines import Engine, start_engine


async def evaluate_candidate(candidate: Candidate, params: Params, *, root: Path, build: Path) -> Evaluation:
    """Evaluate one candidate and write `evaluations/<name>/` under `build`.

    Args:
        candidate: what the optimize stage wrote.
        params: the evals to run and how to serve.
        root: project root, which paths of checkpoint and evalsets are relative to.
        build: folder for the evaluation, its journal and the server logs.

    Raises:
        EngineError: the endpoint did not come up or died; what was finished is journaled.
    """
    start = time.monotonic()
    evalsets = {name: _load_evalset(settings, root) for name, settings in params.evals.items()}
    folder = build / "evaluations" / f".{candidate.name}.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    logs = build / "logs" / candidate.name
    files: dict[str, EvalFile] = {}
    counts: list[SpeculationCounts | None] = []
    async with start_engine(candidate, params.serving, evals=params.evals, root=root, logs=logs) as (engine, client):
        print(f"{candidate.name}: {len(engine.base_urls)} servers ready after {time.monotonic() - start:.1f} s",
              file=sys.stderr, flush=True)  # fmt: skip
        for name, settings in params.evals.items():
            evalset = evalsets[name]
            digest = evalset.digest if evalset else task_digest(settings) if isinstance(settings, HarnessEval) else ""
            path = build / "journal" / candidate.name / f"{name}.jsonl"
            key = digest_json([settings.model_dump(), candidate.serving.max_tokens, digest])
            with Journal(path, fingerprint=engine.fingerprint, settings_digest=key) as journal:
                if journal.num_torn_bytes:
                    print(f"  {name}: dropped an unfinished last line of {path}", file=sys.stderr)
                context = _make_context(name, settings, evalset, candidate, engine, client, journal, root, folder)
                records = await _run_eval(context)
            write_cases(folder / f"{name}.jsonl", records)
            counts += [record.speculation for record in records]
            arrays = folder / f"{name}.npz"
            files[name] = EvalFile(
                kind=settings.kind, evalset_digest=digest, num_cases=len(records), records=f"{name}.jsonl",
                sha256=digest_file(folder / f"{name}.jsonl"),
                arrays_sha256=digest_file(arrays) if arrays.is_file() else None)  # fmt: skip
    evaluation = Evaluation(
        candidate=candidate.name,
        fingerprint=engine.fingerprint,
        checkpoint_digest=candidate.checkpoint.digest,
        serving=candidate.serving,
        evals=files,
        served_by=engine.served_by,
        speculation=sum_speculation(counts),
        seconds=round(time.monotonic() - start, 3),
    )
    write_record(folder / "evaluation.json", evaluation)
    _put_in_place(folder, build / "evaluations" / candidate.name)
    shutil.rmtree(build / "journal" / candidate.name, ignore_errors=True)
    return evaluation


def _make_context(
    name: str, settings: EvalSettings, evalset: Evalset | None, candidate: Candidate, engine: Engine,
    client: Client, journal: Journal, root: Path, folder: Path,
) -> EvalContext:  # fmt: skip
    return EvalContext(
        name=name,
        settings=settings,
        evalset=evalset,
        client=client,
        journal=journal,
        checkpoint=root / candidate.checkpoint.path,
        folder=folder,
        concurrency=candidate.serving.concurrency * len(engine.base_urls),
        max_tokens=candidate.serving.max_tokens,
        context_length=candidate.serving.context_length,
        fingerprint=engine.fingerprint,
    )


async def _run_eval(context: EvalContext) -> list[CaseRecord]:
    start = time.monotonic()
    records = await EVALS[context.settings.kind](context)
    if foreign := next((r for r in records if r.fingerprint != context.fingerprint), None):
        raise EngineError(f"{context.name}: case {foreign.case_id!r} was answered by fingerprint "
                          f"{foreign.fingerprint[:12]!r}, expected {context.fingerprint[:12]!r}")  # fmt: skip
    num_failed = sum(r.failure is not None for r in records)
    failed = f", {num_failed} failed: {next(r.failure for r in records if r.failure)}" if num_failed else ""
    print(f"  {context.name}: n={len(records)}, {_headline(context.settings.kind, records)}, "
          f"{time.monotonic() - start:.1f} s{failed}", file=sys.stderr, flush=True)  # fmt: skip
    return records


def _headline(kind: str, records: list[CaseRecord]) -> str:
    """Return the first metric of an eval as text; the gate computes the ones that count."""
    metric = METRICS_BY_EVAL_KIND[kind][0]
    judged = [r for r in records if r.failure is None]
    if not judged:
        return f"{metric.name} none"
    total = math.fsum(r.scores[metric.score] for r in judged)
    if metric.weight is None:
        return f"{metric.name} {total / len(judged):.4f}"
    ratio = total / math.fsum(r.scores[metric.weight] for r in judged)
    return f"{metric.name} {math.exp(ratio) if metric.harm == 'relative' else ratio:.4f}"


def _load_evalset(settings: EvalSettings, root: Path) -> Evalset | None:
    return None if isinstance(settings, HarnessEval) else load_evalset(root / settings.evalset)


def _put_in_place(folder: Path, target: Path) -> None:
    """Replace `target` by `folder`; a kill in between leaves no half folder under either name."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    folder.rename(target)
    shutil.rmtree(old, ignore_errors=True)
