"""The runner: resume after SIGKILL, classes of failure, concurrency, and when to give up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import EngineError, EvidenceError, JournalError, RequestError
from pipeline.evalsets.cases import DocumentCase
from pipeline.products.text.evals.places import Places
from pipeline.products.text.evals.runner import MAX_FAILURES_IN_A_ROW, run_cases
from pipeline.records.evaluations import CaseRecord
from pipeline.running.journal import Journal

ROOT = Path(__file__).resolve().parents[3]
CASES = [DocumentCase(id=f"c{i}", cluster="c", text=f"text {i}") for i in range(40)]


def judged(case: DocumentCase, score: float = 1.0) -> CaseRecord:
    return CaseRecord(
        case_id=case.id,
        input_digest=case.digest,
        cluster=case.cluster,
        prompt=case.text,
        output="",
        scores={"exact": score},
        fingerprint="f",
    )


def make_context(journal: Any, concurrency: int = 4, check_alive: Any = lambda: None, watch: Any = None) -> Any:
    """Return what the runner reads of an EvalContext."""
    client = SimpleNamespace(check_alive=check_alive)
    places = Places(concurrency)
    return SimpleNamespace(
        name="e",
        journal=journal,
        places=places,
        take_place=partial(places.take, (0,)),
        fingerprint="f",
        client=client,
        watch=watch,
    )


def open_journal(folder: Path) -> Journal:
    return Journal(folder / "e.jsonl", fingerprint="f", key="s")


def run(folder: Path, judge: Any, cases: list[DocumentCase] = CASES, **options: Any) -> list[CaseRecord]:
    with open_journal(folder) as journal:
        return asyncio.run(run_cases(make_context(journal, **options), cases, judge))


def test_records_keep_the_order_of_the_cases(tmp_path: Path) -> None:
    async def judge(case: DocumentCase) -> CaseRecord:
        await asyncio.sleep(0.01 if case.id.endswith("0") else 0)
        return judged(case)

    assert [r.case_id for r in run(tmp_path, judge)] == [c.id for c in CASES]


def test_at_most_so_many_cases_at_once(tmp_path: Path) -> None:
    running, most = 0, 0

    async def judge(case: DocumentCase) -> CaseRecord:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return judged(case)

    run(tmp_path, judge, concurrency=3)
    assert most == 3


def test_a_wrong_answer_a_lost_request_and_a_crash_are_three_things(tmp_path: Path) -> None:
    async def judge(case: DocumentCase) -> CaseRecord:
        if case.id == "c1":
            raise EngineError("no answer within 5 s (tried 2 times)")
        if case.id == "c2":
            raise RequestError("HTTP 400: prompt too long")
        if case.id == "c3":
            return judged(case, score=len(None))  # type: ignore[arg-type]  # a fault of the code
        return judged(case, score=0.0)

    wrong, lost, refused, crashed = run(tmp_path, judge)[:4]
    assert (wrong.failure, wrong.scores) == (None, {"exact": 0.0})
    assert lost.failure == "infrastructure: no answer within 5 s (tried 2 times)"
    assert refused.failure == "infrastructure: HTTP 400: prompt too long"
    assert crashed.failure is not None and crashed.failure.startswith("evaluator: TypeError")
    assert lost.scores == refused.scores == crashed.scores == {}
    assert crashed.input_digest == CASES[3].digest  # still pairs with the reference's record


def test_failures_are_tried_again_and_judgements_are_not(tmp_path: Path) -> None:
    asked: list[str] = []
    broken = {"c5", "c6"}

    async def judge(case: DocumentCase) -> CaseRecord:
        asked.append(case.id)
        if case.id in broken:
            raise EngineError("down")
        return judged(case)

    run(tmp_path, judge)
    asked.clear()
    broken.clear()
    records = run(tmp_path, judge)
    assert sorted(asked) == ["c5", "c6"]
    assert all(r.failure is None for r in records)


def test_a_dead_server_ends_the_eval_and_keeps_the_journal(tmp_path: Path) -> None:
    is_dead = False

    def check_alive() -> None:
        if is_dead:
            raise EngineError("server-0: killed by signal 9: ...")

    async def judge(case: DocumentCase) -> CaseRecord:
        nonlocal is_dead
        if case.id == "c10":
            is_dead = True
            raise EngineError("connection refused")
        return judged(case)

    with pytest.raises(EngineError, match="killed by signal 9: ...; e: 10 of 40 cases are finished and kept, run `dvc"):
        run(tmp_path, judge, concurrency=1, check_alive=check_alive)
    with open_journal(tmp_path) as journal:
        assert len(journal) == 10


def test_an_endpoint_that_fails_case_after_case_is_given_up(tmp_path: Path) -> None:
    num_asked = 0

    async def judge(case: DocumentCase) -> CaseRecord:
        nonlocal num_asked
        num_asked += 1
        raise EngineError("HTTP 500")

    with pytest.raises(EngineError, match="in a row failed, last: HTTP 500; e: 0 of 40 cases are finished and kept"):
        run(tmp_path, judge, concurrency=1)
    assert num_asked == MAX_FAILURES_IN_A_ROW


def test_a_full_disk_ends_the_eval_with_the_journals_line(tmp_path: Path) -> None:
    async def judge(case: DocumentCase) -> CaseRecord:
        return judged(case)

    class FullJournal:
        def find(self, digest: str) -> None:
            return None

        def add(self, *_: object) -> None:
            raise JournalError("can't write: No space left on device")

    with pytest.raises(JournalError, match="No space left"):
        asyncio.run(run_cases(make_context(FullJournal()), CASES, judge))


def test_a_watch_that_can_not_compare_ends_the_eval_with_its_line(tmp_path: Path) -> None:
    """Edited cases are the user's to see to: no group of errors, and no traceback."""

    async def judge(case: DocumentCase) -> CaseRecord:
        return judged(case)

    class Watch:
        def rank(self, cluster: str) -> int:
            return 0

        def add(self, record: CaseRecord) -> None:
            raise EvidenceError("asks something else")

    with pytest.raises(EvidenceError, match="asks something else"):
        run(tmp_path, judge, watch=Watch())


