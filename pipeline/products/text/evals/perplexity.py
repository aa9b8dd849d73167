"""Likelihood of held-out documents: the material for perplexity, bits per byte and divergence.

Each document is scored on its own, behind one BOS (or EOS) token. Windows predict every token exactly
once, with as much left context as fits: the rolling windows of lm-eval's `loglikelihood_rolling`. The
numbers are lm-eval's where the tokenizer adds no BOS by itself. Where it adds one, lm-eval counts the
probability of a second BOS. Per-token top-k log-probabilities
go to `<eval>.npz`, from which the gate stage computes KL against the reference.

Not covered: turning scores into metrics, which the gate does.
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.evalsets.cases import DocumentCase
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.framing import read_frame, rolling_windows
from pipeline.products.text.evals.places import Places
from pipeline.products.text.evals.runner import run_cases
from pipeline.products.text.serving.client import MAX_SCORE_TOKENS, TokenScores
from pipeline.products.text.serving.failures import prepare
from pipeline.products.text.settings import PerplexityEval
from pipeline.records.evaluations import CaseRecord
from pipeline.records.files import replace_whole
from pipeline.running.shards import choose_batches

PROMPT_CHARS = 2000  # of a document's text kept in its record


async def evaluate(context: EvalContext) -> list[CaseRecord]:
    """Score every document, and write its top-k arrays.

    Scores of a record: nll_nats and nll_bits (sums over the document), num_tokens, num_bytes (UTF-8).
    """
    settings = context.settings
    assert isinstance(settings, PerplexityEval) and context.evalset is not None
    cases: Sequence[DocumentCase] = context.evalset.cases
    with prepare(context.name):
        frame = await read_frame(context.client, context.checkpoint)
        texts = await context.client.tokenize([c.text for c in cases], add_special_tokens=False)
    tokens = {case.id: frame.frame_document(ids) for case, ids in zip(cases, texts, strict=True)}
    windows = {
        name: rolling_windows(ids, first=frame.first, max_tokens=context.context_length) for name, ids in tokens.items()
    }
    groups = _group(cases, windows)
    if context.shard is not None:
        groups = choose_batches(groups, context.shard, lambda group: [case.cluster for case in group])
    asked: dict[str, asyncio.Task[dict[str, list[TokenScores]]]] = {}  # by the first case of a group
    leaders = {case.id: group for group in groups for case in group}
    attachments: dict[str, str] = {}

    async def ask(group: Sequence[DocumentCase]) -> dict[str, list[TokenScores]]:
        flat = [window for case in group for window, _ in windows[case.id]]
        scores = iter(await context.client.score(flat, top_logprobs=settings.top_logprobs))
        return {case.id: [next(scores) for _ in windows[case.id]] for case in group}

    async def judge(case: DocumentCase) -> CaseRecord:
        start = time.perf_counter()
        group = leaders[case.id]
        if group[0].id not in asked:
            asked[group[0].id] = asyncio.create_task(ask(group))
        scores = (await asyncio.shield(asked[group[0].id]))[case.id]
        parts = [_last(s, n) for s, (_, n) in zip(scores, windows[case.id], strict=True)]
        attachments[case.id] = _encode(parts)
        nll = -math.fsum(float(x) for part in parts for x in part.token_logprobs)
        return CaseRecord(
            case_id=case.id,
            input_digest=case.digest,
            cluster=case.cluster,
            buckets=case.buckets,
            prompt=case.text[:PROMPT_CHARS],
            output="",
            scores={
                "nll_nats": nll,
                "nll_bits": nll / math.log(2),
                "num_tokens": len(tokens[case.id]),
                "num_bytes": len(case.text.encode()),
            },
            latency_s=time.perf_counter() - start,
            fingerprint=context.fingerprint,
        )

    own = [case for group in groups for case in group]
    # all at once: what waits for its group takes no place of another's
    whole = replace(context, places=Places(max(1, len(own))))
    try:
        records = {r.case_id: r for r in await run_cases(whole, own, judge, attachments=attachments)}
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
    if len(attachments) == len(cases):
        path = context.folder / f"{context.name}.npz"
        await asyncio.to_thread(_write_arrays, path, [attachments[c.id] for c in cases])  # a second for 50 MiB
    return [records[c.id] for c in cases if c.id in records]


def _group(cases: Sequence[DocumentCase], windows: Mapping[str, Sequence[Any]]) -> list[list[DocumentCase]]:
    """Return documents that are asked together, which every run must do alike: a request may change a last bit.

    Documents of like length share forward passes, and then little of those is padding.
    """
    sizes = {case.id: sum(len(window) for window, _ in windows[case.id]) for case in cases}
    groups: list[list[DocumentCase]] = []
    room = 0
    for case in sorted(cases, key=lambda case: sizes[case.id], reverse=True):
        if sizes[case.id] > room:
            groups.append([])
            room = MAX_SCORE_TOKENS
        groups[-1].append(case)
        room -= sizes[case.id]
    return groups


def _last(scores: TokenScores, count: int) -> TokenScores:
    return TokenScores(scores.token_logprobs[-count:], scores.top_ids[-count:], scores.top_logprobs[-count:])


def _encode(parts: list[TokenScores]) -> str:
    """Return a document's arrays as text that the journal can hold."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        token_logprobs=np.concatenate([p.token_logprobs for p in parts]),
        top_ids=np.concatenate([p.top_ids for p in parts]),
        top_logprobs=np.concatenate([p.top_logprobs for p in parts]),
    )
    return base64.b64encode(buffer.getvalue()).decode()


def _write_arrays(path: Path, encoded: list[str]) -> None:
    documents = [np.load(io.BytesIO(base64.b64decode(text))) for text in encoded]
    lengths = [len(d["token_logprobs"]) for d in documents]
    arrays = {"offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)}
    for name in ("token_logprobs", "top_ids", "top_logprobs"):
        arrays[name] = np.concatenate([d[name] for d in documents])
    # np.savez would write the time of day into the file, and equal arrays would differ
    with replace_whole(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array)
            info = zipfile.ZipInfo(f"{name}.npy")
            archive.writestr(
                info, buffer.getbuffer(), zipfile.ZIP_DEFLATED, compresslevel=1
            )  # more takes twice as long
