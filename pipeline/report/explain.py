"""Which cases are behind a verdict, where their outputs part, and how sure the reference was there.

Cases follow from the records alone, so that two runs show the same ones. How far a token was ahead is known of the
canary's prompts: they are first turns of the evals' own cases, so a flip has a margin where the canary asked the same
case and both sides answered it as in the eval. Pictures are not text: their cases are named, and shown by the plots.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.verdicts import OWN_PATH
from pipeline.gate.wording import definition_of, name_metric
from pipeline.records.differences import first_difference
from pipeline.records.verdicts import CanaryFlip, Comparison, Verdict
from pipeline.report.explanation_records import CandidateExplanation, ExplainedFlip, Explanation, LostCases, Passage
from pipeline.report.flips import Flip, list_deciding, worst_cases, worst_flips
from pipeline.settings.metrics import MetricDefinition

EXPLAINED = ("fail", "inconclusive")  # outcomes of a candidate
_MAX_FLIPS = 10  # of a candidate
_MAX_LOST = 5  # of a comparison
_BEFORE, _AFTER = 160, 240  # characters shown round the first difference
_NOT_ASKED = "the canary did not ask this prompt"
_LATER_TURN = "the canary asks first turns only"


def explain_release(compared: ReleaseComparison, *, quotes_outputs: bool = True) -> Explanation:
    """Return what is shown of each candidate that failed or was left open.

    Args:
        compared: all candidates.
        quotes_outputs: outputs are texts; of others the cases are named only.
    """
    return Explanation(
        candidates=tuple(
            explain_verdict(verdict, compared.findings[verdict.candidate], quotes_outputs=quotes_outputs)
            for verdict in compared.judgement.verdicts
            if verdict.outcome in EXPLAINED
        )
    )


def explain_verdict(
    verdict: Verdict, findings: CandidateFindings, *, quotes_outputs: bool = True
) -> CandidateExplanation:
    """Return the cases behind a verdict."""
    deciding = list_deciding(verdict.comparisons)
    parted = _list_parted(verdict)
    flips = worst_flips(deciding, findings.pairs, limit=_MAX_FLIPS, preferred=parted)
    folder = findings.evidence.folder.as_posix() if findings.evidence else f"evaluations/{verdict.candidate}"
    return CandidateExplanation(
        candidate=verdict.candidate,
        folder=folder,
        flips=(
            *(_explain_flip(flip, parted) if quotes_outputs else _name_flip(flip) for flip in flips),
            *_explain_path(verdict, findings),
        ),
        lost=tuple(_tabulate(c, findings) for c in deciding if c.b is None),
    )


def cut_passages(reference: str, candidate: str) -> tuple[Passage, Passage]:
    """Cut two texts to the neighbourhood of their first difference and mark it, in the line in which it is."""
    place = first_difference(reference, candidate)
    if place is None:
        return cut_start(reference), cut_start(candidate)
    at = place[1]
    ends = [end if (end := text.find("\n", at)) >= 0 else len(text) for text in (reference, candidate)]
    is_shown = max(ends) - at <= _AFTER  # else what agrees again is cut off
    same = _count_same_end(reference[at : ends[0]], candidate[at : ends[1]]) if is_shown else 0
    return _cut(reference, at, ends[0] - same), _cut(candidate, at, ends[1] - same)


def cut_start(text: str) -> Passage:
    """Cut a text to its start; nothing is marked."""
    shown = text[: _BEFORE + _AFTER]
    return Passage(before=shown, marked="", after="", num_before=0, num_after=len(text) - len(shown))


def _cut(text: str, at: int, marked_end: int) -> Passage:
    start = max(0, at - _BEFORE)
    end = min(len(text), start + _BEFORE + _AFTER)
    marked_end = min(marked_end, end)
    return Passage(
        before=text[start:at],
        marked=text[at:marked_end],
        after=text[marked_end:end],
        num_before=start,
        num_after=len(text) - end,
    )


def _count_same_end(ours: str, theirs: str) -> int:
    shorter = min(len(ours), len(theirs))
    return next((i for i in range(shorter) if ours[-1 - i] != theirs[-1 - i]), shorter)


def _list_parted(verdict: Verdict) -> dict[str, CanaryFlip]:
    """Return the answers of the canary that differ from the reference's, by "<eval>/<case>"."""
    if verdict.canary is None or verdict.canary.baseline == OWN_PATH:
        return {}
    return {flip.case_id: flip for flip in verdict.canary.flips}


