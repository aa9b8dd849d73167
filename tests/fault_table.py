"""Run a stage against a server that goes wrong, and see what the user is told and what becomes of the cases.

`Table` holds what all faults share: a real server on a tiny checkpoint, a proxy in front of it that
breaks things, and the records of a run that nothing disturbed. `observe` runs one fault: a whole
`python -m stages.evaluate` on a small project, a second one with the fault gone where the first did not
end well, and after each the gate. It says what happened; whether that is right is for those who call
it. The weights are random, so the answers are noise, and the workflows are such that noise completes them.

Not covered: a full disk and a killed stage, which `tests/unit` and `benchmarks.check_resume` have.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
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
from evalsets.seal import seal
from pipeline.checkpoints import describe_checkpoint
from pipeline.gate.compare import compare_release
from pipeline.params import ServingSettings, load_params
from pipeline.records import BuiltCandidate, Candidate, ServingConfig, Verdict, write_record
from pipeline.serving import client as client_module
from pipeline.serving.engines import start_engine
from stages.cli import run_stage
from tests.faulty_proxy import CHAT, SCORE, Fault, FaultyProxy
from tests.tiny_llama import CHAT_TEMPLATE, build_tokenizer, write_documents, write_tiny_llama

MODEL = "tiny"  # the name that the server answers to
SERVING = {"dtype": "float32", "continuous_batching": True, "concurrency": 8, "num_servers": 1, "num_threads": 1,
           "context_length": 512, "max_tokens": 4, "request_timeout_s": 60.0, "start_timeout_s": 180.0}  # fmt: skip
EVALS = {
    "calls": {"kind": "tool_calls", "evalset": "evalsets/calls", "send_tools": True},
    "flows": {"kind": "trajectories", "evalset": "evalsets/flows", "max_turns": 2, "send_tools": True},
    "prose": {"kind": "perplexity", "evalset": "evalsets/prose", "top_logprobs": 4},
}
GATE = {"alpha": 0.05, "on_inconclusive": "block", "tolerances": {
    "flows/task_completion_rate": {"overall": 0.1}, "prose/perplexity_per_token": {"overall": 0.1}}}  # fmt: skip
CALLS = [f"Task {i}: order {i + 2} reams." for i in range(16)]
FLOWS = [f"Task {i}: the stock of paper is {i + 20} reams, so do nothing." for i in range(100, 132)]
PROSE = [f"Parcel {i} was taken to the {gate} gate {n * i} minutes before noon."
         for i in range(8) for n, gate in enumerate(("north", "south", "east", "west"), start=2)]  # fmt: skip
NUM_CASES = len(CALLS) + len(FLOWS) + len(PROSE)
TOOLS = {"order": {"description": "Order reams.", "effects": [{"do": "set", "path": "ordered", "value": True}],
                   "parameters": {"type": "object", "properties": {"reams": {"type": "integer"}}}}}  # fmt: skip
WITH_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}" + CHAT_TEMPLATE
KILL_AFTER = 6  # cases of the first eval


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
        timeout_s: of a request, while the fault lasts.
        checkpoint: what the settings say is served, while the fault lasts.
    """

    name: str
    fault: Callable[[], Fault] | None
    said: str | None = None
    num_kept: int = 0
    verdict: str = "refused"
    because: str = ""
    timeout_s: float = 60.0
    checkpoint: str = "models/tiny"


@dataclass(frozen=True)
class Observed:
    """What one fault did; `num_differing` and `recovered` are about the last run, which ended well."""

    code: int
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
        for name, seed in ("tiny", 0), ("other", 1):
            write_tiny_llama(base / "models" / name, seed=seed)
            (base / "models" / name / "chat_template.jinja").write_text(WITH_TOOLS, encoding="utf-8")
        write_evalsets(base / "evalsets")
        self._stack.enter_context(mock.patch.object(client_module, "BASE_BACKOFF_S", 0.001))
        self.proxy = self._stack.enter_context(FaultyProxy(self._stack.enter_context(serve(base))))
        write_project(base, self.proxy.url)
        for name in ("reference", "there"):
            code, printed = evaluate(base, name)
            assert code == 0, printed
        assert (verdict := judge(base)).outcome == "pass", verdict.reasons
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def observe(self, row: Row) -> Observed:
        """Run one row in a project of its own."""
        folder = self.folder / re.sub(r"\W+", "-", row.name)
        self._link(folder)
        url = self.proxy.url if row.fault else None
        write_project(folder, url, row.checkpoint, request_timeout_s=row.timeout_s)
        self.proxy.fault = row.fault() if row.fault else None
        with contextlib.nullcontext() if row.fault else killer(folder / "build/journal/there/calls.jsonl"):
            code, printed = evaluate(folder, "there")
        self.proxy.fault = None
        kept, verdict = (read_journal(folder) if code else {*CALLS, *FLOWS, *PROSE}), judge(folder)
        asked: set[str] = set()
        if row.verdict != "pass":
            write_project(folder, url)
            with recorded(self._questions) as asked:
                again = evaluate(folder, "there")
            assert again[0] == 0, again[1]
        return Observed(
            code=code, said="\n".join(line for line in printed.splitlines() if line.startswith("quantgate ")),
            printed=printed, verdict=verdict, num_kept=len(kept), num_again=len(asked & kept),
            num_lost=NUM_CASES - len(asked | kept), recovered=judge(folder),
            num_differing=count_differing(self.folder / "undisturbed", folder, whoever_answered=row.fault is None),
        )

    def _link(self, folder: Path) -> None:
        """Give a project the models, the evalsets and the reference of the undisturbed one."""
        for path in ("models", "evalsets", "build/candidates/reference", "build/evaluations/reference"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).symlink_to(self.folder / "undisturbed" / path)


