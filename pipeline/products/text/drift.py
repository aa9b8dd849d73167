"""Is a live endpoint still what was evaluated? Ask it again what the evaluation asked, and compare the answers.

There are two proofs. The fingerprint compares the facts that the server states, section by section, and the
fingerprint that its replies carry. A vLLM that was started as evaluated carries one that is known beforehand. The
behaviour is the first turn of cases spread over the evals that chat, at temperature 0. The recorded answers are the
evaluation's own, so nothing has to be prepared. Not covered: speed, and answers beyond the first turn.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.evalsets.cases import ToolCallCase, TrajectoryCase, spread
from pipeline.gate.rates import predictive_quantile
from pipeline.products.text.evals.calls import declare_tools, format_reply
from pipeline.products.text.first_turns import load_evaluated, read_first_turns
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.openai import adopt, read_facts
from pipeline.products.text.serving.vllm_config import CONFIG_FILE
from pipeline.products.text.settings import TextProduct
from pipeline.records.differences import classify_difference
from pipeline.records.evaluations import Candidate, Evaluation
from pipeline.records.fingerprints import SECTIONS, find_differences, fingerprint
from pipeline.records.record_files import read_record

CONCURRENCY = 8
_ECHOED_BY_VLLM = ("checkpoint", "serving", "libraries")  # what is known of it before it starts


@dataclass(frozen=True)
class Changed:
    """One case that the endpoint answers otherwise than it was evaluated."""

    eval_name: str
    case_id: str
    kind: str
    recorded: str
    answered: str


@dataclass(frozen=True)
class Comparison:
    """What a server says it is, beside what was evaluated.

    Attributes:
        differences: one sentence for each field that differs, the most telling first.
        compared: sections of the facts that both sides state, or that the echo covers.
        missing: sections that could not be compared.
        is_echoed: every reply carried the fingerprint that was expected.
    """

    differences: tuple[str, ...]
    compared: tuple[str, ...]
    missing: tuple[str, ...]
    is_echoed: bool = False

    @property
    def is_whole(self) -> bool:
        """The fingerprint as a whole agrees: all facts do, or every reply carried it."""
        return not self.differences and (self.is_echoed or not self.missing)


@dataclass(frozen=True)
class Drift:
    """The differences. Up to `num_explained` changed answers are within the floor: as many change from run to run."""

    fingerprint: Comparison
    num_asked: int
    num_explained: int
    changed: tuple[Changed, ...]


async def check_drift(
    candidate: Candidate, product: TextProduct, client: Client, *, root: Path, num_cases: int
) -> Drift:
    """Compare a live endpoint with the last evaluation of a candidate.

    Args:
        candidate: what was built, and how it is served.
        product: names the evals; their evalsets must be those that were evaluated.
        client: of the endpoint.
        root: project root, with `build/`.
        num_cases: how many cases of each eval that chats to ask, spread evenly.

    Raises:
        EvidenceError: there is no evaluation to compare with, or its evalset was edited since.
        EngineError: the endpoint does not answer.
    """
    folder = root / product.build / "evaluations" / candidate.name
    evaluation = read_record(folder / "evaluation.json", Evaluation)
    server, _ = await read_facts(client)
    if "serving" in server and candidate.serving.engine == "openai":
        server = adopt(candidate, server)
    changed, num_asked = [], 0
    echoes: set[str] = set()
    for name, settings in product.chat_evals.items():
        if name in evaluation.evals:
            recorded = read_first_turns(folder, evaluation, name)
            evalset = load_evaluated(settings, evaluation.evals[name], root)
            asked = spread(evalset.cases, num_cases)
            tools = declare_tools(evalset.card.tools, settings)
            changed += await _ask_again(client, name, asked, recorded, product, tools, echoes)
            num_asked += len(asked)
    if not num_asked:
        raise EvidenceError(
            f"{folder}: expected an evaluation of kind tool_calls or trajectories, found "
            f"{', '.join(evaluation.evals) or 'none'}; a canary needs an eval that chats"
        )
    config = product.build / "evaluations" / candidate.name / "config" / CONFIG_FILE
    return Drift(
        _compare_fingerprints(candidate, evaluation, server, echoes, config=config),
        num_asked,
        _count_explained(evaluation, candidate, product, num_asked),
        tuple(changed),
    )


def _count_explained(evaluation: Evaluation, candidate: Candidate, product: TextProduct, num_asked: int) -> int:
    """Return how many changed answers the floor of the candidate's canary explains; none where it must be exact."""
    canary = evaluation.canary
    if canary is None or not canary.num_unstable or product.candidates[candidate.name].exact:
        return 0  # a server that answers alike from run to run is expected to go on so
    return predictive_quantile(canary.num_unstable, canary.num_prompts, num_asked, alpha=product.gate.alpha)


