"""Tripwires: how far the candidate's outputs moved from the reference's, right or wrong.

Divergence is far more sensitive than any task score and says where to look, but a changed output
is not a worse one: these numbers are shown against a threshold and never decide.

The KL divergence is computed per token on a coarse partition: every token that both sides list
among their top k is a class of its own, everything else is one class. Merging classes can only
lower a KL divergence (data-processing inequality), so the value is a lower bound of the full one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EvidenceError
from pipeline.gate.clusters import effective_clusters
from pipeline.gate.pairing import Evidence, PairedCases
from pipeline.gate.statistics import Bounds, proportion_interval, ratio_bounds
from pipeline.gate.wording import definition_of, format_threshold, format_value
from pipeline.records.differences import KINDS, classify_difference, first_difference
from pipeline.records.verdicts import Comparison

_CHUNK_TOKENS = 1024  # a chunk compares tokens x k x k ids; larger ones fall out of the cache of the CPU
_SMALLEST_MASS = 1e-7  # float32 log-probabilities can't resolve less in the merged class


@dataclass(frozen=True)
class TopTokens:
    """The most likely next tokens at every position of every document.

    Attributes:
        offsets: int64 [num_docs + 1], where each document starts.
        ids: int32 [num_tokens, k].
        logprobs: float32 [num_tokens, k], natural logarithm.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


def load_top_tokens(path: Path, *, num_docs: int) -> TopTokens:
    """Load the arrays that a perplexity eval keeps beside its records.

    Raises:
        EvidenceError: missing, damaged, or not about this many documents.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tokens = TopTokens(arrays["offsets"], arrays["top_ids"], arrays["top_logprobs"])
    except FileNotFoundError:
        raise EvidenceError(f"{path}: expected the top-token arrays, found no file") from None
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise EvidenceError(f"{path}: not a file of top-token arrays: {error}") from None
    if len(tokens.offsets) != num_docs + 1 or tokens.offsets[-1] != len(tokens.ids) or tokens.ids.ndim != 2:
        raise EvidenceError(
            f"{path}: expected arrays of {num_docs} documents, got {len(tokens.offsets) - 1} "
            f"with {len(tokens.ids)} tokens"
        )
    return tokens


def divergence_by_document(
    reference: TopTokens, candidate: TopTokens, candidate_order: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return per document: KL(reference || candidate) in nats, changed top-1 tokens, tokens.

    Args:
        reference: arrays of the reference.
        candidate: arrays of the candidate.
        candidate_order: for each document of the reference, its number in the candidate's arrays.

    Raises:
        EvidenceError: a document has another number of tokens on the other side.
    """
    sizes = np.diff(reference.offsets)
    if not np.array_equal(sizes, np.diff(candidate.offsets)[candidate_order]):
        raise EvidenceError("a document has another number of tokens on the candidate's side: unequal work")
    starts = candidate.offsets[candidate_order]
    rows = np.repeat(starts - reference.offsets[:-1], sizes) + np.arange(int(reference.offsets[-1]))
    kl, changed = _divergence_by_token(reference, candidate.ids[rows], candidate.logprobs[rows])
    document = np.repeat(np.arange(len(sizes)), sizes)
    kl_sums, changes = (np.bincount(document, weights=w, minlength=len(sizes)) for w in (kl, changed))
    return kl_sums.astype(np.float64), changes.astype(np.float64), sizes.astype(np.float64)


