"""Judge other people's records by the gate's own rule: the same pairing, bounds, tests, Holm and certificate.

What the gate knows of a run of its own and nobody can tell from outcomes is not asked here: fingerprints, the canary,
weights, speeds. Evidence that is not fit makes the verdict "refused" and is named in its reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pipeline.digests import digest_file
from pipeline.errors import EvidenceError
from pipeline.fingerprints import fingerprint
from pipeline.gate.certificate import certify, is_above
from pipeline.gate.certificate_section import describe_level
from pipeline.gate.compare import number_clusters
from pipeline.gate.decision import Measurement, combine, judge_all
from pipeline.gate.measure import check_loss_can_show, describe_metrics, list_buckets, measure_metric
from pipeline.gate.pairing import PairedCases, align
from pipeline.gate.verdicts import REFUSED, Judgement, Policy, is_blocking
from pipeline.gate.wording import name_comparison
from pipeline.outcomes.cases import Outcomes
from pipeline.outcomes.registry import READERS, Side
from pipeline.outcomes.rules import Rules, list_metrics
from pipeline.verdict_records import Certificate, Comparison, Metric, Verdict

KIND = "outcomes"  # of an eval whose records others made


def judge_outcomes(reference: Side, candidate: Side, rules: Rules) -> Judgement:
    """Judge one candidate; to be called, and its judgement shown, within `wording.use_metrics(rules.definitions)`."""
    refusals = [f"the reference is unfit: {problem}" for problem in reference.problems] + list(candidate.problems)
    measurements: list[Measurement] = []
    notes: list[str] = []
    for eval_name in dict.fromkeys(full.partition("/")[0] for full in rules.tolerances):
        try:
            _check_there(eval_name, reference, candidate)
            pairs = pair_outcomes(reference.outcomes[eval_name], candidate.outcomes[eval_name])
        except EvidenceError as error:
            refusals.append(str(error))
            continue
        notes += _describe_sameness(pairs, eval_name)
        for full in rules.tolerances:
            if full.startswith(f"{eval_name}/"):
                measurements += _measure(full, pairs, rules, reference, candidate, refusals, notes)
    certificate = _certify(measurements, candidate, rules, refusals)
    comparisons = judge_all({candidate.name: measurements}, [candidate.name], alpha=rules.alpha)[candidate.name]
    policy = _describe_policy(reference, candidate, rules)
    verdict = _conclude(candidate, comparisons, refusals, notes, certificate, rules)
    is_blocked = is_blocking(verdict, policy)
    return Judgement(
        outcome="blocked" if is_blocked else "pass", blocked_by=(candidate.name,) if is_blocked else (), policy=policy,
        reference_fingerprint=fingerprint(_describe_files(reference)),
        reference_metrics=tuple(_describe_side(reference, rules)), verdicts=(verdict,))


def pair_outcomes(ours: Outcomes, theirs: Outcomes) -> PairedCases:
    """Pair the cases of one eval.

    Raises:
        EvidenceError: the two sides ran another task, asked something else, or one never answers.
    """
    name = ours.name
    if ours.format != theirs.format:
        raise EvidenceError(f"{name}: expected one format on both sides, got {READERS[ours.format].title} and "
                            f"{READERS[theirs.format].title}")
    for fact in ours.task.keys() & theirs.task.keys():
        if ours.task[fact] != theirs.task[fact]:
            raise EvidenceError(f"{name}: {fact}: the reference has {_shorten(ours.task[fact])}, the candidate "
                                f"{_shorten(theirs.task[fact])}; run the same task on both")
    _explain_unmatched(ours, theirs)
    pairs = align(ours.records, theirs.records, where=name)
    silent = [side for side, records in (("reference", pairs.reference), ("candidate", pairs.candidate))
              if not any(record.output.strip() for record in records)]
    if len(silent) == 1:
        raise EvidenceError(f"{name}: the {silent[0]} has not a single output with text, the other side has; look at "
                            "its server")
    return pairs


def _explain_unmatched(ours: Outcomes, theirs: Outcomes) -> None:
    """Say what differs of a case that bears one name on both sides and asks something else."""
    known = {record.input_digest for record in theirs.records}
    for record in ours.records:
        asked, other = ours.asked[record.case_id], theirs.asked.get(record.case_id)
        if record.input_digest not in known and other is not None:
            part = next((part for part in asked | other if asked.get(part) != other.get(part)), "question")
            raise EvidenceError(f"{ours.name}: case {record.case_id!r}: the {part} is another one on the candidate's "
                                "side; both sides must be asked the same in the same words (data, few-shot texts, chat "
                                "template, stop strings and limits)")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check_there(eval_name: str, reference: Side, candidate: Side) -> None:
    for which, side in (("reference", reference), ("candidate", candidate)):
        if eval_name not in side.outcomes:
            raise EvidenceError(f"{eval_name}: a tolerance is set, and the {which} has no fit outcomes of it; it has "
                                + (", ".join(side.outcomes) or "none"))


def _measure(
    full: str, pairs: PairedCases, rules: Rules, reference: Side, candidate: Side, refusals: list[str],
    notes: list[str],
) -> Iterator[Measurement]:
    """Yield the measurements of one metric: overall, and in every bucket that the cases carry."""
    eval_name, _, metric = full.partition("/")
    sides = reference.outcomes[eval_name], candidate.outcomes[eval_name]
    definition, tolerance = rules.definitions.get(full), rules.tolerances[full]
    problems = [side.problems[metric] for side in sides if metric in side.problems]
    if definition is None or problems:
        refusals.append(f"{full}: " + (problems[0] if problems else "a tolerance is set, and the reference has no such "
                                       f"score; it has {', '.join(list_metrics(sides[0])) or 'none'}"))
        return
    named = dict.fromkeys([*list_buckets(pairs.reference), *tolerance.buckets])
    asked: dict[str | None, float | None] = {None: tolerance.overall, **{b: tolerance.buckets.get(b) for b in named}}
    for bucket, allowed in asked.items():
        try:
            measurement = measure_metric(pairs, definition, bucket, eval_name=eval_name, tolerance=allowed,
                                         alpha=rules.alpha, tier=tolerance.tier)
            check_loss_can_show(measurement, definition)
            yield measurement
        except EvidenceError as error:
            # what nothing gates may be too small to compare
            (notes if allowed is None else refusals).append(str(error))


def _describe_sameness(pairs: PairedCases, eval_name: str) -> list[str]:
    """Note that nothing at all differs: one model asked twice looks like that."""
    has_outputs = any(record.output for record in pairs.reference)
    is_same = all(a.output == b.output and a.scores == b.scores
                  for a, b in zip(pairs.reference, pairs.candidate, strict=True))
    return [f"{eval_name}: every output is the reference's, character by character; was it another model that "
            "answered?"] if has_outputs and is_same else []


def _certify(
    measurements: list[Measurement], candidate: Side, rules: Rules, refusals: list[str]
) -> Certificate | None:
    if not measurements:
        return None
    certificate = certify({candidate.name: measurements}, alpha=rules.alpha,
                          blocks_inconclusive=rules.on_inconclusive == "block")[candidate.name]
    if is_above(certificate.num_false_fails, rules.alpha):
        refusals.append(describe_level(certificate, rules.alpha))
    return certificate


def _conclude(
    candidate: Side, comparisons: list[Comparison], refusals: list[str], notes: list[str],
    certificate: Certificate | None, rules: Rules,
) -> Verdict:
    outcome = combine(comparisons, refusals)
    if outcome == "refused" and not refusals:
        refusals.append("nothing is gated, and no evidence is not a pass")
    reasons = [f"{REFUSED}{problem}" for problem in dict.fromkeys(refusals)]
    shown = {"fail", "inconclusive"} if outcome == "inconclusive" else {"fail"}
    reasons += [f"{c.outcome}: {name_comparison(c)}: {c.sentence}" for c in comparisons if c.outcome in shown]
    reasons += [f"note: {name_comparison(c)}: {c.sentence}" for c in comparisons if c.sentence.startswith("suspicious")]
    reasons += [f"note: {note}" for note in notes]
    facts = _describe_files(candidate)
    return Verdict(candidate=candidate.name, fingerprint=fingerprint(facts), facts=facts, outcome=outcome,
                   is_release=True, reasons=tuple(reasons), comparisons=tuple(comparisons), certificate=certificate,
                   metrics=tuple(_describe_side(candidate, rules)))


def _describe_side(side: Side, rules: Rules) -> Iterator[Metric]:
    for full, definition in rules.definitions.items():
        outcomes = side.outcomes.get(full.partition("/")[0])
        try:
            if outcomes is not None:
                yield from describe_metrics(outcomes.records, definition, number_clusters(outcomes.records),
                                            eval_name=outcomes.name)
        except EvidenceError:
            pass  # refused where it is compared


def _describe_files(side: Side) -> dict[str, Any]:
    return {"records": {o.path.name: digest_file(o.path) for o in side.outcomes.values()}}


def _describe_policy(reference: Side, candidate: Side, rules: Rules) -> Policy:
    metrics = {full: asdict(definition) for full, definition in rules.definitions.items()}
    evals = {name: {"kind": KIND, "format": outcomes.format,
                    "metrics": {full: m for full, m in metrics.items() if full.startswith(f"{name}/")}}
             for name, outcomes in reference.outcomes.items()}
    return Policy(reference=reference.name, release=(candidate.name,), alpha=rules.alpha,
                  on_inconclusive=rules.on_inconclusive, tolerances=rules.tolerances, tripwires={}, evals=evals)
