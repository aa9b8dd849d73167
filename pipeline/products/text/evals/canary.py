"""The canary: prompts that every candidate answers several ways, so that its paths can be compared.

All are greedy (`canary_prompts.py` picks them). "alone" asks one request at a time, "loaded" asks all at once at the
concurrency that is deployed, "again" repeats that. Several servers share the prompts: each is asked its part, one at a
time, then as many at once as it has, which may be fewer than are deployed. So do the replicas of a cluster. A candidate
with drafts is asked first without them, on a server of its own: "plain alone" and "plain loaded". Where the endpoint
gives token ids and scores, each token's margin over the second most likely one is kept too. A small margin marks a
token at risk even where nothing flipped.

What the differences mean is for the gate (`pipeline/products/text/findings/canary.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.errors import EvidenceError, RequestError
from pipeline.products.text.evals import generation
from pipeline.products.text.evals.calls import format_reply
from pipeline.products.text.evals.canary_prompts import Prompt
from pipeline.products.text.serving.client import Client, Reply
from pipeline.products.text.serving.engines.engine import Engine
from pipeline.products.text.settings import ResourceSettings
from pipeline.records.canary import (
    CanaryAnswer,
    CanaryFile,
    CanaryPart,
    CanaryRecord,
    count_unstable,
    digest_behaviour,
)
from pipeline.records.digests import digest_file
from pipeline.records.record_files import write_cases
from pipeline.running.progress import Progress

CANARY = "canary.jsonl"


async def ask_canary(
    engine: Engine,
    client: Client,
    prompts: Mapping[int, Prompt],
    resources: ResourceSettings,
    *,
    max_tokens: int,
    prefix: str = "",
) -> CanaryPart:
    """Ask prompts alone, loaded and again.

    Args:
        engine: the endpoint.
        client: of it, at the deployed concurrency.
        prompts: what to ask, by their place among all.
        resources: for a second client, with one request in flight.
        max_tokens: completion tokens a request.
        prefix: put before the name of each run.
    """
    progress = Progress(f"{prefix}canary", total=3 * len(prompts), unit="answers")
    async with engine.connect(resources, concurrency=1) as single:
        alone = await _ask(single, prompts, max_tokens, progress)
    loaded = await _ask(client, prompts, max_tokens, progress)
    again = await _ask(client, prompts, max_tokens, progress)
    runs = {f"{prefix}alone": alone, f"{prefix}loaded": loaded, f"{prefix}again": again}
    return CanaryPart(
        fingerprint=engine.fingerprint,
        records={
            place: CanaryRecord(
                case_id=prompt.case_id,
                input_digest=prompt.digest,
                answers={run: _build_answer(replies[place]) for run, replies in runs.items()},
            )
            for place, prompt in prompts.items()
        },
        prompt_tokens={place: reply.prompt_token_ids for place, reply in loaded.items() if reply.prompt_token_ids},
    )


def join_parts(fingerprint: str, parts: Sequence[CanaryPart]) -> CanaryPart:
    """Join what several endpoints answered.

    Raises:
        EvidenceError: an endpoint of another fingerprint answered a part.
    """
    if foreign := next((part for part in parts if part.fingerprint != fingerprint), None):
        raise EvidenceError(
            f"canary: expected all answers of fingerprint {fingerprint[:12]}, got some of {foreign.fingerprint[:12]}; "
            "run this stage again"
        )
    return CanaryPart(
        fingerprint=fingerprint,
        records={place: record for part in parts for place, record in part.records.items()},
        prompt_tokens={place: tokens for part in parts for place, tokens in part.prompt_tokens.items()},
    )


async def measure_margins(client: Client, asked: CanaryPart, run: str) -> list[CanaryRecord]:
    """Return the records in the order of the prompts, with the margins of one run's tokens where they can be known.

    All are scored by one client, in this order: who shares a batch moves a margin's last digits.
    """
    records = dict(sorted(asked.records.items()))
    known = {
        place: (asked.prompt_tokens[place], tokens)
        for place, record in records.items()
        if place in asked.prompt_tokens and (tokens := record.answers[run].token_ids)
    }
    try:
        scores = await client.score([[*prompt, *tokens] for prompt, tokens in known.values()], top_logprobs=2)
    except RequestError:
        return list(records.values())
    for (place, (prompt, _)), score in zip(known.items(), scores, strict=True):
        top = score.top_logprobs[len(prompt) - 1 :]
        margins = tuple(round(float(gap), 6) for gap in top[:, 0] - top[:, 1])
        records[place] = records[place].model_copy(update={"margins": {run: margins}})
    return list(records.values())


def merge_records(first: Sequence[CanaryRecord], second: Sequence[CanaryRecord]) -> list[CanaryRecord]:
    """Put the runs of two servers side by side, prompt by prompt."""
    if not first:
        return list(second)
    return [
        b.model_copy(update={"answers": a.answers | b.answers, "margins": a.margins | b.margins})
        for a, b in zip(first, second, strict=True)
    ]


def write_canary(folder: Path, records: Sequence[CanaryRecord], num_asked: int) -> CanaryFile | None:
    """Write the records into an evaluation's folder; None where there are none.

    Args:
        folder: of the evaluation.
        records: in the order of the prompts.
        num_asked: prompts that params.yaml asks for.
    """
    if not records:
        return None
    write_cases(folder / CANARY, records)
    return CanaryFile(
        num_asked=num_asked,
        num_prompts=len(records),
        num_unstable=count_unstable(records),
        records=CANARY,
        sha256=digest_file(folder / CANARY),
        behaviour=digest_behaviour(records),
    )


async def _ask(client: Client, prompts: Mapping[int, Prompt], max_tokens: int, progress: Progress) -> dict[int, Reply]:
    async def ask(prompt: Prompt) -> Reply:
        limit = min(max_tokens, prompt.max_tokens or max_tokens)
        try:
            reply = await generation.ask(
                client, prompt.content, max_tokens=limit, stops=prompt.stops, tools=prompt.tools, return_token_ids=True
            )
        except RequestError as error:
            raise RequestError(f"canary: case {prompt.case_id!r}: {error}") from error
        progress.advance()
        return reply

    return dict(zip(prompts, await asyncio.gather(*map(ask, prompts.values())), strict=True))


def _build_answer(reply: Reply) -> CanaryAnswer:
    return CanaryAnswer(text=format_reply(reply), token_ids=reply.token_ids)
