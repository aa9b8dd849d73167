"""Run a stage against a server that goes wrong, and see what the user is told and what becomes of the cases.

`Table` holds what all faults share: a real server on a tiny checkpoint, a proxy in front of it that
breaks things, and the records of a run that nothing disturbed. `observe` runs one fault: a whole
`python -m stages.evaluate` on a small project, a second one with the fault gone where the first did not
end well, and after each the gate. It says what happened; whether that is right is for those who call
it.

Not covered: a full disk and a killed stage, which the other tests and `benchmarks.check_resume` have.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import aiohttp

import stages.evaluate
from pipeline.products.text.serving import sending
from pipeline.records.verdicts import Verdict
from stages.cli import run_stage
from tests.certify.fault_project import (
    BUILD,
    CALLS,
    EVALS,
    FLOWS,
    NUM_CASES,
    PROSE,
    serve,
    served_at,
    write_evalsets,
    write_models,
    write_project,
)
from tests.fakes.faulty_proxy import CHAT, SCORE, Fault, FaultyProxy
from tests.fakes.judging import compare_release, list_said
from tests.fakes.release_project import load_product
from tests.fakes.tiny_llama import build_tokenizer

KILL_AFTER = 6  # documents: by then each eval has asked what it asks ahead of its cases


@dataclass(frozen=True)
class Row:
    """One fault, and what has to come of it.

    Attributes:
        name: what goes wrong.
        fault: makes what is put into the proxy; None: nothing is, the candidate's own server is killed.
        said: pattern of the line that the stage ends with; None where it must finish.
        num_kept: cases that are finished before the fault strikes.
        verdict: of the release when it is judged right after the fault.
        because: pattern of a reason in that verdict.
        num_differing: records that differ from the undisturbed run's in the end.
        timeout_s: of a request, while the fault lasts.
        wait_s: how long the stage has to wait at least, because it was told to.
        checkpoint: what the settings say is served, while the fault lasts.
    """

    name: str
    fault: Callable[[], Fault] | None
    said: str | None = None
    num_kept: int = 0
    verdict: str = "refused"
    because: str = ""
    num_differing: int = 0
    timeout_s: float = 60.0
    wait_s: float = 0.0
    checkpoint: str = "models/tiny"


@dataclass(frozen=True)
class Observed:
    """What one fault did; `num_differing` and `recovered` are about the last run, which ended well."""

    code: int
    seconds: float  # of the run with the fault
    said: str  # what the stage ended with, empty where it finished
    printed: str  # everything on stderr
    verdict: Verdict
    num_kept: int
    num_again: int  # kept cases that the second run asked again
    num_lost: int  # cases that were neither kept nor asked by the second run
    num_differing: int  # records and files of arrays
    recovered: Verdict


class Table:
    """What all faults share. Use as a context manager; `folder` is for the projects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = contextlib.ExitStack()
        self._questions = {tuple(build_tokenizer()(text)["input_ids"]): text for text in PROSE}

    def __enter__(self) -> Table:
        base = self.folder / "undisturbed"
        write_models(base / "models")
        write_evalsets(base / "evalsets")
        self._stack.enter_context(mock.patch.object(sending, "BASE_BACKOFF_S", 0.001))
        self.proxy = self._stack.enter_context(FaultyProxy(self._stack.enter_context(serve(base))))
        write_project(base, self.proxy.url, {"checkpoint": "models/tiny", "steps": []} | served_at(self.proxy.url))
        for name in ("reference", "there"):
            code, printed = evaluate(base, name)
            assert code == 0, printed
        assert (verdict := judge(base)).outcome == "pass", list_said(verdict)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def observe(self, row: Row) -> Observed:
        """Run one row in a project of its own."""
        folder = self.folder / re.sub(r"\W+", "-", row.name)
        self._copy(folder)
        there = served_at(self.proxy.url) if row.fault else {}
        write_project(
            folder, self.proxy.url, {"checkpoint": row.checkpoint, "steps": []} | there, request_timeout_s=row.timeout_s
        )
        self.proxy.fault = row.fault() if row.fault else None
        with contextlib.nullcontext() if row.fault else killer(folder / BUILD / "journal/there/prose.jsonl"):
            start = time.monotonic()
            code, printed = evaluate(folder, "there")
            seconds = time.monotonic() - start
        self.proxy.fault = None
        kept, verdict = (read_journal(folder) if code else {*CALLS, *FLOWS, *PROSE}), judge(folder)
        asked: set[str] = set()
        if code or row.verdict != "pass":
            write_project(folder, self.proxy.url, {"checkpoint": "models/tiny", "steps": []} | there)
            with recorded(self._questions) as asked:
                again = evaluate(folder, "there")
            assert again[0] == 0, again[1]
        return Observed(
            code=code,
            seconds=seconds,
            printed=printed,
            verdict=verdict,
            said="\n".join(line for line in printed.splitlines() if line.startswith("quantgate ")),
            num_kept=len(kept),
            num_again=len(asked & kept),
            num_lost=NUM_CASES - len(asked | kept),
            recovered=judge(folder),
            # a server of the candidate's own has another fingerprint than one that it is attached to
            num_differing=count_differing(
                self.folder / "undisturbed",
                folder,
                ignored={"latency_s"} | ({"fingerprint"} if row.fault is None else set()),
            ),
        )

    def _copy(self, folder: Path) -> None:
        """Give a project the models, the evalsets and the reference of the undisturbed one."""
        for path in ("models", "evalsets", BUILD / "candidates/reference", BUILD / "evaluations/reference"):
            shutil.copytree(self.folder / "undisturbed" / path, folder / path)


