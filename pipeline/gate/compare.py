"""Compare every candidate with the reference and judge it: records in, a Judgement out.

The steps are: load evidence (`pairing`), measure (`measure`), ask the kind what else it knows (`audits`), decide
(`decision`). Evidence that is not fit makes the candidate's verdict "refused" and is named in its reasons; it never
raises, so that one broken candidate does not hide the verdicts on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from pipeline.errors import EvidenceError
from pipeline.gate.audits import Auditor, CandidateFindings, P
from pipeline.gate.case_table import CaseTable
from pipeline.gate.categories import check_categories, list_watched, name_unwatched
from pipeline.gate.certificate import certify, describe_level, is_above
from pipeline.gate.decision import Measurement, combine, judge_all
from pipeline.gate.headlines import explain_comparisons, list_limits
from pipeline.gate.measure import estimate_metrics, list_pair_buckets, measure_metric
from pipeline.gate.pairing import Evidence, PairedCases, check_same_hardware, load_evidence, pair_cases
from pipeline.gate.tolerance_checks import check_loss_can_show, describe_large_tolerance
from pipeline.gate.verdicts import (
    WATCHED_METRIC,
    Judgement,
    build_policy,
    is_blocking,
)
from pipeline.gate.wording import use_metrics
from pipeline.records.evaluations import CaseRecord
from pipeline.records.reasons import Reason, ReasonKind
from pipeline.records.verdicts import (
    Certificate,
    Comparison,
    JudgedTier,
    Outcome,
    Verdict,
)
from pipeline.settings.base import Eval, Product, Tolerance
from pipeline.settings.metrics import MetricDefinition


@dataclass(frozen=True)
class ReleaseComparison:
    """A judgement, and the material that the report explains it with."""

    judgement: Judgement
    findings: dict[str, CandidateFindings]
    evals: Mapping[str, Eval] = field(default_factory=dict)  # settings; records of others have none


def compare_release(product: P, kind: Auditor[P], build: Path) -> ReleaseComparison:
    """Judge all candidates of a product against its reference.

    Args:
        product: settings; `gate` holds tolerances, alpha and tripwires.
        kind: of the product, which adds what it knows of its candidates beside their scores.
        build: the folder that holds `candidates/` and `evaluations/`.
    """
    with use_metrics(product.metrics):
        return _compare(product, kind, build)


def _compare(product: P, kind: Auditor[P], build: Path) -> ReleaseComparison:
    policy = build_policy(product)
    reference = _load(build, product.reference, product, kind, is_pinned=True)
    if reference.evidence is not None:
        kind.add_scores(reference, reference.evidence, product, build)
    _describe(reference, product, kind)
    findings = {
        name: _measure_candidate(_load(build, name, product, kind), reference, product, kind, build)
        for name in product.candidates
        if name != product.reference
    }
    comparisons = judge_all(
        {name: m.measurements for name, m in findings.items()}, product.release, alpha=product.gate.alpha
    )
    certificates = _certify(findings, product)
    verdicts = [
        _conclude(name, findings[name], comparisons[name], certificates.get(name), product, kind) for name in findings
    ]
    blocking = [v for v in verdicts if v.is_release and is_blocking(v, policy)]
    judgement = Judgement(
        outcome="blocked" if blocking else "pass",
        blocked_by=tuple(v.candidate for v in blocking),
        policy=policy,
        cases=_digest_cases(reference),
        reference_fingerprint=_fingerprint(reference),
        reference_metrics=tuple(reference.metrics),
        verdicts=tuple(verdicts),
    )
    return ReleaseComparison(judgement, {product.reference: reference, **findings}, product.evals)


def find_unfit(product: P, kind: Auditor[P], build: Path) -> list[str]:
    """Return why a reference is unfit, whichever candidate is compared with it; average precision is left out.

    Args: as of `compare_release`; of the build folder the reference's part alone is read.
    """
    with use_metrics(product.metrics):
        findings = _load(build, product.reference, product, kind, is_pinned=True)
        if findings.evidence is None:
            return findings.refusals
        for eval_name, records in findings.evidence.records.items():
            pairs = pair_cases(findings.evidence, findings.evidence, eval_name)
            for definition in _list_measured(product.evals[eval_name], kind, records):
                if definition.estimator != "average_precision":  # to resample it takes minutes
                    findings.refusals += _list_hopeless(pairs, definition, eval_name, product)
        return findings.refusals


def _list_hopeless(pairs: PairedCases, definition: MetricDefinition, eval_name: str, product: Product) -> Iterator[str]:
    """Yield why no loss could show in a gated metric of a reference, which is on both sides."""
    tolerance = product.gate.tolerances.get(f"{eval_name}/{definition.name}", Tolerance())
    limits: list[tuple[str | None, float | None]] = [(None, tolerance.overall), *tolerance.buckets.items()]
    for bucket, allowed in limits:
        if allowed is None:
            continue
        try:
            _measure_checked(pairs, definition, bucket, eval_name, product, limit=allowed, tier=tolerance.tier)
        except EvidenceError as error:
            yield str(error)


def _measure_checked(
    pairs: PairedCases,
    definition: MetricDefinition,
    bucket: str | None,
    eval_name: str,
    product: Product,
    *,
    limit: float | None,
    tier: JudgedTier,
) -> Measurement:
    """Measure a metric; raise EvidenceError where it can't be, or where no loss beyond its tolerance could show."""
    measurement = measure_metric(
        pairs, definition, bucket, eval_name=eval_name, tolerance=limit, alpha=product.gate.alpha, tier=tier
    )
    check_loss_can_show(measurement, definition, pairs.reference)
    return measurement


