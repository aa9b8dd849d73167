"""lm-eval tasks through the endpoint, with lm-eval as a library.

lm-eval builds the prompts and judges the answers; `EndpointLM` hands its requests to the one client.
A task whose metric is `acc` (or `exact_match`) becomes one record per document. Records are paired by
lm-eval's hashes of document, prompt and target, which are the same for every candidate.

lm-eval imports torch and more, which takes seconds: `import_library` does it while servers start.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from typing import Any
from unittest import mock

from pipeline.errors import SettingsError
from pipeline.products.text.evals.bridge import Bridge
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.generation import GENERATE, Answer, digest_request, name_case
from pipeline.products.text.evals.material import compile_once, explain_problems, index_tasks, read_fresh
from pipeline.products.text.settings import HarnessEval
from pipeline.records.digests import digest_json
from pipeline.records.evaluations import CaseRecord

ENDPOINT_LM = "pipeline.products.text.evals.endpoint_lm"  # imports lm-eval
_LIBRARY = threading.Lock()  # its seeds, caches and patches are those of the process
ACCURACY_METRICS = ("acc", "exact_match")  # 0 or 1 per document


def import_library(name: str, settings: HarnessEval) -> None:
    """Import what running a task imports: lm-eval itself defers most of it to its first evaluation.

    Raises:
        SettingsError: it can't be imported.
    """
    with explain_problems(name, "import what it needs for", settings.task):
        for module in ("lm_eval.evaluator", "torch", "transformers", ENDPOINT_LM):
            importlib.import_module(module)


async def evaluate(context: EvalContext) -> list[CaseRecord]:
    """Run one lm-eval task; the score of a record is `accuracy`."""
    assert isinstance(context.settings, HarnessEval)
    start = time.perf_counter()
    with explain_problems(context.name, "run", context.settings.task):
        samples = await _run_beside(context, context.settings)
    seconds = (time.perf_counter() - start) / max(1, len(samples))
    records = [_record(context, context.settings, sample, seconds) for sample in samples]
    records = _add_answers(context, samples, records)
    seen: dict[str, int] = {}
    for i, record in enumerate(records):
        # the same document twice in a task is two cases; only their place tells them apart
        if repeat := seen.get(record.input_digest, 0):
            records[i] = record.model_copy(update={"input_digest": digest_json([record.input_digest, repeat])})
        seen[record.input_digest] = repeat + 1
    return records


async def _run_beside(context: EvalContext, settings: HarnessEval) -> list[dict[str, Any]]:
    """Run a task in a thread; where that is cancelled, the thread has ended too: it writes to the journal."""
    bridge = Bridge()
    running = asyncio.ensure_future(asyncio.to_thread(_run_task, context, settings, bridge))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        bridge.close()
        await asyncio.gather(running, return_exceptions=True)
        raise


def _run_task(context: EvalContext, settings: HarnessEval, bridge: Bridge) -> list[dict[str, Any]]:
    from lm_eval import evaluator

    from pipeline.products.text.evals.endpoint_lm import EndpointLM

    manager = index_tasks(context.name, settings)
    # what it notes of machine and git takes seconds of other programs, and is in no record of ours
    unused: dict[str, Any] = {"add_env_info": lambda results: None, "get_git_commit_hash": lambda: None}
    with _LIBRARY, read_fresh(), compile_once(), mock.patch.multiple(evaluator, **unused):
        results = evaluator.simple_evaluate(
            model=EndpointLM(context, bridge),
            tasks=[settings.task],
            num_fewshot=settings.num_fewshot,
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
            cache_requests=False,
        )
    return results["samples"][settings.task]


def _record(context: EvalContext, settings: HarnessEval, sample: dict[str, Any], seconds: float) -> CaseRecord:
    metric = next((m for m in ACCURACY_METRICS if m in sample), None)
    if metric is None:
        raise SettingsError(
            f"evals.{context.name}.task: {settings.task} has the metrics {', '.join(sample['metrics'])}; "
            f"expected one of {', '.join(ACCURACY_METRICS)}"
        )
    hashes = [sample["doc_hash"], sample["prompt_hash"], sample["target_hash"]]
    document = sample["doc"] if isinstance(sample["doc"], dict) else {}
    return CaseRecord(
        case_id=name_case(settings.task, document, sample["doc_id"]),
        input_digest=digest_json(hashes),
        cluster=str(document.get("cluster", hashes[0])),
        buckets=tuple(document.get("buckets", ())),
        prompt=str(sample["arguments"][0][0]),
        output=_format_answer(sample),
        scores={"accuracy": float(sample[metric])},
        latency_s=seconds,
        fingerprint=context.fingerprint,
    )


def _add_answers(context: EvalContext, samples: list[dict[str, Any]], records: list[CaseRecord]) -> list[CaseRecord]:
    """Add what is known of answers in the model's own words; where several filters read one, it is counted once."""
    counted: set[str] = set()
    result = []
    for sample, record in zip(samples, records, strict=True):
        key = digest_request(GENERATE, sample["arguments"][0])
        if (text := context.journal.find_text(key)) is not None:
            answer = Answer.model_validate_json(text)
            changes: dict[str, Any] = {
                "cut_by": answer.cut_by,
                "answer": answer.text if answer.text != record.output else "",
            }
            if key not in counted:
                changes |= {"num_completion_tokens": answer.num_tokens, "speculation": answer.speculation}
            record = record.model_copy(update=changes)
            counted.add(key)
        result.append(record)
    return result


def _format_answer(sample: dict[str, Any]) -> str:
    answers = sample["filtered_resps"]
    if len(sample["arguments"]) == 1:
        return str(answers[0])
    best = max(range(len(answers)), key=lambda i: answers[i][0])
    return str(sample["arguments"][best][1]).strip()
