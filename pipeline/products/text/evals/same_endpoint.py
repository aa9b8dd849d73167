"""Is an attached endpoint still the model whose answers a journal holds?

It states no facts, so that nothing else tells: its operator may have restarted it with other weights while an
evaluation was interrupted. It answers a few prompts at the start of each evaluation, one at a time. Where an answer is
another one, or there is nothing to ask, what was kept is forgotten. In half precision a server may answer itself
otherwise; then work is lost, and nothing else.

Not covered: a change between these answers and the last case; shards of a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.evalsets.cases import spread
from pipeline.products.text.evals import generation
from pipeline.products.text.evals.calls import format_reply
from pipeline.products.text.evals.canary_prompts import Prompt
from pipeline.products.text.serving.client import Client
from pipeline.records.digests import digest_json
from pipeline.records.files import write_text

NUM_ASKED = 8
ANSWERS = "endpoint.txt"  # in the journal's folder: a digest of the answers


async def forget_other_answers(client: Client, prompts: Sequence[Prompt], journals: Path, *, max_tokens: int) -> None:
    """Ask a few prompts, and remove the journals of a model that answered them otherwise.

    Args:
        client: of the endpoint, with one request in flight.
        prompts: of which some are asked.
        journals: folder of the candidate's journals.
        max_tokens: completion tokens a request.

    Raises:
        EngineError: the endpoint does not answer.
    """
    answers = [await _ask(client, prompt, max_tokens) for prompt in spread(prompts, NUM_ASKED)]
    told, path, kept = digest_json(answers), journals / ANSWERS, list(journals.glob("*.jsonl"))
    if kept and not (answers and path.is_file() and path.read_text(encoding="utf-8") == told):
        for journal in kept:
            journal.unlink()
        reason = "it answers otherwise than when it began" if answers else "no eval has it write, and so nothing tells"
        print(
            f"  the interrupted evaluation's answers are forgotten: the endpoint states no facts, and {reason}",
            file=sys.stderr,
        )
    write_text(path, told)


async def _ask(client: Client, prompt: Prompt, max_tokens: int) -> str:
    limit = min(max_tokens, prompt.max_tokens or max_tokens)
    reply = await generation.ask(client, prompt.content, max_tokens=limit, stops=prompt.stops, tools=prompt.tools)
    return format_reply(reply)
