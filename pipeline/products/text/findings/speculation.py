"""Did speculation run, and was it worth asking for? Counts only; what it changed is for the paired cases to show."""

from __future__ import annotations

from pipeline.gate.pairing import Evidence
from pipeline.products.text.serving.vllm_config import counts_by_request
from pipeline.records.evaluations import CaseRecord
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculationCounts, sum_speculation


def check_acceptance(evidence: Evidence, min_acceptance: float | None) -> str | None:
    """Return the sentence of a candidate whose drafts are accepted too seldom, else None.

    Its answers may all be right: what speculation was asked for, speed, is not there.

    Args:
        evidence: of the candidate.
        min_acceptance: the smallest acceptance rate of drafted tokens that will do; None: any.
    """
    counts = evidence.evaluation.speculation
    if counts is None or not counts.num_drafted or min_acceptance is None or counts.acceptance_rate >= min_acceptance:
        return None
    return (
        f"{counts.num_accepted:,} of {counts.num_drafted:,} drafted tokens were accepted "
        f"({counts.acceptance_rate:.2%}), expected at least {min_acceptance:.2%} (min_acceptance); use a "
        "better draft or fewer tokens"
    )


def check_speculation(evidence: Evidence) -> list[str]:
    """Return why a candidate's speculation is not what was asked for, one sentence each."""
    asked, counts = evidence.candidate.serving.speculative, evidence.evaluation.speculation
    if asked is None:
        return []
    where = f"speculation of {evidence.candidate.name}"
    recorded = sum_speculation(r.speculation for records in evidence.records.values() for r in records)
    serving = evidence.candidate.serving
    # older releases of vLLM count over all requests, and not by request
    is_old = isinstance(serving, ServingConfig) and not counts_by_request(str(serving.version))
    is_total = is_old and serving.engine == "vllm" and recorded is None and counts is not None
    if not evidence.problems and not is_total and recorded != counts:
        return [
            f"{where}: the evaluation's sum differs from what its records counted; run `dvc repro` to evaluate it again"
        ]
    if counts is None or not counts.num_drafted:
        remedy = "gate an eval that generates text"
        if counts is None and serving.engine == "openai":
            remedy = (
                "have the attached server count the drafts of each request (vLLM by --per-request-spec-decode-metrics "
                "summary)"
            )
        return [
            f"{where}: {asked.method} was asked for, and the evaluation shows no drafted token; {remedy}, or remove "
            "the speculative step"
        ]
    if not is_total and (uncounted := _count_uncounted(evidence)):
        return [
            f"{where}: {uncounted[0]} of {uncounted[1]} answers of several tokens carry no count of their drafts; "
            "whether drafts ran there is not known: have the server count every request, and run `dvc repro`"
        ]
    # vLLM counts without saying by which method
    if (counts.method or asked.method, counts.num_tokens) != (asked.method, asked.num_tokens):
        return [
            f"{where}: expected {asked.method} with {asked.num_tokens} tokens, the evaluation counted "
            f"{counts.method} with {counts.num_tokens}; run `dvc repro` to evaluate it again"
        ]
    return []


def _count_uncounted(evidence: Evidence) -> tuple[int, int] | None:
    """Return how many answers lack counts, and of how many; None when all have them.

    The one token of an answer that ends at once comes from the prompt's own pass, before any draft.
    """
    answered = [
        (record, num_turns)
        for name, file in evidence.evaluation.evals.items()
        for record in evidence.records.get(name, ())
        if record.num_completion_tokens > (num_turns := _count_turns(record, file.kind))
    ]
    lacking = [
        record
        for record, num_turns in answered
        if record.speculation is None
        or record.num_completion_tokens - record.speculation.num_completion_tokens > num_turns
    ]
    return (len(lacking), len(answered)) if lacking else None


def _count_turns(record: CaseRecord, kind: str) -> int:
    return 1 if kind == "harness" else len(record.output.split("\n"))  # of a chat a line each


def describe_speculation(counts: SpeculationCounts, method: str) -> str:
    """Say in a sentence or two what speculation by a method did."""
    positions = ", ".join(f"{kept / counts.num_target_forwards:.1%}" for kept in counts.accepted_by_position)
    return (
        f"Speculation ({method}, {counts.num_tokens} tokens): {counts.acceptance_rate:.1%} of "
        f"{counts.num_drafted:,} drafted tokens accepted, {counts.acceptance_length:.2f} per target forward pass; "
        f"passes that accepted 1, 2, ... tokens or more (a draft stops where the answer ends): {positions}. "
        f"{counts.forwards_per_token:.3f} target forward passes per token."
    )