def _load(build: Path, name: str, product: P, kind: Auditor[P], *, is_pinned: bool = False) -> CandidateFindings:
    findings = CandidateFindings()
    try:
        candidate = kind.read_candidate(build, name, product)
        findings.evidence = load_evidence(build, candidate, product.evals, is_pinned=is_pinned)
        findings.seconds = _share_seconds(findings.evidence)
        findings.refusals += findings.evidence.problems.values()
        findings.refusals += check_categories(findings.evidence)
        kind.audit_side(findings, findings.evidence, product)
    except EvidenceError as error:
        findings.refusals.append(str(error))
    return findings


def _describe(findings: CandidateFindings, product: P, kind: Auditor[P]) -> None:
    """Compute a candidate's own metrics from whatever records are fit."""
    if findings.evidence is None:
        return
    for eval_name, records in findings.evidence.records.items():
        clusters = CaseTable.of(records).clusters
        for definition in _list_measured(product.evals[eval_name], kind, records):
            try:
                findings.metrics += estimate_metrics(
                    records,
                    definition,
                    clusters,
                    eval_name=eval_name,
                    table=findings.evidence.tables.get(eval_name),
                )
            except EvidenceError as error:
                findings.refusals.append(str(error))


def _list_measured(settings: Eval, kind: Auditor[P], *sides: Sequence[CaseRecord]) -> list[MetricDefinition]:
    """List the metrics that can be gated, less those of pairs that a side lacks: whoever adds their scores says why."""
    return [
        definition
        for definition in settings.metrics
        if definition.is_gated
        and (definition.score not in kind.pair_scores or all(definition.score in side[0].scores for side in sides))
    ]


def _measure_candidate(
    findings: CandidateFindings, reference: CandidateFindings, product: P, kind: Auditor[P], build: Path
) -> CandidateFindings:
    findings.refusals += [f"the reference is unfit: {problem}" for problem in reference.refusals]
    if findings.evidence is not None and reference.evidence is not None:
        kind.add_scores(findings, reference.evidence, product, build)
    _describe(findings, product, kind)
    if findings.evidence is None or reference.evidence is None:
        return findings
    for eval_name in product.evals:
        if eval_name in findings.evidence.records and eval_name in reference.evidence.records:
            try:
                findings.pairs[eval_name] = pair_cases(reference.evidence, findings.evidence, eval_name)
            except EvidenceError as error:
                findings.refusals.append(str(error))
                continue
            _measure_eval(findings, eval_name, product, kind)
            kind.audit_eval(findings, findings.evidence, reference.evidence, eval_name, product)
    try:
        check_same_hardware(reference.evidence.evaluation, findings.evidence.evaluation)
    except EvidenceError as error:
        findings.refusals.append(str(error))
    else:
        kind.audit_pair(findings, findings.evidence, reference.evidence, product, build)
    return findings


def _measure_eval(findings: CandidateFindings, eval_name: str, product: P, kind: Auditor[P]) -> None:
    pairs = findings.pairs[eval_name]
    for definition in _list_measured(product.evals[eval_name], kind, pairs.reference, pairs.candidate):
        tolerance = product.gate.tolerances.get(f"{eval_name}/{definition.name}", Tolerance())
        asked: dict[str | None, float | None] = {None: tolerance.overall}
        for name in [*list_pair_buckets(pairs, definition), *tolerance.buckets]:
            asked[name] = tolerance.buckets.get(name)
        is_watching = definition.name == WATCHED_METRIC
        watched = list_watched(pairs, eval_name, product.gate.tolerances) if is_watching else []
        for bucket, allowed in asked.items():
            limit, tier = (tolerance.overall, "watched") if bucket in watched else (allowed, tolerance.tier)
            try:
                measurement = _measure_checked(
                    pairs, definition, bucket, eval_name, product, limit=limit, tier=cast(JudgedTier, tier)
                )
                findings.measurements.append(replace(measurement, accepts_gain=tolerance.accept_gain is not None))
                if said := describe_large_tolerance(measurement, definition, pairs.reference):
                    findings.add_note(said, ReasonKind.LIMIT)
            except EvidenceError as error:
                if allowed is None:  # what nothing gates may be too small to compare
                    findings.add_note(str(error))
                else:
                    findings.refusals.append(str(error))
    if unwatched := name_unwatched(pairs, eval_name, product.gate.tolerances):
        findings.add_note(unwatched)


