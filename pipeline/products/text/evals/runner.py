"""Run the cases of an eval concurrently, journal each as it finishes, and class what goes wrong.

A wrong answer is a score. A request that failed for good is `failure="infrastructure: ..."`, an
exception in the eval's own code is `failure="evaluator: ..."`. Neither is journaled, so the next run
tries those cases again. A dead server, or one that fails case after case, ends the eval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import TypeVar

from pipeline.errors import EngineError, EvidenceError, HarmFound, JournalError, RequestError, SettingsError
from pipeline.evalsets.cases import Case, ToolCallCase, TrajectoryCase
from pipeline.products.text.evals.context import NUM_LONGEST, EvalContext
from pipeline.products.text.serving.failures import find_error, prepare, say_kept
from pipeline.records.evaluations import CaseRecord
from pipeline.running.progress import Progress

MAX_FAILURES_IN_A_ROW = 8  # infrastructure failures without a success between them: the endpoint is gone

C = TypeVar("C", bound=Case)
Judge = Callable[[C], Awaitable[CaseRecord]]


async def check_prompts_fit(context: EvalContext, cases: Sequence[ToolCallCase | TrajectoryCase]) -> None:
    """Refuse an evalset of which a case can't fit, before the first one is asked.

    Only the longest are looked at, and without their chat template; a server that can't tokenise is not asked.

    Raises:
        SettingsError: names the case, its tokens and the limits.
    """
    texts = {case.id: "\n".join(message.content for message in case.messages) for case in cases}
    longest = sorted(texts, key=lambda name: len(texts[name]), reverse=True)[:NUM_LONGEST]
    try:
        with prepare(context.name):
            tokens = await context.client.tokenize([texts[name] for name in longest], add_special_tokens=False)
    except RequestError:
        return
    for name, ids in zip(longest, tokens, strict=True):
        if len(ids) + context.max_tokens > context.context_length:
            raise SettingsError(
                f"evals.{context.name}: case {name!r} has {len(ids)} tokens; with serving.max_tokens "
                f"{context.max_tokens} that is above serving.context_length {context.context_length}; "
                "raise the length, or shorten the case"
            )


async def run_cases(
    context: EvalContext,
    cases: Sequence[C],
    judge: Judge[C],
    *,
    attachments: dict[str, str] | None = None,
) -> list[CaseRecord]:
    """Judge every case that the journal does not hold yet.

    Args:
        context: of the eval.
        cases: what to judge; the result keeps their order.
        judge: asks the endpoint and returns the case's record.
        attachments: by case id; what `judge` puts in is journaled with the record, and what the
            journal holds is put back in.

    Returns:
        One record per case.

    Raises:
        EngineError: the server is dead, or fails case after case. Finished cases stay journaled.
        JournalError: a finished case can't be written.
        HarmFound: the context's watch has seen enough. Finished cases stay journaled.
        EvidenceError: the watch can't compare a case with the reference's.
    """
    watch = context.watch
    records: dict[str, CaseRecord] = {}
    waiting: list[C] = []
    for case in cases:
        if (finished := context.journal.find(case.digest)) is None:
            waiting.append(case)
            continue
        records[case.id], attachment = finished
        if attachments is not None and attachment is not None:
            attachments[case.id] = attachment
    if watch is not None:
        waiting.sort(key=lambda case: watch.rank(case.cluster))
        for record in records.values():
            watch.add(record)
    queue, failures = iter(waiting), _FailureCount()
    begin = cache(partial(Progress, context.name, total=len(cases), kept=len(records)))  # once, with its first case

    async def finish(case: C) -> None:
        record = await _judge_one(context, case, judge, failures)
        if record.failure is None:
            context.journal.add(case.digest, record, (attachments or {}).get(case.id))
        records[case.id] = record
        begin().advance()
        if watch is not None:
            watch.add(record)

    async def work() -> None:
        while True:
            async with context.take_place():
                if (case := next(queue, None)) is None:
                    return
                begin()
                try:
                    await finish(case)
                except BaseException:
                    waiting.clear()  # whoever gets the place begins none
                    raise

    if not waiting:
        begin()
    try:
        async with asyncio.TaskGroup() as group:
            # one more than there are places: an eval of a higher rank gets none while this one has cases to begin
            for _ in range(min(context.places.count + 1, len(waiting))):
                group.create_task(work())
    except ExceptionGroup as group:
        for kind in (HarmFound, JournalError, EvidenceError):
            if (ended := find_error(group, kind)) is not None:
                raise ended from None
        if (died := find_error(group, EngineError)) is None:
            raise
        kept = sum(record.failure is None for record in records.values())
        raise say_kept(died, context.name, kept, len(cases)) from None
    return [records[case.id] for case in cases]


class _FailureCount:
    """Infrastructure failures since the last success."""

    def __init__(self) -> None:
        self.in_a_row = 0


async def _judge_one(context: EvalContext, case: C, judge: Judge[C], failures: _FailureCount) -> CaseRecord:
    try:
        record = await judge(case)
        failures.in_a_row = 0
        return record
    except EngineError as error:
        context.client.check_alive()
        failures.in_a_row += 1
        if failures.in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineError(f"{context.name}: {failures.in_a_row} cases in a row failed, last: {error}") from error
        return _fail(context, case, f"infrastructure: {error}")
    except JournalError:
        raise
    except Exception as error:  # whatever the eval's code raised is its failure, not the model's
        return _fail(context, case, f"evaluator: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _fail(context: EvalContext, case: Case, failure: str) -> CaseRecord:
    return CaseRecord(
        case_id=case.id,
        input_digest=case.digest,
        cluster=case.cluster,
        buckets=case.buckets,
        prompt="",
        output="",
        failure=failure,
        fingerprint=context.fingerprint,
    )