def write_evalsets(folder: Path) -> None:
    """Write the cases of all three evals."""
    asked = {"calls": CALLS, "flows": FLOWS}
    extra = {"calls": lambda i: {"expected": {"name": "order", "arguments": {"reams": i + 2}}},
             "flows": lambda i: {"state": {"ordered": False}, "checks": [{"path": "ordered", "equals": False}]}}
    for name, questions in asked.items():
        (folder / name).mkdir(parents=True)
        cases = [{"id": f"{name}-{i}", "cluster": f"{name}-{i}", "messages": [{"role": "user", "content": text}],
                  **extra[name](i)} for i, text in enumerate(questions)]  # fmt: skip
        card = {"name": name, "version": "1", "licence": "CC0-1.0", "kind": EVALS[name]["kind"], "cluster": "a task",
                "description": "for tests", "made_by": "tests", "tools": TOOLS}  # fmt: skip
        (folder / name / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
        (folder / name / "card.yaml").write_text(json.dumps(card))  # JSON is YAML
        seal(folder / name)
    write_documents(folder / "prose", {"prose": PROSE})


def served_at(url: str | None) -> dict[str, Any]:
    """Return what a candidate's settings say about the server it is attached to, or nothing for its own."""
    return {"endpoint": {"base_url": url, "model": MODEL}} if url else {}


def write_project(folder: Path, url: str | None, checkpoint: str = "models/tiny", **serving: Any) -> None:
    """Write settings and records of a reference and of the candidate `there`, which is served at `url`."""
    candidates = {"reference": {"checkpoint": "models/tiny"} | served_at(url), "there": {"checkpoint": checkpoint}
                  | served_at(url)}  # fmt: skip
    (folder / "params.yaml").write_text(json.dumps({  # JSON is YAML
        "reference": "reference", "release": ["there"], "candidates": candidates, "serving": SERVING | serving,
        "optimize": {"calibration_texts": "evalsets/prose", "num_threads": 1}, "evals": EVALS, "gate": GATE,
    }))  # fmt: skip
    for name, settings in candidates.items():
        path = folder / "build/candidates" / name / "candidate.json"
        if not path.parent.is_symlink():
            built = describe_checkpoint(folder / settings["checkpoint"], root=folder)
            write_record(path, BuiltCandidate(name=name, checkpoint=built))


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve `models/tiny` of a project by the embedded engine; yield where."""
    checkpoint = describe_checkpoint(folder / "models/tiny", root=folder)
    serving = ServingConfig(**{key: value for key, value in SERVING.items() if key in ServingConfig.model_fields})
    candidate = Candidate(name=MODEL, checkpoint=checkpoint, serving=serving)
    engine = start_engine(candidate, ServingSettings(**SERVING), evals={}, root=folder, logs=folder / "logs")
    with asyncio.Runner() as runner:
        running, _ = runner.run(engine.__aenter__())
        try:
            yield running.base_urls[0]
        finally:
            runner.run(engine.__aexit__(None, None, None))


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
    return compare_release(load_params(folder / "params.yaml"), folder / "build").judgement.verdicts[0]


def read_journal(folder: Path) -> set[str]:
    """Return the questions and texts of the cases that are journaled."""
    paths = (folder / "build/journal/there").glob("*.jsonl")
    return {json.loads(line)["record"]["prompt"] for path in paths for line in path.read_text().splitlines()}


@contextlib.contextmanager
def recorded(documents: dict[tuple[int, ...], str]) -> Iterator[set[str]]:
    """Write down which cases are asked, as the requests leave the client."""
    asked, send = set(), aiohttp.ClientSession.request

    def send_and_note(self: Any, method: str, url: str, **options: Any) -> Any:
        path, body = urlsplit(url).path, json.loads(options.get("data") or b"{}")  # the proxy's own hold none
        if path == CHAT and body:
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


def count_differing(expected: Path, got: Path, *, whoever_answered: bool) -> int:
    """Count the records, latency aside, and the files of arrays in which two evaluations differ."""
    ignored = {"latency_s", "fingerprint"} if whoever_answered else {"latency_s"}
    count = 0
    for name in EVALS:
        sides = [folder / "build/evaluations/there" / name for folder in (expected, got)]
        ours, theirs = ([{key: value for key, value in json.loads(line).items() if key not in ignored}
                         for line in side.with_suffix(".jsonl").read_text().splitlines()] for side in sides)  # fmt: skip
        count += sum(a != b for a, b in zip(ours, theirs, strict=True))
        arrays = [side.with_suffix(".npz") for side in sides]
        count += arrays[0].exists() and arrays[0].read_bytes() != arrays[1].read_bytes()
    return count
