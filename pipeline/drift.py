"""Is a live endpoint still what was evaluated? Ask it again what the evaluation asked, and compare the answers.

Two proofs: the fingerprint that the server computes of itself, where it offers one, and its behaviour:
the first turn of cases spread over the evals that chat, at temperature 0. The recorded answers are the
evaluation's own, so nothing has to be prepared. Not covered: speed, and answers beyond the first turn.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cases import ToolCallCase, TrajectoryCase
from pipeline.differences import classify_difference
from pipeline.errors import EvidenceError
from pipeline.evals.calls import declare_tools, describe_reply
from pipeline.fingerprints import find_difference, fingerprint
from pipeline.first_turns import load_evaluated, read_first_turns
from pipeline.gate.rates import predictive_quantile
from pipeline.params import Params
from pipeline.records import Candidate, Evaluation, read_record
from pipeline.serving.client import Client
from pipeline.serving.engines.openai import adopt, read_facts

CONCURRENCY = 8


@dataclass(frozen=True)
class Changed:
    """One case that the endpoint answers otherwise than it was evaluated."""

    eval_name: str
    case_id: str
    kind: str
    recorded: str
    answered: str


@dataclass(frozen=True)
class Drift:
    """What was found: why the fingerprint differs (None: it agrees, or there is none), and the changed answers.

    `num_explained` changed answers prove nothing: as many change from run to run of one server.
    """

    fingerprint: str | None
    has_fingerprint: bool
    num_asked: int
    num_explained: int
    changed: tuple[Changed, ...]


async def check_drift(candidate: Candidate, params: Params, client: Client, *, root: Path, num_cases: int) -> Drift:
    """Compare a live endpoint with the last evaluation of a candidate.

    Args:
        candidate: what was built, and how it is served.
        params: names the evals; their evalsets must be those that were evaluated.
        client: of the endpoint.
        root: project root, with `build/`.
        num_cases: how many cases of each eval that chats to ask, spread evenly.

    Raises:
        EvidenceError: there is no evaluation to compare with, or its evalset was edited since.
        EngineError: the endpoint does not answer.
    """
    folder = root / "build/evaluations" / candidate.name
    evaluation = read_record(folder / "evaluation.json", Evaluation)
    server, _ = await read_facts(client)
    if "serving" in server and candidate.serving.engine == "openai":
        server = adopt(candidate, server)
    changed, num_asked = [], 0
    for name, settings in params.chat_evals.items():
        if name in evaluation.evals:
            recorded = read_first_turns(folder, evaluation, name)
            evalset = load_evaluated(settings, evaluation.evals[name], root)
            asked = evalset.cases[:: max(1, len(evalset.cases) // num_cases)][:num_cases]
            tools = declare_tools(evalset.card.tools, settings)
            changed += await _ask_again(client, name, asked, recorded, params, tools)
            num_asked += len(asked)
    if not num_asked:
        raise EvidenceError(f"{folder}: expected an evaluation of kind tool_calls or trajectories, found "
                            f"{', '.join(evaluation.evals) or 'none'}; a canary needs an eval that chats")
    difference = name_difference(evaluation, server) or _compare_echo(candidate, client.echo)
    return Drift(difference, bool(server), num_asked,
                 _count_explained(evaluation, candidate, params, num_asked), tuple(changed))


def _count_explained(evaluation: Evaluation, candidate: Candidate, params: Params, num_asked: int) -> int:
    """Return how many changed answers the floor of the candidate's canary explains; none where it must be exact."""
    canary = evaluation.canary
    if canary is None or not canary.num_unstable or params.candidates[candidate.name].exact:
        return 0  # a server that answers alike from run to run is expected to go on so
    return predictive_quantile(canary.num_unstable, canary.num_prompts, num_asked, alpha=params.gate.alpha)


def name_difference(evaluation: Evaluation, server: dict[str, Any]) -> str | None:
    """Say in which field a server's own description differs from what was evaluated; None when it does not."""
    difference = find_difference(evaluation.served_by, server)
    if difference is None:
        return None
    return f"{difference.field}: evaluated {difference.expected!r}, the endpoint has {difference.found!r}"


def _compare_echo(candidate: Candidate, said: str | None) -> str | None:
    """Say that a vLLM was not started with the configuration that was evaluated, which has its replies say so."""
    expected = fingerprint(candidate.facts)
    if candidate.serving.engine != "vllm" or said is None or len(said) != len(expected) or said == expected:
        return None
    return f"system_fingerprint: evaluated {expected[:12]!r}, the endpoint says {said[:12]!r}"


async def _ask_again(
    client: Client, eval_name: str, cases: tuple[ToolCallCase | TrajectoryCase, ...], recorded: dict[str, str],
    params: Params, tools: list[dict[str, Any]] | None,
) -> list[Changed]:
    async def ask(case: ToolCallCase | TrajectoryCase) -> Changed | None:
        messages = [message.model_dump() for message in case.messages]
        reply = await client.chat(messages, max_tokens=params.serving.max_tokens, tools=tools)
        answered = describe_reply(reply)
        kind = classify_difference(recorded[case.id], answered)
        return Changed(eval_name, case.id, kind, recorded[case.id], answered) if kind else None

    return [found for found in await asyncio.gather(*map(ask, cases)) if found is not None]
