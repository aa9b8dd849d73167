"""The cases worth a look: what was asked, what each side answered, where they part.

For 0/1 scores these are the flips, losses first; for likelihoods the documents that lost most. Which cases are picked
follows from the records alone, so two runs show the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.gate.pairing import PairedCases, read_scores
from pipeline.gate.verdicts import is_decisive
from pipeline.gate.wording import definition_of
from pipeline.records.differences import first_difference
from pipeline.records.verdicts import Comparison


@dataclass(frozen=True)
class Flip:
    """One case whose judgement changed, ready to be shown.

    Attributes:
        kind: "loss" (reference right, candidate wrong) or "gain".
        line: line of the first difference, 0-based; a trajectory's line is its turn.
        character: offset of the first difference.
    """

    eval_name: str
    case_id: str
    kind: str
    buckets: tuple[str, ...]
    prompt: str
    reference: str
    candidate: str
    line: int | None
    character: int | None


@dataclass(frozen=True)
class WorstCase:
    """A case that lost much: the score of both sides, and the weight that it is divided by (1 where there is none)."""

    case_id: str
    reference: float
    candidate: float
    weight: float


def list_deciding(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons that a verdict other than pass rests on: those that fail, else those left open."""
    for outcome in ("fail", "inconclusive"):
        if deciding := [c for c in comparisons if c.outcome == outcome and is_decisive(c)]:
            return deciding
    return []


def worst_flips(
    comparisons: Sequence[Comparison],
    pairs: Mapping[str, PairedCases],
    *,
    limit: int,
    preferred: Collection[str] = (),
) -> list[Flip]:
    """Return up to `limit` flips behind some comparisons, losses first.

    Metrics take turns; within one, a case in more of the buckets that are compared comes earlier.

    Args:
        comparisons: those that decided.
        pairs: by eval.
        limit: of all.
        preferred: "<eval>/<case>" of those that come before their equals.
    """
    asked: dict[str, list[str]] = {}
    for comparison in comparisons:
        if comparison.b is not None:
            asked.setdefault(comparison.metric, []).extend([comparison.bucket] if comparison.bucket else [])
    queues = [
        _flips_of(metric, buckets, pairs[metric.partition("/")[0]], preferred) for metric, buckets in asked.items()
    ]
    picked: dict[tuple[str, str], Flip] = {}
    for round_number in range(max(map(len, queues), default=0)):
        for queue in queues:
            if round_number < len(queue) and len(picked) < limit:
                eval_name, is_loss, i = queue[round_number]
                case = eval_name, pairs[eval_name].reference[i].case_id
                if case not in picked:  # where outputs are long, to show one takes its time
                    picked[case] = _show(eval_name, is_loss, pairs[eval_name], i)
    return list(picked.values())


def _flips_of(
    metric: str, buckets: list[str], pairs: PairedCases, preferred: Collection[str]
) -> list[tuple[str, bool, int]]:
    """Return the flips of a metric, the first to be shown first: the eval, whether it is a loss, and the position."""
    eval_name = metric.partition("/")[0]
    definition = definition_of(metric)
    ours, theirs = (read_scores(side, definition.score, where=eval_name) for side in (pairs.reference, pairs.candidate))
    flips = []
    for i in np.flatnonzero(ours != theirs).tolist():
        is_loss, case = bool((ours[i] - theirs[i]) * definition.sign > 0), pairs.reference[i]
        hits = sum(bucket in buckets for bucket in case.buckets)
        order = (not is_loss, -hits, f"{eval_name}/{case.case_id}" not in preferred, case.case_id)
        flips.append((order, (eval_name, is_loss, i)))
    return [flip for _, flip in sorted(flips, key=lambda pair: pair[0])]


def _show(eval_name: str, is_loss: bool, pairs: PairedCases, i: int) -> Flip:
    ours, theirs = pairs.reference[i], pairs.candidate[i]
    place = first_difference(ours.output, theirs.output)
    line, character = place if place is not None else (None, None)
    return Flip(
        eval_name,
        ours.case_id,
        "loss" if is_loss else "gain",
        ours.buckets,
        ours.prompt,
        ours.output,
        theirs.output,
        line,
        character,
    )


def worst_cases(comparison: Comparison, pairs: PairedCases, *, limit: int) -> list[WorstCase]:
    """Return the cases that lost most in total of what a comparison compares.

    A case of weight 0, as an image without a small object, has lost nothing; nor has one outside of the bucket.
    """
    definition, bucket = definition_of(comparison.metric), comparison.bucket
    score, weight = definition.score, definition.weight
    is_of_objects = pairs.tables is not None and bucket in pairs.tables[0].areas | pairs.tables[0].categories
    if is_of_objects:
        score, weight = f"found_{bucket}", f"objects_{bucket}"
    rows = []
    for ours, theirs in zip(pairs.reference, pairs.candidate, strict=True):
        amount = ours.scores.get(weight, 0.0) if weight else 1.0
        before, after = (side.scores.get(score, 0.0) for side in (ours, theirs))
        if amount > 0 and (bucket is None or is_of_objects or bucket in ours.buckets):
            harm = definition.sign * (before - after)
            rows.append((-harm, ours.case_id, WorstCase(ours.case_id, before, after, amount)))
    return [case for _, _, case in sorted(rows, key=lambda row: row[:2])[:limit]]
