"""What a release that nothing blocks leaves open, in words: a tier or `on_inconclusive: warn` lets through what no
number of its cases has shown, and "nothing blocks" alone would read as a proof.
"""

from __future__ import annotations

from pipeline.gate.verdicts import Judgement, is_blocking, is_decisive, released_verdicts
from pipeline.records.verdicts import Verdict


def list_unproven(judgement: Judgement) -> list[str]:
    """Say of each released candidate that does not block how much of it was not proven, one sentence each."""
    sentences = (
        describe_unproven(verdict)
        for verdict in released_verdicts(judgement)
        if not is_blocking(verdict, judgement.policy)
    )
    return [sentence for sentence in sentences if sentence]


def describe_unproven(verdict: Verdict) -> str | None:
    """Say how many gated comparisons are open; None where all are proven."""
    gated = [c for c in verdict.comparisons if c.tolerance is not None and is_decisive(c) and c.tier != "watched"]
    num_open = sum(c.outcome != "pass" for c in gated)
    if not num_open:
        return None
    start = f"of the {len(gated)} gated comparisons of {verdict.candidate}"
    if num_open == len(gated):
        return f"nothing was proven: none {start} is shown to be within its tolerance"
    verb, whose = ("is", "its") if num_open == 1 else ("are", "their")
    return f"not all was proven: {num_open} {start} {verb} not shown to be within {whose} tolerance"
