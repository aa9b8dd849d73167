"""The checks of a language model beside its scores: did its endpoint answer, and does its path change answers?

A server that says nothing passes where doing nothing is right. An engine imitates the numbers that would ship. A path
(batching, drafts, another engine) changes answers although the weights are the same. Drafts are refused too often, or
the candidate is slower. Each is a refusal, a failure or a note of the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.gate.audits import Auditor, CandidateFindings
from pipeline.gate.checks import check_checkpoint, check_files, locate_judged
from pipeline.gate.pairing import Evidence
from pipeline.gate.verdicts import list_gated_evals, list_slow_cells
from pipeline.products.text.findings.canary import (
    compare_canary,
    describe_batching,
    describe_blind,
    describe_canary,
    find_path_failure,
)
from pipeline.products.text.findings.divergence import measure_tripwires
from pipeline.products.text.findings.endpoint import (
    check_silence,
    check_weights,
    describe_blindness,
    describe_other_prompts,
    holds_same_model,
)
from pipeline.products.text.findings.headlines import explain_flat_perplexity
from pipeline.products.text.findings.imitation import describe_left_out, judge_imitation
from pipeline.products.text.findings.speculation import check_acceptance, check_speculation
from pipeline.products.text.findings.speed import describe_slow_cell, describe_speed, judge_speed, load_benchmark
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import TextProduct
from pipeline.records.evaluations import OUTGROWN, Candidate, format_cut
from pipeline.records.reasons import ReasonKind
from pipeline.records.verdicts import Comparison, Metric

_MOST = 0.5  # of a reference's answers: some run on for ever, and are wrong; where most are cut, the limit is


class TextAuditor(Auditor[TextProduct]):
    """What the gate asks of kind `text`."""

    def read_candidate(self, build: Path, name: str, product: TextProduct) -> Candidate:
        """Read what was built of a candidate, and how it is run."""
        return read_candidate(build, name, product)

    def check_material(self, candidate: Candidate, product: TextProduct, root: Path) -> None:
        """Check checkpoint and draft model; no file here can tell what an attached endpoint runs."""
        if candidate.serving.engine == "openai":
            return
        check_checkpoint(candidate, product, root)
        drafts = candidate.serving.speculative
        if drafts and drafts.draft_path and drafts.draft_digest:
            check_files(locate_judged(drafts.draft_path, root), drafts.draft_digest, {})

    def audit_side(self, findings: CandidateFindings, evidence: Evidence, product: TextProduct) -> None:
        """Add what one candidate's records say of its endpoint."""
        name = evidence.candidate.name
        findings.refusals += check_silence(evidence)
        findings.refusals += check_speculation(evidence)
        judge_imitation(findings, evidence, product)
        drafts = product.candidates[name].speculative if name in product.candidates else None
        if failure := check_acceptance(evidence, drafts.min_acceptance if drafts else None):
            findings.failures.append(f"speculation: {failure}")
        _check_room(findings, evidence, is_reference=name == product.reference)
        if name == product.reference:
            findings.refusals += _check_ends(evidence, product)

    def audit_eval(
        self, findings: CandidateFindings, evidence: Evidence, reference: Evidence, eval_name: str, product: TextProduct
    ) -> None:
        """Add whose weights answered, and how far the outputs of one eval part from the reference's."""
        pairs, settings = findings.pairs[eval_name], product.evals[eval_name]
        if settings.shows_weights and (problem := check_weights(reference, evidence, pairs, eval_name)):
            findings.refusals.append(problem)
        try:
            tripwires = measure_tripwires(
                reference,
                evidence,
                pairs,
                eval_name,
                names=[m.name for m in settings.metrics if not m.is_gated],
                thresholds=product.gate.tripwires,
                alpha=product.gate.alpha,
            )
        except (EvidenceError, ValueError) as error:
            findings.add_note(f"divergence of {eval_name} was not measured: {error}")
            return
        findings.tripwires += tripwires
        findings.metrics += [
            Metric(
                name=t.metric,
                bucket=None,
                value=t.candidate,
                unit=t.unit,
                better="lower",
                n=t.n,
                low=t.low,
                high=t.high,
            )
            for t in tripwires
        ]

    def audit_pair(
        self, findings: CandidateFindings, evidence: Evidence, reference: Evidence, product: TextProduct, build: Path
    ) -> None:
        """Add what the canary and the benchmark say of a candidate beside the reference."""
        _measure_canary(findings, evidence, reference, product)
        _note_cut(findings, evidence, reference)
        if left_out := describe_left_out(evidence) or describe_left_out(reference, "the reference"):
            findings.add_note(left_out, ReasonKind.LIMIT)
        if others := describe_other_prompts(reference.candidate.checkpoint, evidence.candidate.checkpoint):
            findings.add_note(others, ReasonKind.LIMIT)
        if blindness := describe_blindness(reference, evidence):
            findings.add_note(blindness)
        if evidence.candidate.name in product.benchmark.candidates:
            _measure_speed(findings, evidence, reference, product, build)

    def list_headlines(self, name: str, comparisons: Sequence[Comparison], product: TextProduct) -> list[str]:
        """Say when perplexity stays within its tolerance and a task fails."""
        headline = explain_flat_perplexity(name, comparisons, product)
        return [headline] if headline else []