def _divergence_by_token(
    reference: TopTokens, ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    kl, changed = np.zeros(len(ids)), np.zeros(len(ids))
    for start in range(0, len(ids), _CHUNK_TOKENS):
        part = slice(start, start + _CHUNK_TOKENS)
        kl[part] = top_k_kl(reference.ids[part], reference.logprobs[part], ids[part], logprobs[part])
        rows = np.arange(len(ids[part]))
        top_reference = reference.ids[part][rows, reference.logprobs[part].argmax(axis=1)]
        changed[part] = top_reference != ids[part][rows, logprobs[part].argmax(axis=1)]
    return kl, changed


def top_k_kl(
    ids_p: NDArray[np.int32],
    logprobs_p: NDArray[np.float32],
    ids_q: NDArray[np.int32],
    logprobs_q: NDArray[np.float32],
) -> NDArray[np.float64]:
    """Return KL(p || q) per row on the partition {tokens in both lists} + {all others}, in nats.

    A lower bound of the full divergence, exact when the lists hold the same tokens and these carry
    all the mass. All arrays are [rows, k].

    Reference: T. Cover and J. Thomas, Elements of Information Theory (2006), section 2.7.
    """
    place = (ids_p[:, :, None] == ids_q[:, None, :]).argmax(axis=2)  # 0 also where it is nowhere
    shared = np.take_along_axis(ids_q, place, axis=1) == ids_p
    log_p = logprobs_p.astype(np.float64)
    log_q = np.take_along_axis(logprobs_q.astype(np.float64), place, axis=1)
    p = np.where(shared, np.exp(log_p), 0.0)
    q = np.where(shared, np.exp(log_q), 0.0)
    listed = np.where(shared, p * (log_p - log_q), 0.0).sum(axis=1)
    rest_p = np.maximum(1.0 - p.sum(axis=1), _SMALLEST_MASS)
    rest_q = np.maximum(1.0 - q.sum(axis=1), _SMALLEST_MASS)
    return np.maximum(listed + rest_p * np.log(rest_p / rest_q), 0.0)


def describe_differences(pairs: PairedCases) -> str:
    """Say in words where outputs first differ: the median character, of which kind, and how many by turn."""
    outputs = [(a.output, b.output) for a, b in zip(pairs.reference, pairs.candidate, strict=True)]
    places = [place for a, b in outputs if (place := first_difference(a, b)) is not None]
    if not places:
        return "no output differs"
    turns = Counter(turn for turn, _ in places)
    kinds = Counter(classify_difference(a, b) for a, b in outputs if a != b)
    sentence = (
        f"first difference at character {int(np.median([at for _, at in places]))} (median), by kind: "
        + ", ".join(f"{kind} {kinds[kind]}" for kind in KINDS if kinds[kind])
    )
    if len(turns) == 1:
        return sentence
    return sentence + ", by turn: " + ", ".join(f"{turn + 1}: {turns[turn]}" for turn in sorted(turns))


def measure_tripwires(
    reference: Evidence,
    candidate: Evidence,
    pairs: PairedCases,
    eval_name: str,
    *,
    names: Sequence[str],
    thresholds: dict[str, float],
    alpha: float,
) -> list[Comparison]:
    """Measure the tripwires of one eval; their outcome is always "reported".

    Raises:
        EvidenceError: the material for them is missing or does not fit.
    """
    kind = reference.evaluation.evals[eval_name].kind
    if not names:
        return []
    counts: dict[str, int] = {}
    note = ""
    if kind == "perplexity":
        values = _token_divergence(reference, candidate, pairs, eval_name)
        bounds = {
            name: ratio_bounds(values[name], values["num_tokens"], pairs.clusters, confidence=1 - alpha)
            for name in names
        }
    else:
        diverged = np.array([a.output != b.output for a, b in zip(pairs.reference, pairs.candidate, strict=True)])
        interval = proportion_interval(diverged.astype(np.float64), pairs.clusters, confidence=1 - 2 * alpha)
        bounds = {name: Bounds(float(diverged.mean()), *interval) for name in names}
        counts, note = {name: int(diverged.sum()) for name in names}, describe_differences(pairs)
    return [
        _report_tripwire(f"{eval_name}/{name}", bounds[name], counts.get(name), pairs, thresholds, note)
        for name in names
    ]


def _token_divergence(
    reference: Evidence, candidate: Evidence, pairs: PairedCases, eval_name: str
) -> dict[str, NDArray[np.float64]]:
    file, num_docs = f"{eval_name}.npz", len(pairs.reference)
    ours = _load_reference(reference.folder / file, num_docs, reference.evaluation.evals[eval_name].arrays_sha256)
    theirs = load_top_tokens(candidate.folder / file, num_docs=num_docs)
    kl, changed, tokens = divergence_by_document(ours, theirs, pairs.candidate_order)
    return {"kl_nats_per_token": kl, "top1_change_rate": changed, "num_tokens": tokens}


@lru_cache(maxsize=1)
def _load_reference(path: Path, num_docs: int, _digest: str | None) -> TopTokens:
    """Load the arrays that each candidate in turn is compared with; to unpack them takes longer than to compare."""
    return load_top_tokens(path, num_docs=num_docs)


def _report_tripwire(
    metric: str, bounds: Bounds, count: int | None, pairs: PairedCases, thresholds: dict[str, float], note: str
) -> Comparison:
    threshold = thresholds.get(metric)
    if threshold is None:
        sentence = "no threshold is set"
    elif bounds.harm > threshold:
        sentence = f"tripped: {format_value(metric, bounds.harm)}, threshold {format_threshold(metric, threshold)}"
    else:
        sentence = f"quiet: not above the threshold of {format_threshold(metric, threshold)}"
    return Comparison(
        metric=metric,
        bucket=None,
        reference=0.0,
        candidate=bounds.harm,
        unit=definition_of(metric).unit,
        n=len(pairs.reference),
        num_clusters=int(pairs.clusters.max()) + 1,
        effective_clusters=effective_clusters(np.ones(len(pairs.clusters)), pairs.clusters),
        b=count,
        c=None if count is None else 0,
        harm=bounds.harm,
        low=bounds.low,
        high=bounds.high,
        tolerance=None,
        outcome="reported",
        sentence="; ".join(filter(None, [sentence, note])),
    )