def _name_flip(flip: Flip) -> ExplainedFlip:
    return ExplainedFlip.model_validate(
        {
            "kind": flip.kind,
            "eval_name": flip.eval_name,
            "case_id": flip.case_id,
            "buckets": flip.buckets,
            "prompt": cut_start(flip.prompt),
            "reference": None,
            "candidate": None,
        }
    )


def _explain_flip(flip: Flip, parted: Mapping[str, CanaryFlip]) -> ExplainedFlip:
    ours, theirs = cut_passages(flip.reference, flip.candidate)
    asked = parted.get(f"{flip.eval_name}/{flip.case_id}")
    answers = flip.reference.split("\n", 1)[0], flip.candidate.split("\n", 1)[0]
    is_known = asked is not None and (asked.reference, asked.candidate) == answers
    return _name_flip(flip).model_copy(
        update={
            "reference": ours,
            "candidate": theirs,
            "line": flip.line,
            "character": flip.character,
            "token": asked.token if asked and is_known else None,
            "margin": asked.margin if asked and is_known else None,
            "why_no_margin": "" if is_known else _LATER_TURN if flip.line else _NOT_ASKED,
        }
    )


def _explain_path(verdict: Verdict, findings: CandidateFindings) -> list[ExplainedFlip]:
    """Return the canary's answers that differ although the weights are the same: only then the path is judged."""
    canary = verdict.canary
    if canary is None or not canary.is_same_weights:
        return []
    prompts = {
        f"{eval_name}/{record.case_id}": record
        for eval_name, pairs in findings.pairs.items()
        for record in pairs.reference
    }
    explained = []
    for flip in canary.flips[:_MAX_FLIPS]:
        (ours, theirs), place = (
            cut_passages(flip.reference, flip.candidate),
            first_difference(flip.reference, flip.candidate),
        )
        eval_name, _, case_id = flip.case_id.partition("/")
        record = prompts.get(flip.case_id)
        explained.append(
            ExplainedFlip(
                kind="path",
                eval_name=eval_name,
                case_id=case_id,
                buckets=record.buckets if record else (),
                prompt=cut_start(record.prompt if record else ""),
                against=canary.baseline,
                reference=ours,
                candidate=theirs,
                line=place[0] if place else None,
                character=place[1] if place else None,
                token=flip.token,
                margin=flip.margin,
                why_no_margin="" if flip.margin is not None else "the endpoint does not tell it",
            )
        )
    return explained


def _tabulate(c: Comparison, findings: CandidateFindings) -> LostCases:
    definition = definition_of(c.metric)
    cases = worst_cases(c, findings.pairs[c.metric.partition("/")[0]], limit=_MAX_LOST)
    if definition.estimator == "average_precision":
        return LostCases(
            title=f"Images that lost most of {name_metric(c.metric, c.bucket)}, objects found{_format_iou(definition)}",
            columns=("image", "objects", "the reference finds", "the candidate finds"),
            rows=tuple(
                (case.case_id, f"{case.weight:g}", f"{case.reference:.1f}", f"{case.candidate:.1f}") for case in cases
            ),
        )
    per = f" per {definition.weight}" if definition.weight else ""
    return LostCases(
        title=f"Cases that lost most, {name_metric(f'{definition.score}{per}', c.bucket)}",
        columns=("case", "reference", "candidate"),
        rows=tuple(
            (case.case_id, f"{case.reference / case.weight:.4f}", f"{case.candidate / case.weight:.4f}")
            for case in cases
        ),
    )


def _format_iou(definition: MetricDefinition) -> str:
    return " on average over the IoU thresholds" if definition.iou is None else f" at IoU {definition.iou:g}"
