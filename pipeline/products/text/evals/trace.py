"""The requests of a traced engine: a few prefills and a few decode steps, which nothing judges or times."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

from pipeline.errors import EngineError
from pipeline.products.text.evals.canary_prompts import Prompt
from pipeline.products.text.evals.generation import Content, ask
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.engine import Engine
from pipeline.products.text.settings import ResourceSettings
from pipeline.running.tracing import list_traces

NUM_REQUESTS = 4  # at once, to each server
NUM_TOKENS = 8  # completion tokens of each
_SEQUENCE = [list(range(3, 67))]  # token ids for evals that generate nothing


async def trace_engine(
    engine: Engine, resources: ResourceSettings, prompts: Sequence[Prompt], *, evaluation: Path
) -> None:
    """Trace every server of an engine on a few prompts, or on scores where no eval generates text.

    Args:
        engine: started with `traces/` of the evaluation as its folder for traces.
        resources: time limits.
        prompts: of the canary.
        evaluation: the folder of the evaluation.

    Raises:
        EngineError: a server refused, or wrote no trace.
        aiohttp.ClientError: one did not answer.
        TimeoutError: one took too long.
    """
    async with _profile(engine, resources.request_timeout_s):
        for url in engine.base_urls:
            async with engine.connect(resources, concurrency=NUM_REQUESTS, only=url) as client:
                await _ask(client, prompts)
    if len(list_traces(evaluation)) < len(engine.base_urls):
        raise EngineError(
            f"expected a trace of each of {len(engine.base_urls)} servers, found {len(list_traces(evaluation))}; an "
            "engine in a container needs the project's folder under the same path"
        )


@contextlib.asynccontextmanager
async def _profile(engine: Engine, timeout_s: float) -> AsyncIterator[None]:
    """Have all servers record what they do meanwhile; each has written its trace at the end."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as http:
        await _post(http, engine.base_urls, "/start_profile")
        try:
            yield
        finally:
            await _post(http, engine.base_urls, "/stop_profile")


async def _post(http: aiohttp.ClientSession, urls: tuple[str, ...], path: str) -> None:
    for url in urls:
        async with http.post(url + path) as response:
            if response.status != 200:
                answer = (await response.text())[:200]
                raise EngineError(f"{url}{path}: expected HTTP 200, got {response.status}: {answer}")


async def _ask(client: Client, prompts: Sequence[Prompt]) -> None:
    if not prompts:
        await client.score(_SEQUENCE, top_logprobs=1)
        return
    contents = [_renew(f"Trace {i}: ", prompt.content) for i, prompt in enumerate(prompts[:NUM_REQUESTS])]
    await asyncio.gather(*(ask(client, content, max_tokens=NUM_TOKENS) for content in contents))


def _renew(beginning: str, content: Content) -> Content:
    """Give a prompt another beginning: a server that has it in its cache would not compute it again."""
    if isinstance(content, str):
        return beginning + content
    return [{"role": "user", "content": beginning + content[-1]["content"]}]