def _check_room(findings: CandidateFindings, evidence: Evidence, *, is_reference: bool) -> None:
    """Say where conversations outgrew the context; where the reference's did, both sides are wrong and losses hide."""
    for eval_name, records in evidence.records.items():
        if outgrown := sum(record.output.endswith(OUTGROWN) for record in records):
            what = f"{eval_name}: {outgrown} of {len(records)} conversations outgrew serving.context_length"
            if is_reference:
                findings.refusals.append(f"{what}; raise it, or lower evals.{eval_name}.max_turns")
            else:
                findings.add_note(f"{what} and count as wrong")


def _check_ends(evidence: Evidence, product: TextProduct) -> list[str]:
    """Return the gated evals in which a limit made most answers of a reference wrong, where losses hide."""
    refusals = []
    for eval_name in list_gated_evals(product.gate.tolerances):
        records = evidence.records.get(eval_name, ())
        wrong = [record for record in records if record.cut_by and not any(record.scores.values())]
        if len(wrong) > _MOST * len(records):
            limits = " and ".join(sorted({record.cut_by for record in wrong}))
            refusals.append(
                f"{eval_name}: {len(wrong)} of {len(records)} answers are cut by {limits} and wrong, where no loss can "
                f"show; raise {limits}"
            )
    return refusals


def _note_cut(findings: CandidateFindings, evidence: Evidence, reference: Evidence) -> None:
    """Say of which evals a limit ended answers before the model did, on either side: they count as wrong."""
    for eval_name, records in evidence.records.items():
        sides = {"reference": reference.records.get(eval_name, ()), "candidate": records}
        cut = [f"{side} {text}" for side, some in sides.items() if (text := format_cut(some))]
        if cut:
            limits = sorted({record.cut_by for some in sides.values() for record in some if record.cut_by})
            findings.add_note(
                f"{eval_name}: {', '.join(cut)}; they are judged as they are: raise {' and '.join(limits)}",
                ReasonKind.LIMIT,
            )


def _measure_canary(findings: CandidateFindings, evidence: Evidence, reference: Evidence, product: TextProduct) -> None:
    """Compare the candidate's answers to the canary with the reference's."""
    try:
        findings.canary = compare_canary(reference, evidence, product.canary, alpha=product.gate.alpha)
    except EvidenceError as error:
        findings.refusals.append(str(error))
        return
    if findings.canary is None:
        return
    settings, changed = product.candidates[evidence.candidate.name], 0
    if holds_same_model(reference.candidate.checkpoint, evidence.candidate.checkpoint):
        changed = sum(t.b or 0 for t in findings.tripwires)
    if failure := find_path_failure(findings.canary, exact=settings.exact, num_changed_outputs=changed):
        findings.failures.append(f"path: {failure}")
    if findings.canary.is_same_weights:
        findings.add_note(describe_canary(findings.canary))
    if batching := describe_batching(findings.canary, evidence.candidate.serving.dtype):
        findings.add_note(batching)
    if findings.canary.is_blind:
        findings.unproven.append(f"canary: {describe_blind(findings.canary, num_asked=product.canary.num_prompts)}")


def _measure_speed(
    findings: CandidateFindings, evidence: Evidence, reference: Evidence, product: TextProduct, build: Path
) -> None:
    """Add the speed to what was measured of a candidate: a note, or a failure where it is slower than tolerated."""
    fingerprints = reference.fingerprint, evidence.fingerprint
    try:
        work = product.benchmark.build_work()
        findings.benchmark = load_benchmark(build, evidence.candidate.name, work, fingerprints)
        speed = findings.speed = judge_speed(findings.benchmark)
    except EvidenceError as error:
        findings.refusals.append(str(error))
        return
    limit = product.benchmark.max_slowdown
    findings.failures += [
        f"speed: {describe_slow_cell(cell, speed, limit or 0.0)}" for cell in list_slow_cells(speed, limit)
    ]
    findings.add_note(f"speed: {describe_speed(speed)}")