def test_attachments_survive_a_restart(tmp_path: Path) -> None:
    async def once(fail: bool) -> dict[str, str]:
        attachments: dict[str, str] = {}

        async def judge(case: DocumentCase) -> CaseRecord:
            assert not fail, "every case was finished before"
            attachments[case.id] = f"arrays of {case.id}"
            return judged(case)

        with open_journal(tmp_path) as journal:
            await run_cases(make_context(journal), CASES, judge, attachments=attachments)
        return attachments

    assert asyncio.run(once(fail=False)) == asyncio.run(once(fail=True))


SLOW_RUN = """
import asyncio, sys
from pathlib import Path
from tests.products.text.test_runner import CASES, judged, make_context, open_journal
from pipeline.products.text.evals.runner import run_cases
folder = Path(sys.argv[1])
async def judge(case):
    await asyncio.sleep(0.03)
    with (folder / "asked").open("a") as file:
        file.write(case.id + "\\n")
    return judged(case)
with open_journal(folder) as journal:
    asyncio.run(run_cases(make_context(journal), CASES, judge))
"""


def test_after_sigkill_no_finished_case_is_repeated(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, "-c", SLOW_RUN, str(tmp_path)], cwd=ROOT, env=environment)

    path = tmp_path / "e.jsonl"
    child = start()
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_bytes().count(b"\n") >= 12) and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    with open_journal(tmp_path) as journal:
        finished = {case.id for case in CASES if journal.find(case.digest)}
    assert 12 <= len(finished) < len(CASES)
    (tmp_path / "asked").unlink()

    assert start().wait(timeout=60) == 0
    asked = (tmp_path / "asked").read_text().split()
    assert finished.isdisjoint(asked)
    assert finished | set(asked) == {case.id for case in CASES}


def test_the_first_error_of_a_kind_is_found_however_deep() -> None:
    from pipeline.errors import EngineError, JournalError
    from pipeline.products.text.serving.failures import find_error

    inner = ExceptionGroup("inner", [ValueError("a"), EngineError("died"), EngineError("later")])
    group = ExceptionGroup("outer", [KeyError("b"), inner])
    assert str(find_error(group, EngineError)) == "died" and find_error(group, JournalError) is None
