"""The cases worth a look: what was asked, what each side answered, where they part.

For 0/1 scores these are the flips, losses first; for likelihoods the documents that lost most; for images the unsound
ones, then those that lost most of any metric. Which cases are picked follows from the records alone, so two runs show
the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.differences import first_difference
from pipeline.gate.metrics import METRICS_BY_EVAL_KIND
from pipeline.gate.pairing import PairedCases
from pipeline.gate.wording import definition_of
from pipeline.records import CaseRecord
from pipeline.verdict_records import Comparison

_SOUND = ("sound", "finite")  # scores of an image that is one at all
_SHOWN_BEFORE, _SHOWN_AFTER = 160, 240  # characters of an output shown round the first difference


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


def worst_flips(comparisons: Sequence[Comparison], pairs: Mapping[str, PairedCases], *, limit: int) -> list[Flip]:
    """Return up to `limit` flips behind a candidate's failing comparisons, losses first.

    Failing metrics take turns; within one, a case in more of the failing buckets comes earlier.
    """
    failing: dict[str, list[str]] = {}
    for comparison in comparisons:
        if comparison.outcome == "fail" and comparison.b is not None:
            failing.setdefault(comparison.metric, []).extend([comparison.bucket] if comparison.bucket else [])
    queues = [_flips_of(metric, buckets, pairs[metric.partition("/")[0]]) for metric, buckets in failing.items()]
    picked: list[Flip] = []
    seen: set[tuple[str, str]] = set()
    for round_number in range(limit):
        for queue in queues:
            if round_number < len(queue) and len(picked) < limit:
                flip = queue[round_number]
                if (flip.eval_name, flip.case_id) not in seen:
                    seen.add((flip.eval_name, flip.case_id))
                    picked.append(flip)
    return picked


def _flips_of(metric: str, buckets: list[str], pairs: PairedCases) -> list[Flip]:
    eval_name = metric.partition("/")[0]
    definition = definition_of(metric)
    key = definition.score
    found: list[tuple[tuple[bool, int, str], Flip]] = []
    for ours, theirs in zip(pairs.reference, pairs.candidate, strict=True):
        if ours.scores[key] != theirs.scores[key]:
            is_loss = (ours.scores[key] - theirs.scores[key]) * definition.sign > 0
            hits = sum(bucket in buckets for bucket in ours.buckets)
            found.append(((not is_loss, -hits, ours.case_id), _show(eval_name, is_loss, ours, theirs)))
    return [flip for _, flip in sorted(found, key=lambda pair: pair[0])]


def _show(eval_name: str, is_loss: bool, ours: CaseRecord, theirs: CaseRecord) -> Flip:
    place = first_difference(ours.output, theirs.output)
    line, character = place if place is not None else (None, None)
    return Flip(eval_name, ours.case_id, "loss" if is_loss else "gain", ours.buckets, ours.prompt, ours.output,
                theirs.output, line, character)


def worst_cases(comparison: Comparison, pairs: PairedCases, *, limit: int) -> list[WorstCase]:
    """Return the cases that lost most in total of what a comparison compares.

    A case of weight 0, as an image without a small object, has lost nothing; nor has one outside of the bucket.
    """
    definition, bucket = definition_of(comparison.metric), comparison.bucket
    score, weight = definition.score, definition.weight
    is_area = pairs.tables is not None and bucket in pairs.tables[0].areas
    if is_area:
        score, weight = f"found_{bucket}", f"objects_{bucket}"
    rows = []
    for ours, theirs in zip(pairs.reference, pairs.candidate, strict=True):
        amount = ours.scores.get(weight, 0.0) if weight else 1.0
        before, after = (side.scores.get(score, 0.0) for side in (ours, theirs))
        if amount > 0 and (bucket is None or is_area or bucket in ours.buckets):
            harm = definition.sign * (before - after)
            rows.append((-harm, ours.case_id, WorstCase(ours.case_id, before, after, amount)))
    return [case for _, _, case in sorted(rows, key=lambda row: row[:2])[:limit]]


def excerpt(text: str, character: int | None) -> str:
    """Cut a text to the neighbourhood of a character; None shows the start."""
    start = max(0, (character or 0) - _SHOWN_BEFORE)
    end = start + _SHOWN_BEFORE + _SHOWN_AFTER
    return ("… " if start else "") + text[start:end] + (" …" if end < len(text) else "")


def list_worst_images(pairs: Mapping[str, PairedCases], kinds: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return (eval, position) of all images of a candidate, the worst first.

    Those that became unsound, then those that lost most of any metric in units of its spread over the cases. Other
    rates count through what they are rates of: an image that saturates a little beyond a limit is not the worst.

    Args:
        pairs: by eval.
        kinds: of each eval.
    """
    ranked = []
    for eval_name, paired in pairs.items():
        unsound = losses = np.zeros(len(paired.reference))
        for definition in METRICS_BY_EVAL_KIND[kinds[eval_name]]:
            ours, theirs = (np.array([r.scores.get(definition.score, 0.0) for r in side])
                            for side in (paired.reference, paired.candidate))  # fmt: skip
            harm = definition.sign * (ours - theirs)
            if definition.score in _SOUND:
                unsound = harm
            elif definition.estimator != "proportion":
                losses = np.maximum(losses, harm / (harm.std() or 1.0))
        ranked += [(-unsound[i], -losses[i], eval_name, i) for i in range(len(losses))]
    return [(eval_name, i) for _, _, eval_name, i in sorted(ranked)]
