"""A server that somebody else runs, reached over the OpenAI API; quantgate neither starts nor stops it.

Params.yaml declares what it serves, on its operator's word. The server is asked for its facts as far as
it has them: a quantgate server states all, vLLM its version, and in development mode its configuration.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pipeline.errors import EngineError, RequestError
from pipeline.products.text.serving.addresses import strip_address
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.engine import Engine, ServerLaunch, check_facts
from pipeline.products.text.serving.readiness import check_context, probe
from pipeline.products.text.serving.vllm_facts import read_kernels, read_resolved
from pipeline.products.text.settings import EvalSettings
from pipeline.records.evaluations import Candidate
from pipeline.records.fingerprints import SECTIONS

FACTS_TIMEOUT_S = 10.0
MAX_FACTS_TRIES = 3  # one that is busy for a moment would be another server without them; one that has none says so
MAX_REFUSALS = 2  # connections refused before the server counts as not started
DECLARED = "declared by the settings, not proved by the server"


@contextlib.asynccontextmanager
async def start(launch: ServerLaunch) -> AsyncIterator[Engine]:
    """Attach to the server that a candidate names.

    Raises:
        EngineError: no such server, it serves no such model, or does not give what an eval needs.
    """
    candidate, serving = launch.candidate, launch.candidate.serving
    if not serving.base_url or not serving.model:
        raise EngineError(
            f"{candidate.name}: engine openai needs base_url and model, got {serving.base_url!r} and {serving.model!r}"
        )
    url, key = strip_address(serving.base_url), read_key(candidate)
    async with Client(
        [url],
        serving.model,
        concurrency=1,
        timeout_s=launch.resources.request_timeout_s,
        max_refusals=MAX_REFUSALS,
        api_key=key,
    ) as client:
        await _check_listing(client, url, launch)
    async with Client(
        [url], serving.model, concurrency=1, timeout_s=FACTS_TIMEOUT_S, max_tries=MAX_FACTS_TRIES, api_key=key
    ) as client:
        facts, proof = await read_facts(client)
    if "checkpoint" in facts:
        # its way of serving is its operator's choice, the weights are what is judged
        check_facts(candidate, {"checkpoint": facts["checkpoint"]}, where=url)
        facts = adopt(candidate, facts)
    engine = Engine(
        (url,),
        serving.model,
        candidate.facts | facts,
        proof or DECLARED,
        is_declared="checkpoint" not in facts,
        api_key=key,
    )
    async with engine.connect(launch.resources, concurrency=serving.concurrency) as client:
        await probe(client, launch.evals, attached_as=candidate.name)
    yield engine


def read_key(candidate: Candidate) -> str | None:
    """Return the key of a candidate's endpoint from its environment variable; None when it needs none.

    Raises:
        EngineError: the variable is not set.
    """
    name = candidate.serving.api_key_env
    if name is None:
        return None
    if not (key := os.environ.get(name)):
        raise EngineError(
            f"candidates.{candidate.name}.engine.api_key_env: expected the key in the environment "
            f"variable {name}, found none; set it"
        )
    return key


def adopt(candidate: Candidate, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a quantgate server as those of a candidate that is attached to it.

    How it serves is its operator's choice, and so a fact about the engine.
    """
    served = {f"serving.{key}": value for key, value in facts["serving"].items()}
    return {**facts, "serving": candidate.serving.identity(), "engine": facts["engine"] | served}


async def read_facts(client: Client) -> tuple[dict[str, Any], str]:
    """Ask a server for its facts by section, as far as it states them, and return with them what they prove."""
    server_facts = (await _get(client, "/v1/fingerprint")).get("facts")
    if isinstance(server_facts, dict) and _are_facts(server_facts):
        return server_facts, "computed by the server from the files and objects it loaded"
    if not (version := (await _get(client, "/version")).get("version")):
        return {}, ""
    facts: dict[str, Any] = {"libraries": {"vllm": str(version).split("+")[0]}}
    info = await _get(client, "/server_info?config_format=json")
    if resolved := read_resolved(info):
        facts["engine"] = resolved | await read_kernels(client, info)
    return facts, f"{DECLARED}, but for its version"


def _are_facts(facts: Mapping[str, Any]) -> bool:
    """Say whether a server states all of its facts: half of them prove nothing."""
    sections = [facts.get(name) for name in SECTIONS]
    return all(isinstance(section, dict) for section in sections) and isinstance(facts["checkpoint"].get("digest"), str)


async def _get(client: Client, path: str) -> Mapping[str, Any]:
    try:
        answer = await client.get(path)
    except RequestError:
        return {}  # it need not offer that
    except EngineError:
        try:
            await client.list_models()
        except EngineError as error:
            raise EngineError(f"{error}; expected the server that was there before") from None
        return {}  # it is there, and fails at what it does not know
    return answer if isinstance(answer, dict) else {}


async def _check_listing(client: Client, url: str, launch: ServerLaunch) -> None:
    """Check that a server is there, that it serves the model, and that its context is long enough."""
    model, where = client.model, f"candidates.{launch.candidate.name}.engine"
    try:
        listed = await client.list_models()
    except EngineError as error:
        raise EngineError(
            f"{error}; expected a running server of the OpenAI API: start it, or correct {where}.base_url"
        ) from None
    if model not in listed:
        raise EngineError(
            f"{url}/v1/models: expected {model!r} among the served models, got {list(listed)!r}; correct {where}.model"
        )
    evals: Mapping[str, EvalSettings] = launch.evals
    check_context(launch.candidate.serving.context_length, listed[model], evals, where=f"{model!r} at {url}")
