"""Log-likelihoods of given token sequences under a loaded model, each shared prefix computed once.

Sequences are packed into rows. A row is a tree one level deep: a prefix and the suffixes that
follow it. The answers of a multiple-choice question share its text, for example. They are laid out one after
another. Positions and an attention mask let a suffix see the prefix and itself only. A sequence
that shares nothing is a row of its own and runs under the plain causal kernel. So is every sequence of a model with
sliding windows, whose layers need a mask each: they build it for plain rows themselves.

Reports log-softmax of the raw logits in float32, as `model(...)` gives them: no sampling settings
take part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pipeline.products.text.serving.paged_attention import supports
from pipeline.products.text.serving.sizing import SLICE_LOGITS

MIN_SHARED_TOKENS = 16  # a shorter common prefix does not pay for a mask
MAX_ROW_TOKENS = 2048  # longest row that several sequences are packed into


@dataclass(frozen=True)
class SequenceScores:
    """Scores of one sequence of n tokens; row i is about token i + 1 given the tokens before it."""

    token_logprobs: np.ndarray  # float32 [n - 1]
    top_ids: np.ndarray  # int32 [n - 1, k]
    top_logprobs: np.ndarray  # float32 [n - 1, k], descending


@dataclass
class _Row:
    """Token ids to feed, and which row position predicts each token of each sequence."""

    tokens: list[int]
    positions: list[int]
    segments: list[int]  # 0: prefix, otherwise the number of the suffix
    sources: dict[int, list[int]] = field(default_factory=dict)  # sequence -> row positions, in order

    @property
    def is_plain(self) -> bool:
        return self.segments[-1] == 0


def score_sequences(
    model: Any, sequences: list[list[int]], *, num_top: int, max_forward_tokens: int = 1024
) -> list[SequenceScores]:
    """Score each sequence's tokens from the second on.

    Args:
        model: a causal language model in eval mode with "sdpa" or "eager" attention.
        sequences: token ids, at least two each.
        num_top: how many of the most likely tokens to report at each place.
        max_forward_tokens: in one forward pass, padding included; a longer sequence has a pass of its own.

    Returns:
        One result per sequence, in the order given.
    """
    # equal sequences get equal scores to the last bit: a tie between answers must stay a tie
    numbers: dict[tuple[int, ...], int] = {}
    wanted = [numbers.setdefault(tuple(ids), len(numbers)) for ids in sequences]
    distinct = [list(ids) for ids in numbers]
    results: dict[int, SequenceScores] = {}
    with torch.inference_mode():
        for rows in _batch_rows(_pack_rows(distinct, may_share=supports(model.config)), max_forward_tokens):
            results.update(_score_rows(model, rows, distinct, num_top))
    return [results[i] for i in wanted]


def _pack_rows(sequences: list[list[int]], *, may_share: bool) -> list[_Row]:
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    rows, group, shared = [], [order[0]], len(sequences[order[0]])
    for index in order[1:]:
        common = _common_prefix(sequences[group[0]], sequences[index], shared)
        total = common + sum(len(sequences[i]) - common for i in [*group, index])
        if may_share and common >= MIN_SHARED_TOKENS and 2 * common >= shared and total <= MAX_ROW_TOKENS:
            group.append(index)
            shared = common
            continue
        rows.append(_make_row(sequences, group, shared))
        group, shared = [index], len(sequences[index])
    rows.append(_make_row(sequences, group, shared))
    return rows


def _common_prefix(first: list[int], second: list[int], limit: int) -> int:
    limit = min(limit, len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    return next(i for i in range(limit) if first[i] != second[i])


def _make_row(sequences: list[list[int]], group: list[int], shared: int) -> _Row:
    if len(group) == 1:
        shared = len(sequences[group[0]]) - 1  # the last token is predicted, never fed
    row = _Row(sequences[group[0]][:shared], list(range(shared)), [0] * shared)
    for number, index in enumerate(group, start=1):
        suffix = sequences[index][shared:-1]
        start = len(row.tokens)
        row.sources[index] = [*range(min(shared, len(sequences[index]) - 1)), *range(start, start + len(suffix))]
        row.tokens += suffix
        row.positions += range(shared, shared + len(suffix))
        row.segments += [number] * len(suffix)
    return row


def _batch_rows(rows: list[_Row], limit: int) -> Iterator[list[_Row]]:
    """Yield rows of similar length, plain and tree rows apart, at most `limit` padded tokens at once."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda r: (r.is_plain, len(r.tokens)), reverse=True):
        full = batch and (len(batch) + 1) * len(batch[0].tokens) > limit
        if full or (batch and row.is_plain != batch[0].is_plain):
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _score_rows(model: Any, rows: list[_Row], sequences: list[list[int]], num_top: int) -> dict[int, SequenceScores]:
    logits = model(**_inputs(rows, model), use_cache=False).logits
    width = logits.shape[1]
    flat = logits.view(-1, logits.shape[-1])
    # where: flat row of each prediction; target: the token it is asked about
    parts = [(i, [r * width + p for p in places]) for r, row in enumerate(rows) for i, places in row.sources.items()]
    where = torch.tensor([w for _, places in parts for w in places], device=flat.device)
    target = torch.tensor([t for i, _ in parts for t in sequences[i][1:]], device=flat.device)
    norm, ids, logprobs = _summarize(flat, num_top)
    chosen = (flat[where, target].float() - norm[where]).cpu().numpy()
    top_ids, top_logprobs = ids[where].cpu().numpy(), logprobs[where].cpu().numpy()
    results, start = {}, 0
    for index, places in parts:
        stop = start + len(places)
        results[index] = SequenceScores(chosen[start:stop], top_ids[start:stop], top_logprobs[start:stop])
        start = stop
    return results


def _summarize(logits: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log of the sum of exponentials, ids and log-probabilities of the most likely tokens, row by row.

    In slices: in float32 the logits of a large vocabulary take more memory than the model's own.
    """
    parts = []
    for rows in logits.split(max(1, SLICE_LOGITS // logits.shape[-1])):
        exact = rows.float()
        norm, top = exact.logsumexp(-1), exact.topk(num_top, dim=-1)
        parts.append((norm, top.indices.to(torch.int32), top.values - norm[:, None]))
    norms, ids, logprobs = zip(*parts, strict=True)
    return torch.cat(norms), torch.cat(ids), torch.cat(logprobs)


def _inputs(rows: list[_Row], model: Any) -> dict[str, torch.Tensor]:
    width = max(len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    for r, row in enumerate(rows):
        tokens[r, : len(row.tokens)] = torch.tensor(row.tokens)
    if rows[0].is_plain:
        # padding is on the right, so causality alone keeps it out of what is read
        return {"input_ids": tokens.to(model.device)}
    positions = torch.zeros_like(tokens)
    segments = torch.full_like(tokens, -1)
    for r, row in enumerate(rows):
        positions[r, : len(row.tokens)] = torch.tensor(row.positions)
        segments[r, : len(row.tokens)] = torch.tensor(row.segments)
    tokens, positions, segments = (tensor.to(model.device) for tensor in (tokens, positions, segments))
    same = segments[:, :, None] == segments[:, None, :]
    seen = (same | (segments[:, None, :] == 0)) & torch.ones_like(same[0]).tril()
    mask = torch.zeros(len(rows), 1, width, width, dtype=model.dtype, device=model.device)
    mask.masked_fill_(~seen[:, None], torch.finfo(model.dtype).min)
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
