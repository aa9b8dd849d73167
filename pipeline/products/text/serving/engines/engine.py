"""The interface of engines: the order to one, and the endpoint that it gives.

An engine is an async context manager: entering starts it and waits until it has answered real
requests, leaving stops it, whatever happened in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import EngineError
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.processes import ServerProcess
from pipeline.products.text.serving.readiness import needs_scores, probe
from pipeline.products.text.settings import EvalSettings, ResourceSettings
from pipeline.records.evaluations import Candidate
from pipeline.records.fingerprints import find_difference, fingerprint

T = TypeVar("T")
LOCAL, EVERY_ADDRESS = "127.0.0.1", "0.0.0.0"


@dataclass(frozen=True)
class ServerLaunch:
    """The order to an engine: serve this candidate to these evals.

    Attributes:
        candidate: what to serve.
        resources: number of servers and time limits.
        evals: by name, the evals that will ask the endpoint. It may lack anything that they do not need.
        root: project root, which the checkpoint's path is relative to.
        logs: folder for the server logs and the configuration that the engine was given.
        host: address to listen at.
        port: to listen at; None: a free one. With several servers it has to be None.
        num_engines: of ours that run on this machine at once, this one included.
        engine_index: of this one among them: where there are GPUs enough, each has its own.
        traces: folder that a server writes a trace to when it is asked for one; None: it is not asked.
    """

    candidate: Candidate
    resources: ResourceSettings
    evals: Mapping[str, EvalSettings]
    root: Path
    logs: Path
    host: str = LOCAL
    port: int | None = None
    num_engines: int = 1
    engine_index: int = 0
    traces: Path | None = None

    @property
    def needs_scores(self) -> bool:
        """Some eval asks for the log-probabilities of given tokens."""
        return needs_scores(self.evals)

    def url(self, port: int) -> str:
        """Return where to ask a server of ours: one that listens at every address is asked at the local one."""
        return f"http://{LOCAL if self.host == EVERY_ADDRESS else self.host}:{port}"


@dataclass(frozen=True)
class Engine:
    """A running endpoint.

    Attributes:
        base_urls: its servers.
        model: the name to send.
        facts: what it is, by section (`pipeline/records/fingerprints.py`).
        proof: who says so.
        is_declared: its weights are the settings' word, not its own.
        echo: what each reply must carry as `system_fingerprint`; None: what the first one carries.
        config: the configuration in the engine's own form, by file name.
        processes: those that we started.
        api_key: that it asks for.
    """

    base_urls: tuple[str, ...]
    model: str
    facts: dict[str, Any]
    proof: str
    is_declared: bool = False
    echo: str | None = None
    config: dict[str, str] = field(default_factory=dict)
    processes: tuple[ServerProcess, ...] = field(default=(), repr=False)
    api_key: str | None = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        """Sha256 of the facts."""
        return fingerprint(self.facts)

    def check_alive(self) -> None:
        """Raise EngineError when one of our own servers has ended."""
        for process in self.processes:
            process.check_alive()

    def connect(self, resources: ResourceSettings, *, concurrency: int, only: str | None = None) -> Client:
        """Return a client of the endpoint, or of one of its servers."""
        return Client(
            [only] if only else self.base_urls,
            self.model,
            concurrency=concurrency,
            timeout_s=resources.request_timeout_s,
            check_alive=self.check_alive,
            echo=self.echo,
            api_key=self.api_key,
        )


async def probe_servers(engine: Engine, launch: ServerLaunch) -> None:
    """Ask each server what the evals will ask."""

    async def ask(url: str) -> None:
        async with engine.connect(launch.resources, concurrency=1, only=url) as client:
            await probe(client, launch.evals)

    await gather(*(ask(url) for url in engine.base_urls))


def check_facts(candidate: Candidate, facts: Mapping[str, Any], *, where: str) -> None:
    """Refuse a server that loaded something else than the candidate.

    Raises:
        EngineError: names the field, and what either side has.
    """
    if difference := find_difference(candidate.facts, facts):
        raise EngineError(
            f"{where}: {difference.field}: the candidate says {difference.expected!r}, the server loaded "
            f"{difference.actual!r}; run the optimize stage again"
        )


async def gather(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Await all; at the first failure cancel the others and raise that one: later errors are only its echo."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
