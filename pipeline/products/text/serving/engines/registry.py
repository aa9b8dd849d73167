"""Bring up the endpoint that a candidate is evaluated on, and take it down again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines import openai, transformers, vllm
from pipeline.products.text.serving.engines.engine import LOCAL, Engine, ServerLaunch
from pipeline.products.text.settings import EvalSettings, ResourceSettings
from pipeline.records.evaluations import Candidate

ENGINES: dict[str, Callable[[ServerLaunch], AbstractAsyncContextManager[Engine]]] = {
    "transformers": transformers.start,
    "vllm": vllm.start,
    "openai": openai.start,
}


@contextlib.asynccontextmanager
async def start_engine(
    candidate: Candidate,
    resources: ResourceSettings,
    *,
    evals: Mapping[str, EvalSettings],
    root: Path,
    logs: Path,
    host: str = LOCAL,
    port: int | None = None,
    num_engines: int = 1,
    engine_index: int = 0,
    traces: Path | None = None,
) -> AsyncIterator[tuple[Engine, Client]]:
    """Start or attach to the endpoint of a candidate; on leaving, nothing we started is left.

    Args:
        candidate: what to serve.
        resources: number of servers and time limits.
        evals: by name, the evals that will ask the endpoint. It may lack anything that they do not need.
        root: project root, which the checkpoint's path is relative to.
        logs: folder for the server logs.
        host: address that a server of ours listens at.
        port: that it listens at, where there is one server; None: a free one.
        num_engines: that run on this machine at once: they share its memory.
        engine_index: of this one among them: where there are GPUs enough, each has its own.
        traces: folder for traces of its servers; None: none is made.

    Raises:
        EngineError: a server did not come up, does not answer, is not what was asked for, or does not
            give what an eval needs.
    """
    launch = ServerLaunch(candidate, resources, evals, root, logs, host, port, num_engines, engine_index, traces)
    async with (
        ENGINES[candidate.serving.engine](launch) as engine,
        engine.connect(resources, concurrency=candidate.serving.concurrency) as client,
    ):
        yield engine, client
