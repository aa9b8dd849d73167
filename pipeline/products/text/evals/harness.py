"""lm-eval tasks through the endpoint, with lm-eval as a library.

lm-eval builds the prompts and judges the answers; `EndpointLM` hands its requests to the one client.
A task whose metric is `acc` (or `exact_match`) becomes one record per document. Records are paired by
lm-eval's hashes of document, prompt and target, which are the same for every candidate. Of a group or tag the members'
documents are one suite, and each member is a bucket of it.

lm-eval imports torch and more, which takes seconds: `import_library` does it while servers start.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

from pipeline.products.text.evals.bridge import Bridge
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.generation import (
    GENERATE,
    Answer,
    digest_request,
    join_repeats,
    list_buckets,
    name_case,
)
from pipeline.products.text.evals.material import (
    compile_once,
    index_tasks,
    read_fresh,
)
from pipeline.products.text.evals.task_judges import ACCURACY_METRICS, explain_problems, find_score
from pipeline.products.text.settings import HarnessEval
from pipeline.records.digests import digest_json
from pipeline.records.evaluations import CaseRecord, count_choices

if TYPE_CHECKING:
    from lm_eval.api.model import LM

T = TypeVar("T")
ENDPOINT_LM = "pipeline.products.text.evals.endpoint_lm"  # imports lm-eval
OTHER_TEXT = "(something else)"  # what greedy decoding gives is not known, when it is not the text that is scored
# lm-eval's seeds, caches and patches are those of the process, so it works on one task after another
_LIBRARY = ThreadPoolExecutor(1, "lm-eval")
_SHARDS = ThreadPoolExecutor(thread_name_prefix="lm-eval-shard")  # no thread that the event loop's own work waits for
_RECORDED: dict[tuple[str, str], dict[str, list[Any]]] = {}  # what lm-eval asks of a model, by eval and by kind


def import_library(name: str, settings: HarnessEval) -> None:
    """Import what running a task imports: lm-eval itself defers most of it to its first evaluation.

    Raises:
        SettingsError: it can't be imported.
    """
    with explain_problems(name, "import what it needs for", settings.task):
        for module in ("lm_eval.evaluator", "torch", "transformers", ENDPOINT_LM):
            importlib.import_module(module)


async def evaluate(context: EvalContext) -> list[CaseRecord]:
    """Run one lm-eval task; the score of a record is `accuracy`.

    Of a shard the answers are journaled and nothing is returned: who has all of them judges them.
    """
    assert isinstance(context.settings, HarnessEval)
    start = time.perf_counter()
    with explain_problems(context.name, "run", context.settings.task):
        if context.shard is not None:
            requests = await _work_beside(_LIBRARY, context, _record_requests)
            await _work_beside(_SHARDS, context, partial(_ask, requests))
            return []
        samples = await _work_beside(_LIBRARY, context, _judge)
    seconds = (time.perf_counter() - start) / max(1, len(samples))
    records = [_record(context, context.settings, sample, seconds) for sample in samples]
    records = _add_answers(context, samples, records)
    clusters = join_repeats(
        [sample["doc"] for sample in samples],
        [sample["arguments"] for sample in samples],
        [record.cluster for record in records],
        num_fewshot=context.settings.num_fewshot,
    )
    records = [r.model_copy(update={"cluster": cluster}) for r, cluster in zip(records, clusters, strict=True)]
    seen: dict[str, int] = {}
    for i, record in enumerate(records):
        # the same document twice in a task is two cases; only their place tells them apart
        if repeat := seen.get(record.input_digest, 0):
            records[i] = record.model_copy(update={"input_digest": digest_json([record.input_digest, repeat])})
        seen[record.input_digest] = repeat + 1
    return records


async def _work_beside(pool: ThreadPoolExecutor, context: EvalContext, work: Callable[[EvalContext, Bridge], T]) -> T:
    """Work on a task in a thread; where that is cancelled, the thread has ended too: it writes to the journal."""
    bridge = Bridge()
    running = pool.submit(work, context, bridge)
    answer = asyncio.wrap_future(running)
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        if not running.cancel():  # it has begun
            bridge.close()
            await asyncio.gather(answer, return_exceptions=True)
        raise


def _record_requests(context: EvalContext, _bridge: Bridge) -> dict[str, list[Any]]:
    """Return the requests of a task by kind. They are the same for all shards: lm-eval makes them for the first one."""
    from pipeline.products.text.evals.endpoint_lm import Recorder

    key = (context.name, context.settings.model_dump_json())
    if key not in _RECORDED:
        recorder = Recorder()
        _run_task(context, recorder)
        _RECORDED[key] = recorder.requests
    return _RECORDED[key]


def _ask(requests: Mapping[str, list[Any]], context: EvalContext, bridge: Bridge) -> None:
    """Have the journal hold the answers of a shard."""
    from pipeline.products.text.evals.endpoint_lm import EndpointLM

    model = EndpointLM(context, bridge)
    for kind, some in requests.items():
        getattr(model, kind)(some)


def _judge(context: EvalContext, bridge: Bridge) -> list[dict[str, Any]]:
    """Return the samples of a task, as lm-eval judged them."""
    from pipeline.products.text.evals.endpoint_lm import EndpointLM

    return _run_task(context, EndpointLM(context, bridge))


def _run_task(context: EvalContext, model: LM) -> list[dict[str, Any]]:
    from lm_eval import evaluator

    settings = context.settings
    assert isinstance(settings, HarnessEval)
    manager = index_tasks(context.name, settings)
    # what it notes of machine and git takes seconds of other programs, and is in no record of ours
    unused: dict[str, Any] = {"add_env_info": lambda results: None, "get_git_commit_hash": lambda: None}
    with read_fresh(), compile_once(), mock.patch.multiple(evaluator, **unused):
        results = evaluator.simple_evaluate(
            model=model,
            tasks=[settings.task],
            num_fewshot=settings.num_fewshot,
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
            cache_requests=False,
        )
    return [sample | {"task": task} for task, samples in results["samples"].items() for sample in samples]


def _record(context: EvalContext, settings: HarnessEval, sample: dict[str, Any], seconds: float) -> CaseRecord:
    task, judged = sample["task"], {metric: sample[metric] for metric in sample["metrics"]}
    metric, score = find_score(context.name, task, judged)
    hashes = [sample["doc_hash"], sample["prompt_hash"], sample["target_hash"]]
    document = sample["doc"] if isinstance(sample["doc"], dict) else {}
    case_id = name_case(task, document, sample["doc_id"])
    return CaseRecord(
        case_id=case_id if task == settings.task else f"{task}/{case_id}",
        input_digest=digest_json(hashes),
        cluster=str(document.get("cluster", hashes[0])),
        buckets=list_buckets(document, task, settings.task),
        prompt=str(sample["arguments"][0][0]),
        output=_format_answer(sample),
        # other metrics are of texts, not of choices
        num_choices=count_choices(sample, len(sample["arguments"])) if metric == ACCURACY_METRICS[0] else 0,
        scores={"accuracy": score},
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
    """Return what was generated or chosen; of one text that is scored, the text where greedy decoding gives it."""
    answers, asked = sample["filtered_resps"], sample["arguments"]
    if len(asked) > 1:
        best = max(range(len(answers)), key=lambda i: answers[i][0])
        # of choices within the question, as winogrande has them, what follows is the same
        part = 1 if len({continuation for _, continuation in asked}) > 1 else 0
        return str(asked[best][part]).strip()
    if isinstance(answers[0], str):
        return answers[0]
    is_greedy = isinstance(answers[0], list | tuple) and answers[0][1]
    return str(asked[0][1]).strip() if is_greedy else OTHER_TEXT
