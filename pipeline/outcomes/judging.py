"""Judge other people's records by the gate's own rule: the same pairing, bounds, tests, Holm and certificate.

What the gate knows of a run of its own and nobody can tell from outcomes is not asked here: fingerprints, the canary,
weights, speeds. Evidence that is not fit makes the verdict "refused" and is named in its reasons.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, replace
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.gate.audits import CandidateFindings
from pipeline.gate.case_table import CaseTable
from pipeline.gate.certificate import certify, describe_level, is_above
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.decision import Measurement, combine, judge_all
from pipeline.gate.headlines import explain_comparisons, list_limits
from pipeline.gate.measure import estimate_metrics, list_buckets, measure_metric
from pipeline.gate.pairing import PairedCases, align
from pipeline.gate.tolerance_checks import check_loss_can_show
from pipeline.gate.verdicts import Judgement, Policy, is_blocking, list_gated_evals
from pipeline.gate.wording import format_harm, format_num, format_tolerance
from pipeline.outcomes.cases import Outcomes, shorten
from pipeline.outcomes.reading import clean
from pipeline.outcomes.registry import READERS, Side
from pipeline.outcomes.rules import Rules, list_metrics
from pipeline.records.digests import digest_file
from pipeline.records.fingerprints import fingerprint
from pipeline.records.reasons import Reason, ReasonKind
from pipeline.records.verdicts import Certificate, Comparison, Metric, Verdict
from pipeline.settings.metrics import MetricDefinition

KIND = "outcomes"  # of an eval whose records others made
_MAX_NAMED = 10  # scores


def judge_outcomes(reference: Side, candidate: Side, rules: Rules) -> ReleaseComparison:
    """Judge one candidate; to be called, and its judgement shown, within `wording.use_metrics(rules.definitions)`."""
    findings = CandidateFindings(metrics=_describe_side(candidate, rules))
    findings.refusals += [f"the reference is unfit: {problem}" for problem in reference.problems]
    findings.refusals += candidate.problems
    findings.refusals += _list_unpaired(reference, candidate, rules)
    for eval_name in list_gated_evals(rules.tolerances):
        if any(eval_name not in side.outcomes and side.problems for side in (reference, candidate)):
            continue  # refused for that
        try:
            _check_there(eval_name, reference, candidate)
            ours, theirs = reference.outcomes[eval_name], candidate.outcomes[eval_name]
            if not reference.is_half:
                _check_other_file(ours, theirs)
            findings.pairs[eval_name] = pair_outcomes(ours, theirs)
        except EvidenceError as error:
            findings.refusals.append(str(error))
            continue
        for note in [f"{eval_name}: {ours.note}"] if ours.note else []:
            findings.add_note(note)
        for note in _describe_sameness(findings.pairs[eval_name], eval_name):
            findings.add_note(note)
        for full in rules.tolerances:
            if full.startswith(f"{eval_name}/"):
                _measure(findings, full, ours, theirs, rules)
        for note in _list_left_out(ours, rules):
            findings.add_note(note, ReasonKind.LIMIT)
    certificate = _certify(findings, candidate.name, rules)
    comparisons = judge_all({candidate.name: findings.measurements}, [candidate.name], alpha=rules.alpha)
    policy = _describe_policy(reference, candidate, rules)
    verdict = _conclude(candidate, findings, comparisons[candidate.name], certificate, rules)
    is_blocked = is_blocking(verdict, policy)
    unmeasured = CandidateFindings(metrics=_describe_side(reference, rules))
    judgement = Judgement(
        outcome="blocked" if is_blocked else "pass",
        blocked_by=(candidate.name,) if is_blocked else (),
        policy=policy,
        reference_fingerprint=fingerprint(_describe_files(reference)),
        reference_metrics=tuple(unmeasured.metrics),
        verdicts=(verdict,),
    )
    return ReleaseComparison(judgement, {reference.name: unmeasured, candidate.name: findings})


def pair_outcomes(ours: Outcomes, theirs: Outcomes) -> PairedCases:
    """Pair the cases of one eval.

    Raises:
        EvidenceError: the two sides ran another task, asked something else, or one never answers.
    """
    name = ours.name
    if ours.format != theirs.format:
        raise EvidenceError(
            f"{name}: expected one format on both sides, got {READERS[ours.format].title} and "
            f"{READERS[theirs.format].title}"
        )
    for fact in ours.task.keys() & theirs.task.keys():
        if ours.task[fact] != theirs.task[fact]:
            raise EvidenceError(
                f"{name}: {fact}: the reference has {shorten(ours.task[fact], 200)}, the candidate "
                f"{shorten(theirs.task[fact], 200)}; run the same task on both"
            )
    _explain_unmatched(ours, theirs)
    pairs = align(ours.records, theirs.records, where=name)
    silent = [
        side
        for side, records in (("reference", pairs.reference), ("candidate", pairs.candidate))
        if not any(record.output.strip() for record in records)
    ]
    if len(silent) == 1:
        raise EvidenceError(
            f"{name}: the {silent[0]} has not a single output with text, the other side has; look at its server"
        )
    return pairs


def _explain_unmatched(ours: Outcomes, theirs: Outcomes) -> None:
    """Say what differs of a case that bears one name on both sides and asks something else."""
    known = {record.input_digest for record in theirs.records}
    for record in ours.records:
        asked, other = ours.asked[record.case_id], theirs.asked.get(record.case_id)
        if record.input_digest not in known and other is not None:
            part = next((part for part in asked | other if asked.get(part) != other.get(part)), "question")
            raise EvidenceError(
                f"{ours.name}: case {record.case_id!r}: the {part} is another one on the candidate's "
                "side; both sides must be asked the same in the same words (data, few-shot texts, chat "
                "template, stop strings and limits)"
            )


def _check_there(eval_name: str, reference: Side, candidate: Side) -> None:
    for which, side in (("reference", reference), ("candidate", candidate)):
        if eval_name not in side.outcomes:
            raise EvidenceError(
                f"{eval_name}: a tolerance is set, and the {which} has no fit outcomes of it; it has "
                + (", ".join(side.outcomes) or "none")
                + ("; one eval has one name on both sides: rename a file" if side.outcomes else "")
            )


def _list_unpaired(reference: Side, candidate: Side, rules: Rules) -> list[str]:
    """Say which evals only one side has, whether they are gated or not; those of unfit files are refused already."""
    gated = list_gated_evals(rules.tolerances)
    return [
        f"{name}: the {which} has no outcomes of it, the other side has ({mine.outcomes[name].path}): it was not "
        "judged; add or remove it, or give one eval one name on both sides"
        for which, mine, other in (("candidate", reference, candidate), ("reference", candidate, reference))
        for name in mine.outcomes
        if name not in other.outcomes and name not in gated and not other.problems
    ]


def _list_left_out(ours: Outcomes, rules: Rules) -> list[str]:
    """Name the scores of an eval that no tolerance is set for."""
    names = [name for name in list_metrics(ours) if f"{ours.name}/{name}" not in rules.tolerances]
    shown = ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")
    return [f"not gated: {ours.name}: {shown}: no tolerance is set"] if names else []


def _check_other_file(ours: Outcomes, theirs: Outcomes) -> None:
    """Refuse a candidate's file that is the reference's: a copy or a link proves nothing of a model.

    Where files name no model, those of two that answer alike are equal, and what lies beside them tells them apart.
    """
    for mine, other in zip(ours.parts, theirs.parts, strict=True):
        _check_other_file(mine, other)
    is_one_model = None in (ours.model, theirs.model) or ours.model == theirs.model
    if not ours.parts and is_one_model and digest_file(ours.path) == digest_file(theirs.path):
        raise EvidenceError(
            f"{theirs.path}: holds the same bytes as the reference's {ours.path}, and a comparison "
            "with itself proves nothing; give the candidate's own (of two models that answer alike, tables differ by a "
            "column that names the model, and the results_<date>.json beside lm-eval's samples by their model_args; no "
            "--use_cache may have answered for one)"
        )


def _measure(findings: CandidateFindings, full: str, ours: Outcomes, theirs: Outcomes, rules: Rules) -> None:
    """Measure one metric, overall and in every bucket that the cases carry."""
    metric = full.partition("/")[2]
    definition, tolerance, pairs = rules.definitions.get(full), rules.tolerances[full], findings.pairs[ours.name]
    problem = ours.problems.get(metric) or theirs.problems.get(metric)
    if definition is not None and not problem and definition.score not in theirs.scores:
        problem = (
            f"expected numbers as {definition.score!r} on the candidate's side, found none in any case; it has "
            f"numbers as {', '.join(theirs.scores) or 'nothing'}"
        )
    if definition is not None and definition.estimator == "proportion":
        problem = problem or _find_graded(definition, ours, theirs)
    if definition is None or problem:
        problem = problem or (
            "a tolerance is set, and the reference has no such score; it has "
            + (", ".join(list_metrics(ours)) or "none")
        )
        findings.refusals.append(f"{full}: {problem}")
        return
    named = dict.fromkeys([*list_buckets(pairs.reference), *tolerance.buckets])
    asked: dict[str | None, float | None] = {None: tolerance.overall, **{b: tolerance.buckets.get(b) for b in named}}
    for bucket, allowed in asked.items():
        try:
            measurement = measure_metric(
                pairs,
                definition,
                bucket,
                eval_name=ours.name,
                tolerance=allowed,
                alpha=rules.alpha,
                tier=tolerance.tier,
            )
            check_loss_can_show(measurement, definition, pairs.reference)
            _check_left_out(measurement, definition, ours, theirs)
            findings.measurements.append(replace(measurement, accepts_gain=tolerance.accept_gain is not None))
        except EvidenceError as error:
            if allowed is None:  # what nothing gates may be too small to compare
                findings.add_note(str(error))
            else:
                findings.refusals.append(str(error))


def _find_graded(definition: MetricDefinition, ours: Outcomes, theirs: Outcomes) -> str | None:
    """Say which score of a candidate is no 0 or 1, where those of the reference alone made the metric a rate."""
    key = definition.score
    graded, other = (
        next((record for record in side.records if record.scores.get(key, 0.0) not in (0.0, 1.0)), None)
        for side in (theirs, ours)
    )
    if graded is None or other is not None or definition.name != key:  # a rate of quantgate's own is never graded
        return None
    return (
        f"case {graded.case_id!r}: expected {key!r} to be 0 or 1, got { {key: graded.scores[key]} } on the candidate's "
        f"side; all of the reference's are: where they are graded, say `--better {key}=higher` (or lower) and "
        "--tolerance in their own unit"
    )


def _check_left_out(m: Measurement, definition: MetricDefinition, ours: Outcomes, theirs: Outcomes) -> None:
    """Refuse a metric or bucket that lost more than is tolerated by all its cases, and not by those that are counted.

    What is left out asks what another case asks, as far as its file tells: a `prompt` may hold a part of the question.

    Raises:
        EvidenceError: so it is.
    """
    if m.tolerance is None or definition.weight is not None:
        return
    more = [
        excess
        for mine, other in _pair_parts(ours, theirs)
        for excess in _list_excess(mine, other, definition, None if m.bucket == mine.name else m.bucket)
    ]
    harm = m.harm + math.fsum(more) / (m.n + len(more))
    if m.harm <= m.tolerance < harm:
        where = m.metric if m.bucket is None else f"{m.metric} [{m.bucket}]"
        left_out = format_num(
            len(more),
            "case was left out, as it asks what another asks, and with it",
            "cases were left out, as they ask what others ask, and with them",
        )
        raise EvidenceError(
            f"{where}: {left_out} the loss is "
            f"{format_harm(m.metric, harm)}, tolerated {format_tolerance(m.metric, m.tolerance)}: equal questions "
            "would lose alike; let the prompt say what tells them apart, or ask each once"
        )


def _pair_parts(ours: Outcomes, theirs: Outcomes) -> list[tuple[Outcomes, Outcomes]]:
    return list(zip(ours.parts, theirs.parts, strict=True)) if ours.parts else [(ours, theirs)]


def _list_excess(ours: Outcomes, theirs: Outcomes, definition: MetricDefinition, bucket: str | None) -> list[float]:
    """Return of each case that is left out how much more it lost than the case that is counted for it.

    Args:
        ours: the reference's, of one file.
        theirs: the candidate's.
        definition: of the metric.
        bucket: whose cases; None: all.
    """
    if not ours.left_out:
        return []
    key, sides = definition.score, []
    for side in (ours, theirs):
        records = [*side.records, *(record for record, _ in side.left_out)]
        sides.append({r.case_id: r.scores[key] for r in records if key in r.scores})
    lost = {case: definition.sign * (before - sides[1][case]) for case, before in sides[0].items() if case in sides[1]}
    return [
        lost[record.case_id] - lost[kept]
        for record, kept in ours.left_out
        if record.case_id in lost and kept in lost and (bucket is None or bucket in record.buckets)
    ]


def _describe_sameness(pairs: PairedCases, eval_name: str) -> list[str]:
    """Note that nothing at all differs: one model asked twice looks like that."""
    if any(a.output != b.output or a.scores != b.scores for a, b in zip(pairs.reference, pairs.candidate, strict=True)):
        return []
    what = (
        "every output is the reference's, character by character"
        if any(r.output for r in pairs.reference)
        else "every score of every case is the reference's, and there are no outputs to tell two models apart"
    )
    return [f"{eval_name}: {what}; was it another model that answered?"]


def _certify(findings: CandidateFindings, name: str, rules: Rules) -> Certificate | None:
    if not findings.measurements:
        return None
    certificate = certify(
        {name: findings.measurements}, [[name]], alpha=rules.alpha, blocks_inconclusive=rules.on_inconclusive == "block"
    )[name]
    if is_above(certificate.num_false_fails, rules.alpha):
        findings.refusals.append(describe_level(certificate, rules.alpha))
    return certificate


def _conclude(
    candidate: Side,
    findings: CandidateFindings,
    comparisons: list[Comparison],
    certificate: Certificate | None,
    rules: Rules,
) -> Verdict:
    outcome = combine(comparisons, findings.refusals)
    if outcome == "refused" and not findings.refusals:
        findings.refusals.append("nothing is gated, and no evidence is not a pass")
    reasons = [
        *(Reason(kind=ReasonKind.REFUSED, text=problem) for problem in dict.fromkeys(findings.refusals)),
        *explain_comparisons(comparisons, outcome),
        *list_limits(comparisons, rules.tolerances, rules.alpha),
        *findings.notes,
    ]
    facts = _describe_files(candidate)
    return Verdict(
        candidate=candidate.name,
        fingerprint=fingerprint(facts),
        facts=facts,
        outcome=outcome,
        is_release=True,
        reasons=tuple(reasons),
        comparisons=tuple(comparisons),
        certificate=certificate,
        metrics=tuple(findings.metrics),
    )


def _describe_side(side: Side, rules: Rules) -> list[Metric]:
    metrics: list[Metric] = []
    for full, definition in rules.definitions.items():
        if (outcomes := side.outcomes.get(full.partition("/")[0])) is not None:
            # what can't be computed is refused where it is compared
            with contextlib.suppress(EvidenceError):
                metrics += estimate_metrics(
                    outcomes.records, definition, CaseTable.of(outcomes.records).clusters, eval_name=outcomes.name
                )
    return metrics


def _describe_files(side: Side) -> dict[str, Any]:
    files = [part.path for outcomes in side.outcomes.values() for part in outcomes.parts or (outcomes,)]
    return {"records": {clean(path.name): digest_file(path) for path in files}}


def _describe_policy(reference: Side, candidate: Side, rules: Rules) -> Policy:
    metrics = {full: asdict(definition) for full, definition in rules.definitions.items()}
    evals = {
        name: {
            "kind": KIND,
            "format": outcomes.format,
            "metrics": {full: m for full, m in metrics.items() if full.startswith(f"{name}/")},
        }
        for name, outcomes in reference.outcomes.items()
    }
    return Policy(
        reference=reference.name,
        release=(candidate.name,),
        alpha=rules.alpha,
        on_inconclusive=rules.on_inconclusive,
        tolerances=rules.tolerances,
        tripwires={},
        evals=evals,
    )