def _certify(findings: dict[str, CandidateFindings], product: Product) -> dict[str, Certificate]:
    """Certify the rule for the release, and for each other candidate alone; refuse one that does not keep alpha."""
    families = [[name for name in findings if name in product.release]]
    families += [[name] for name in findings if name not in product.release]
    certificates = certify(
        {name: m.measurements for name, m in findings.items()},
        families,
        alpha=product.gate.alpha,
        blocks_inconclusive=product.gate.on_inconclusive == "block",
    )
    for name, certificate in certificates.items():
        if is_above(certificate.num_false_fails, product.gate.alpha):
            findings[name].refusals.append(describe_level(certificate, product.gate.alpha))
    return certificates


def _conclude(
    name: str,
    findings: CandidateFindings,
    comparisons: list[Comparison],
    certificate: Certificate | None,
    product: P,
    kind: Auditor[P],
) -> Verdict:
    outcome: Outcome = combine(comparisons, findings.refusals, findings.failures)
    if outcome == "pass" and findings.unproven:
        outcome = "inconclusive"
    idle = findings.gain is not None and not findings.gain.is_sure
    if outcome == "pass" and idle:
        outcome = "no gain"
    if outcome == "refused" and not findings.refusals:
        findings.refusals.append("nothing is gated, and no evidence is not a pass")
    if findings.evidence and findings.evidence.evaluation.is_declared:
        findings.add_note(
            "its fingerprint is declared by params.yaml, not proved: what runs behind "
            f"{findings.evidence.candidate.serving.base_url} is its operator's word",
            ReasonKind.LIMIT,
        )
    reasons = [
        *_give(ReasonKind.HEADLINE, kind.list_headlines(name, comparisons, product)),
        *_give(ReasonKind.REFUSED, dict.fromkeys(findings.refusals)),
        *_give(ReasonKind.FAILED, findings.failures),
        *_give(ReasonKind.UNPROVEN, findings.unproven),
        *_give(ReasonKind.NO_GAIN, [findings.gain.why] if findings.gain and idle else []),
        *explain_comparisons(comparisons, outcome),
        *_give(
            ReasonKind.NOTE,
            [f"{t.metric}: {t.sentence}" for t in findings.tripwires if t.sentence.startswith("tripped")],
        ),
        *list_limits(comparisons, product.gate.tolerances, product.gate.alpha),
        *findings.notes,
    ]
    evaluation = findings.evidence.evaluation if findings.evidence else None
    return Verdict(
        candidate=name,
        fingerprint=_fingerprint(findings),
        outcome=outcome,
        facts=evaluation.served_by if evaluation else {},
        behaviour=evaluation.canary.behaviour if evaluation and evaluation.canary else {},
        canary=findings.canary,
        speculation=evaluation.speculation if evaluation else None,
        seconds=findings.seconds,
        speed=findings.speed,
        gain=findings.gain,
        total=findings.total,
        certificate=certificate,
        is_release=name in product.release,
        reasons=tuple(reasons),
        comparisons=(*comparisons, *findings.tripwires),
        metrics=tuple(findings.metrics),
    )


def _give(kind: ReasonKind, texts: Iterable[str]) -> list[Reason]:
    return [Reason(kind=kind, text=text) for text in texts]


def _share_seconds(evidence: Evidence) -> dict[str, float]:
    """Return about how long each eval took: shares of the whole by what its cases waited, equal ones if none tells."""
    waited = {name: sum(record.latency_s for record in records) for name, records in evidence.records.items()}
    total = sum(waited.values())
    return {
        name: round(evidence.evaluation.seconds * (part / total if total else 1 / len(waited)), 1)
        for name, part in waited.items()
    }


def _digest_cases(findings: CandidateFindings) -> dict[str, str]:
    evals = findings.evidence.evaluation.evals if findings.evidence else {}
    return {name: file.evalset_digest for name, file in evals.items()}


def _fingerprint(findings: CandidateFindings) -> str:
    return findings.evidence.fingerprint if findings.evidence else "unknown"
