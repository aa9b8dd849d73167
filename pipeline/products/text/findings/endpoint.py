"""Did the endpoint do the work that it is judged by?

Records can be whole, sealed and paired, and still be no evidence: a server that says nothing passes
every case in which doing nothing is right, and one that runs the reference's weights under the
candidate's name loses nothing. Both are refused here, with what gave them away.

Not covered: an endpoint that runs some third model; what it loses is measured like any other loss.
"""

from __future__ import annotations

import math

import numpy as np

from pipeline.errors import EvidenceError
from pipeline.gate.pairing import Evidence, PairedCases
from pipeline.products.text.findings.divergence import load_top_tokens
from pipeline.records.digests import TEXT_FILES
from pipeline.records.evaluations import Checkpoint

NUM_DIGEST_CHARS = 12
# mean difference of a log-probability that rounding explains: 8e-7 between vLLM and transformers in float32, where
# INT4 makes 0.03; in 16 bits rounding makes as much as that, and nothing can be told
ROUNDING_NATS = 1e-5


def check_silence(evidence: Evidence) -> list[str]:
    """Return the evals that generate text and in which no reply had any, one sentence each."""
    silent = {
        name: len(records)
        for name, records in evidence.records.items()
        if evidence.evaluation.evals[name].kind != "perplexity" and not any(r.output.strip() for r in records)
    }
    return [
        f"{name}: all {count} replies of {evidence.candidate.name} are empty, and silence is no evidence; look at "
        "what its endpoint answers, and run `dvc repro`"
        for name, count in silent.items()
    ]


def check_weights(reference: Evidence, candidate: Evidence, pairs: PairedCases, eval_name: str) -> str | None:
    """Say that a declared endpoint answers with the reference's weights when its likelihoods show it, else None.

    Other weights move the log-probabilities by more than rounding does. Checkpoints that hold the same files of
    weights may well agree, and so may an endpoint that has proved what it loaded: neither is looked at.

    Args:
        reference: of the reference.
        candidate: of the candidate.
        pairs: documents of both.
        eval_name: an eval of kind `perplexity`.
    """
    ours, theirs = (side.candidate.checkpoint for side in (reference, candidate))
    if not candidate.evaluation.is_declared or _hold_same_weights(ours, theirs):
        return None
    gap = _measure_gap(reference, candidate, pairs, eval_name)
    if gap >= ROUNDING_NATS:
        return None
    return (
        f"{eval_name}: the endpoint answers with the reference's weights: over {len(pairs.reference)} documents "
        f"the log-probabilities differ by {gap:.2g} nat a token, which is rounding, although the checkpoints "
        f"differ ({ours.digest[:NUM_DIGEST_CHARS]} and {theirs.digest[:NUM_DIGEST_CHARS]}); have it serve "
        f"{theirs.path!r} and run `dvc repro -f -s evaluate@{candidate.candidate.name}`, or give both candidates "
        "one checkpoint if theirs hold the same numbers"
    )


def describe_blindness(reference: Evidence, candidate: Evidence) -> str | None:
    """Say that nothing could show whose weights an attached endpoint runs, else None."""
    kinds = {file.kind for file in candidate.evaluation.evals.values()}
    ours, theirs = (side.candidate.checkpoint for side in (reference, candidate))
    if candidate.candidate.serving.engine != "openai" or "perplexity" in kinds or _hold_same_weights(ours, theirs):
        return None
    return (
        "no eval of kind perplexity: whether its endpoint answers with the reference's weights could not be told apart"
    )


def describe_other_prompts(reference: Checkpoint, candidate: Checkpoint) -> str | None:
    """Say which file that makes prompts of texts differs from the reference's, else None."""
    both = sorted(reference.files.keys() & candidate.files.keys() & {"chat_template.jinja", "tokenizer.json"})
    others = [name for name in both if reference.files[name] != candidate.files[name]]
    if not others:
        return None
    return f"its {' and '.join(others)} differs from the reference's: it is asked by other prompts"


def holds_same_model(first: Checkpoint, second: Checkpoint) -> bool:
    """Tell whether two checkpoints answer alike: weights, configuration and everything about text are the same.

    Other files of a folder, such as a licence, change no answer.
    """
    read = {"config.json", *TEXT_FILES}
    ours, theirs = ({n: d for n, d in side.files.items() if n in read} for side in (first, second))
    return first.digest == second.digest or (_hold_same_weights(first, second) and ours == theirs)


def _hold_same_weights(first: Checkpoint, second: Checkpoint) -> bool:
    files = [
        {name: digest for name, digest in side.files.items() if name.endswith(".safetensors")}
        for side in (first, second)
    ]
    return first.digest == second.digest or (bool(files[0]) and files[0] == files[1])


def _measure_gap(reference: Evidence, candidate: Evidence, pairs: PairedCases, eval_name: str) -> float:
    """Return by how much the log-probabilities of the documents' tokens differ: the mean of |difference|, in nat.

    Infinite where the arrays beside the records are of other tokens; without arrays the documents' sums have to do.
    """
    try:
        ours, theirs = (
            load_top_tokens(side.folder / f"{eval_name}.npz", num_docs=len(pairs.reference))
            for side in (reference, candidate)
        )
    except EvidenceError:
        gaps = [
            (abs(a.scores["nll_nats"] - b.scores["nll_nats"]), a.scores["num_tokens"])
            for a, b in zip(pairs.reference, pairs.candidate, strict=True)
        ]
        return sum(gap for gap, _ in gaps) / sum(tokens for _, tokens in gaps)
    if ours.logprobs.shape != theirs.logprobs.shape:
        return math.inf
    rows = [slice(theirs.offsets[i], theirs.offsets[i + 1]) for i in pairs.candidate_order]
    return float(np.abs(ours.logprobs - np.concatenate([theirs.logprobs[part] for part in rows])).mean())