def find_problems(row: Row, found: Observed) -> list[str]:
    """Say in which points what happened is not what has to."""
    said = re.compile(f"quantgate evaluate: {row.said}" if row.said else "")
    because = re.compile(f"refused: {row.because}" if row.because else ".*")
    # what is attached is asked anew after a run that finished: it may serve another model by then
    num_again = NUM_CASES if row.said is None and row.verdict != "pass" else 0
    holds = {
        f"the stage ended with {found.code}": found.code == int(row.said is not None),
        f"it ended after {found.seconds:.2f} s": found.seconds >= row.wait_s,
        "it printed a traceback": "Traceback" not in found.printed,
        f"it ended with {found.said!r}": said.fullmatch(found.said) and "\n" not in found.said,
        f"{found.num_kept} cases were kept": found.num_kept >= row.num_kept,
        f"the verdict was {found.verdict.outcome}, {list_said(found.verdict)}": found.verdict.outcome == row.verdict
        and any(map(because.fullmatch, list_said(found.verdict))),
        f"{found.num_again} kept cases were asked again": found.num_again == num_again,
        f"{found.num_lost} cases were lost": found.num_lost == 0,
        f"{found.num_differing} records differ": found.num_differing == row.num_differing,
        f"after it the verdict was {found.recovered.outcome}, {list_said(found.recovered)}": found.recovered.outcome
        == "pass",
    }
    return [problem for problem, is_right in holds.items() if not is_right]


def evaluate(folder: Path, name: str) -> tuple[int, str]:
    """Run `python -m stages.evaluate NAME` in a project; return its exit code and what it printed on stderr."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stderr(printed), mock.patch.object(sys, "argv", ["", name]):
        try:
            run_stage("evaluate", stages.evaluate.main)
        except SystemExit as ended:
            return int(ended.code or 0), printed.getvalue()
    raise AssertionError("unreachable")


def judge(folder: Path) -> Verdict:
    """Judge the release of a project."""
    return compare_release(load_product(folder), folder / BUILD).judgement.verdicts[0]


def read_journal(folder: Path) -> set[str]:
    """Return the questions and texts of the cases that are journaled."""
    paths = (folder / BUILD / "journal/there").glob("*.jsonl")
    return {json.loads(line)["record"]["prompt"] for path in paths for line in path.read_text().splitlines()}


@contextlib.contextmanager
def recorded(documents: dict[tuple[int, ...], str]) -> Iterator[set[str]]:
    """Write down which cases are asked, as the requests leave the client."""
    asked, send = set(), aiohttp.ClientSession.request

    def send_and_note(self: Any, method: str, url: str, **options: Any) -> Any:
        path, body = urlsplit(url).path, json.loads(options.get("data") or b"{}")  # the proxy's own hold none
        if path == CHAT and body and "return_token_ids" not in body:  # the canary is asked by every run
            asked.add(body["messages"][0]["content"])
        if path == SCORE and body:
            asked.update(documents.get(tuple(ids[1:]), "") for ids in body["prompt"])
        return send(self, method, url, **options)

    with mock.patch.object(aiohttp.ClientSession, "request", send_and_note):
        yield asked
        asked.intersection_update([*CALLS, *FLOWS, *PROSE])


@contextlib.contextmanager
def killer(journal: Path) -> Iterator[None]:
    """Kill the server that is started meanwhile with SIGKILL, once enough cases are journaled."""
    before = list_children()

    def kill() -> None:
        while not journal.exists():
            time.sleep(0.01)
        server = (list_children() - before).pop()
        while journal.read_bytes().count(b"\n") < KILL_AFTER:
            time.sleep(0.001)
        os.kill(server, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    yield
    thread.join(10)


def list_children() -> set[int]:
    """Return the processes that this one has started."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    columns = [line.split() for line in listed.splitlines()]
    return {int(pid) for pid, parent, name, *_ in columns if int(parent) == os.getpid() and name != "ps"}


def count_differing(expected: Path, got: Path, *, ignored: set[str]) -> int:
    """Count the records, such fields aside, and the files of arrays in which two evaluations differ."""
    count = 0
    for name in EVALS:
        sides = [folder / BUILD / "evaluations/there" / name for folder in (expected, got)]
        ours, theirs = (read_records(side.with_suffix(".jsonl"), ignored) for side in sides)
        count += sum(a != b for a, b in zip(ours, theirs, strict=True))
        arrays = [side.with_suffix(".npz") for side in sides]
        count += arrays[0].exists() and arrays[0].read_bytes() != arrays[1].read_bytes()
    return count


def read_records(path: Path, ignored: set[str]) -> list[dict[str, Any]]:
    """Return records without some of their fields."""
    return [
        {key: value for key, value in json.loads(line).items() if key not in ignored}
        for line in path.read_text().splitlines()
    ]
