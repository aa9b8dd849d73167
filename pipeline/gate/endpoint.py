"""Did the endpoint do the work that it is judged by?

Records can be whole, sealed and paired, and still be no evidence: a server that says nothing passes
every case in which doing nothing is right, and one that runs the reference's weights under the
candidate's name loses nothing. Both are refused here, with what gave them away.

Not covered: an endpoint that runs some third model; what it loses is measured like any other loss.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.errors import EvidenceError
from pipeline.gate.divergence import load_top_tokens
from pipeline.gate.pairing import Evidence, PairedCases
from pipeline.records import Checkpoint

NUM_DIGEST_CHARS = 12


def check_silence(evidence: Evidence) -> list[str]:
    """Return the evals that generate text and in which no reply had any, one sentence each."""
    silent = {name: len(records) for name, records in evidence.records.items()
              if evidence.evaluation.evals[name].kind != "perplexity" and not any(r.output.strip() for r in records)}
    return [f"{name}: all {count} replies of {evidence.candidate.name} are empty, and silence is no evidence; look at "
            "what its endpoint answers, and run `dvc repro`" for name, count in silent.items()]


def check_weights(reference: Evidence, candidate: Evidence, pairs: PairedCases, eval_name: str) -> str | None:
    """Say that the candidate's endpoint answers with the reference's weights when its likelihoods show it, else None.

    Other weights move every log-probability: that not one of a whole eval differs in its last digit is no chance.
    Checkpoints that hold the same files of weights may well agree, and are not looked at.

    Args:
        reference: of the reference.
        candidate: of the candidate.
        pairs: documents of both.
        eval_name: an eval of kind `perplexity`.
    """
    ours, theirs = (side.candidate.checkpoint for side in (reference, candidate))
    if _hold_same_weights(ours, theirs):
        return None
    if any(a.scores.get("nll_nats") != b.scores.get("nll_nats")
           for a, b in zip(pairs.reference, pairs.candidate, strict=True)):
        return None
    if not _have_equal_arrays(reference.folder / f"{eval_name}.npz", candidate.folder / f"{eval_name}.npz", pairs):
        return None
    return (f"{eval_name}: the endpoint answers with the reference's weights: all {len(pairs.reference)} documents' "
            "log-probabilities are equal to the last digit, although the checkpoints differ "
            f"({ours.digest[:NUM_DIGEST_CHARS]} and {theirs.digest[:NUM_DIGEST_CHARS]}); have it serve "
            f"{theirs.path!r}, and run `dvc repro -f -s evaluate@{candidate.candidate.name}`")


def describe_blindness(reference: Evidence, candidate: Evidence) -> str | None:
    """Say that nothing could show whose weights an attached endpoint runs, else None."""
    kinds = {file.kind for file in candidate.evaluation.evals.values()}
    ours, theirs = (side.candidate.checkpoint for side in (reference, candidate))
    if candidate.candidate.serving.engine != "openai" or "perplexity" in kinds or _hold_same_weights(ours, theirs):
        return None
    return ("no eval of kind perplexity: whether its endpoint answers with the reference's weights could not be told "
            "apart")


def _hold_same_weights(first: Checkpoint, second: Checkpoint) -> bool:
    files = [{name: digest for name, digest in side.files.items() if name.endswith(".safetensors")}
             for side in (first, second)]
    return first.digest == second.digest or (bool(files[0]) and files[0] == files[1])


def _have_equal_arrays(reference: Path, candidate: Path, pairs: PairedCases) -> bool:
    """Tell whether the arrays beside the records agree too; where there are none, the records alone have to do."""
    try:
        ours, theirs = (load_top_tokens(path, num_docs=len(pairs.reference)) for path in (reference, candidate))
    except EvidenceError:
        return True
    if ours.logprobs.shape != theirs.logprobs.shape:
        return False
    rows = [slice(theirs.offsets[i], theirs.offsets[i + 1]) for i in pairs.candidate_order]
    return all(np.array_equal(mine, np.concatenate([other[part] for part in rows]))
               for mine, other in ((ours.ids, theirs.ids), (ours.logprobs, theirs.logprobs)))
