"""Bring up the endpoint that a candidate is evaluated on, and take it down again.

Two engines: "transformers" starts one launcher process per server on this machine, "attached" uses
a server that is already running and that quantgate neither starts nor stops. Either way the caller
gets an `Engine`: where to send requests, and the fingerprint of what answers them.

The embedded engine's fingerprint is computed by each server from what it loaded and must equal the
candidate's. An attached server can't be asked that, so its fingerprint is declared, not proved.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pipeline.digests import digest_json, name_changed_file
from pipeline.errors import EngineError
from pipeline.params import EvalSettings, ServingSettings
from pipeline.records import Candidate
from pipeline.serving import launcher
from pipeline.serving.client import Client
from pipeline.serving.readiness import check_context, probe

T = TypeVar("T")

STOP_TIMEOUT_S = 5.0
MAX_REFUSALS = 2  # connections refused before an attached server counts as not started
_NOISE = re.compile(r"^\s*(File \"|\^|~|\||$)|^Traceback|^\s{2,}|Loading weights|\d%\|")


@dataclass
class _Process:
    """One launcher process and its log."""

    popen: subprocess.Popen[bytes]
    log: Path

    def failure(self, what: str) -> EngineError:
        """Describe a failure with the last meaningful line of the log."""
        return EngineError(f"server {self.log.stem}: {what}: {read_last_line(self.log)} (log: {self.log})")


@dataclass(frozen=True)
class Engine:
    """A running endpoint.

    `served_by` is what the endpoint said about itself, or what was declared for it.
    """

    base_urls: tuple[str, ...]
    model: str
    fingerprint: str
    served_by: dict[str, Any]
    processes: tuple[_Process, ...] = field(default=(), repr=False)

    def check_alive(self) -> None:
        """Raise EngineError when one of our own servers has ended."""
        for process in self.processes:
            if (code := process.popen.poll()) is not None:
                raise process.failure(_describe_exit(code))


@contextlib.asynccontextmanager
async def start_engine(
    candidate: Candidate, settings: ServingSettings, *, evals: Mapping[str, EvalSettings], root: Path, logs: Path
) -> AsyncIterator[tuple[Engine, Client]]:
    """Start or attach to the endpoint of a candidate; on leaving, nothing we started is left.

    Args:
        candidate: what to serve.
        settings: number of servers and time limits.
        evals: what the endpoint will be asked for, by name; anything else it may lack.
        root: project root, which the checkpoint's path is relative to.
        logs: folder for the server logs.

    Raises:
        EngineError: a server did not come up, does not answer, is not what was asked for, or does not
            give what an eval needs.
    """
    if candidate.serving.engine == "attached":
        async with _attach(candidate, settings, evals) as pair:
            yield pair
        return
    processes: list[_Process] = []
    try:
        for index in range(settings.num_servers):
            processes.append(_spawn(candidate, root=root, log=logs / f"server-{index}.log"))
        reports = await _gather(*(_read_report(p, settings.start_timeout_s) for p in processes))
        for process, report in zip(processes, reports, strict=True):
            _check_fingerprint(candidate, process, report)
        urls = tuple(f"http://127.0.0.1:{report['port']}" for report in reports)
        engine = Engine(urls, candidate.name, candidate.fingerprint, reports[0]["facts"], tuple(processes))
        async with _connect(engine, candidate, settings) as client:
            await _gather(*(_probe(url, engine, settings, evals) for url in urls))
            yield engine, client
    finally:
        _stop(processes)


@contextlib.asynccontextmanager
async def _attach(
    candidate: Candidate, settings: ServingSettings, evals: Mapping[str, EvalSettings]
) -> AsyncIterator[tuple[Engine, Client]]:
    serving = candidate.serving
    if not serving.base_url or not serving.model:
        raise EngineError(f"{candidate.name}: an attached engine needs base_url and model, "
                          f"got {serving.base_url!r} and {serving.model!r}")  # fmt: skip
    url = serving.base_url.rstrip("/").removesuffix("/v1")
    await _check_listing(url, candidate, settings, evals)
    declared = {
        "model": serving.model,
        "serving": serving.identity(),
        "checkpoint": candidate.checkpoint.digest,
    }
    served_by = {"proof": "declared by the settings, not proved by the server", **declared}
    engine = Engine((url,), serving.model, digest_json(declared), served_by)
    async with _connect(engine, candidate, settings) as client:
        await probe(client, evals, attached_as=candidate.name)
        yield engine, client


async def _check_listing(
    url: str, candidate: Candidate, settings: ServingSettings, evals: Mapping[str, EvalSettings]
) -> None:
    """Check that a server is there, that it serves the model, and that its context is long enough."""
    model, where = str(candidate.serving.model), f"candidates.{candidate.name}.endpoint"
    async with Client([url], model, concurrency=1, timeout_s=settings.request_timeout_s,
                      max_refusals=MAX_REFUSALS) as client:  # fmt: skip
        try:
            listed = await client.list_models()
        except EngineError as error:
            raise EngineError(f"{error}; expected a running server of the OpenAI API: start it, or correct "
                              f"{where}.base_url") from None  # fmt: skip
    if model not in listed:
        raise EngineError(f"{url}/v1/models: expected {model!r} among the served models, got {list(listed)!r}; "
                          f"correct {where}.model")  # fmt: skip
    check_context(candidate.serving.context_length, listed[model], evals, where=f"{model!r} at {url}")


@contextlib.asynccontextmanager
async def _connect(engine: Engine, candidate: Candidate, settings: ServingSettings) -> AsyncIterator[Client]:
    async with Client(
        engine.base_urls,
        engine.model,
        concurrency=candidate.serving.concurrency,
        timeout_s=settings.request_timeout_s,
        check_alive=engine.check_alive,
    ) as client:
        yield client


async def _probe(url: str, engine: Engine, settings: ServingSettings, evals: Mapping[str, EvalSettings]) -> None:
    async with Client([url], engine.model, concurrency=1, timeout_s=settings.request_timeout_s,
                      check_alive=engine.check_alive) as client:  # fmt: skip
        await probe(client, evals)


def _spawn(candidate: Candidate, *, root: Path, log: Path) -> _Process:
    log.parent.mkdir(parents=True, exist_ok=True)
    speculative = candidate.serving.speculative
    config = json.dumps({
        "checkpoint_folder": str((root / candidate.checkpoint.path).resolve()),
        "draft_folder": str((root / speculative.draft_path).resolve())
        if speculative and speculative.draft_path else None,
        "candidate": candidate.model_dump(mode="json"),
    })  # fmt: skip
    threads = str(candidate.serving.num_threads)
    environment = os.environ | {
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }  # fmt: skip
    with log.open("wb") as log_file:
        popen = subprocess.Popen(
            [sys.executable, "-m", launcher.__name__, config],
            cwd=Path(__file__).resolve().parents[2],
            env=environment,
            stdin=subprocess.PIPE,  # held open for as long as we live: the server ends when it closes
            stdout=subprocess.PIPE,
            stderr=log_file,
            start_new_session=True,  # Ctrl-C reaches us, and we end the servers
        )
    return _Process(popen, log)


async def _gather(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Await all; at the first failure cancel the others and raise that one: what they say then is only its echo."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _read_report(process: _Process, timeout_s: float) -> dict[str, Any]:
    """Wait for the line with which a launcher announces itself."""
    assert process.popen.stdout is not None
    line = asyncio.get_running_loop().run_in_executor(None, process.popen.stdout.readline)
    try:
        text = await asyncio.wait_for(asyncio.shield(line), timeout_s)
    except TimeoutError:
        failure = process.failure(f"not ready after {timeout_s:g} s")
        process.popen.kill()  # also ends the read that is still waiting
        raise failure from None
    except asyncio.CancelledError:
        process.popen.kill()
        raise
    if not text:
        raise process.failure(_describe_exit(process.popen.wait()))
    return json.loads(text)


def _check_fingerprint(candidate: Candidate, process: _Process, report: dict[str, Any]) -> None:
    if report["fingerprint"] == candidate.fingerprint:
        return
    facts = report["facts"]
    serving = candidate.serving.identity()
    checkpoint, loaded = candidate.checkpoint, facts["checkpoint"]
    which = name_changed_file(checkpoint.files, loaded.get("files", {}))
    pairs = [(f"checkpoint digest ({which})", checkpoint.digest, loaded["digest"])]
    pairs += [(f"serving.{key}", value, facts["serving"][key]) for key, value in serving.items()]
    pairs += [(f"library {key}", value, facts["libraries"][key]) for key, value in candidate.libraries.items()]
    what, expected, got = next((p for p in pairs if p[1] != p[2]), ("fingerprint", candidate.fingerprint, "another"))
    raise EngineError(f"server {process.log.stem}: {what}: the candidate says {expected!r}, the server loaded {got!r}; "
                      "run the optimize stage again")  # fmt: skip


def _stop(processes: list[_Process]) -> None:
    for process in processes:
        process.popen.kill()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(STOP_TIMEOUT_S)
        for stream in (process.popen.stdin, process.popen.stdout):
            if stream is not None:
                stream.close()


def _describe_exit(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exited with code {code}"


def read_last_line(log: Path) -> str:
    """Return the last line of a log that says something: no traceback frames, no progress bars."""
    lines = re.split(r"[\r\n]+", log.read_text(encoding="utf-8", errors="replace")) if log.is_file() else []
    return next((line.strip()[:300] for line in reversed(lines) if not _NOISE.search(line)), "the log is empty")