def _compare_fingerprints(
    candidate: Candidate, evaluation: Evaluation, server: dict[str, Any], echoes: set[str], *, config: Path
) -> Comparison:
    """Compare the facts of a server, and the fingerprints in its replies, with those of the evaluation."""
    evaluated = evaluation.served_by
    differences = [
        f"{d.field}: evaluated {d.expected!r}, the endpoint has {d.actual!r}"
        for d in find_differences(evaluated, server)
    ]
    compared = {section for section in SECTIONS if section in evaluated and section in server}
    is_echoed = False
    if compared != set(SECTIONS) and (covered := _list_echoed(candidate, evaluated)):
        expected = fingerprint({section: evaluated[section] for section in covered})
        is_echoed = echoes == {expected}
        compared |= set(covered) if is_echoed else set()
        differences += _name_wrong_echo(candidate, expected, echoes, config)
    return Comparison(
        tuple(differences),
        tuple(s for s in SECTIONS if s in compared),
        tuple(s for s in SECTIONS if s not in compared),
        is_echoed,
    )


def _list_echoed(candidate: Candidate, evaluated: dict[str, Any]) -> list[str]:
    """Return the sections that a server's replies vouch for; none for a server that somebody else started."""
    known = {"transformers": SECTIONS, "vllm": _ECHOED_BY_VLLM}.get(candidate.serving.engine, ())
    return [section for section in known if section in evaluated]


def _name_wrong_echo(candidate: Candidate, expected: str, echoes: set[str], config: Path) -> list[str]:
    """Say that replies carried another fingerprint than was expected, or none; nothing when they all carried it.

    A vLLM that was started as evaluated carries it in each reply. In place of an embedded server something else may
    answer, which knows no fingerprint of ours: there another one of our own alone is a difference.
    """
    is_vllm = candidate.serving.engine == "vllm"
    wrong = sorted(echo for echo in echoes - {expected} if is_vllm or len(echo) == len(expected))
    if not wrong:
        return []
    came = repr(wrong[-1][:12]) if wrong[-1] else "nothing"
    remedy = f": it was not started with {config}; serve that" if is_vllm else ""
    return [f"system_fingerprint: evaluated {expected[:12]!r}, the endpoint says {came}{remedy}"]


async def _ask_again(
    client: Client,
    eval_name: str,
    cases: list[ToolCallCase | TrajectoryCase],
    recorded: dict[str, str],
    product: TextProduct,
    tools: list[dict[str, Any]] | None,
    echoes: set[str],
) -> list[Changed]:
    """Return the cases that are answered otherwise; what the replies say has answered is added to `echoes`."""

    async def ask(case: ToolCallCase | TrajectoryCase) -> Changed | None:
        messages = [message.model_dump() for message in case.messages]
        reply = await client.chat(messages, max_tokens=product.serving.max_tokens, tools=tools)
        echoes.add(reply.fingerprint)
        answered = format_reply(reply)
        kind = classify_difference(recorded[case.id], answered)
        return Changed(eval_name, case.id, kind, recorded[case.id], answered) if kind else None

    return [changed for changed in await asyncio.gather(*map(ask, cases)) if changed is not None]
