"""What the gate asks of a network beside its scores: what its steps for speed gain, and its time in total."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.gate.audits import Auditor, CandidateFindings
from pipeline.gate.checks import check_checkpoint
from pipeline.gate.pairing import Evidence
from pipeline.gate.verdicts import takes_too_long
from pipeline.products.vision.findings.headlines import explain_flat_average
from pipeline.products.vision.findings.notes import read_network_notes
from pipeline.products.vision.findings.speed import (
    describe_emulation,
    describe_total,
    explain_untimed,
    measure_gain,
    measure_total,
)
from pipeline.products.vision.findings.wholes import check_wholes
from pipeline.products.vision.serving import read_network_candidate
from pipeline.products.vision.settings import SPEED_STEPS, VisionProduct
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import NetworkCandidate
from pipeline.records.reasons import ReasonKind
from pipeline.records.verdicts import Comparison
from pipeline.settings.base import Product


class VisionAuditor(Auditor[VisionProduct]):
    """What the gate asks of kind `vision`."""

    def read_candidate(self, build: Path, name: str, product: VisionProduct) -> NetworkCandidate:
        """Read what was built of a candidate, and how it is run."""
        return read_network_candidate(build, name, product)

    def check_material(self, candidate: NetworkCandidate, product: VisionProduct, root: Path) -> None:
        """Check checkpoint and adapter."""
        check_checkpoint(candidate, product, root)
        check_adapter(root / product.adapter, candidate.libraries.get("adapter", "none"))

    def audit_pair(
        self, findings: CandidateFindings, evidence: Evidence, reference: Evidence, product: VisionProduct, build: Path
    ) -> None:
        """Add what steps for speed gain, and a failure or a note where it is slower in total."""
        limit = product.gate.max_slowdown
        try:
            findings.refusals += check_wholes(evidence, reference)
            if (notes := read_network_notes(evidence)) is not None:
                findings.gain = measure_gain(evidence, notes, speed_steps=SPEED_STEPS)
                findings.total = measure_total(evidence, reference, notes, limit)
                if notes.int8 is not None and notes.is_emulated:
                    problem = f"int8: {describe_emulation(notes.int8)}"
                    remedy = "evaluate it where INT8 has kernels"
                    findings.judge_emulation(problem, evidence.candidate.name, product, remedy=remedy)
        except EvidenceError as error:
            findings.refusals.append(str(error))
        if limit is not None and findings.total is None and (why := explain_untimed(evidence)):
            findings.add_note(f"speed: gate.max_slowdown was not applied: {why}", ReasonKind.LIMIT)
        if findings.total is not None and findings.total.low > 1:
            sentence = describe_total(findings.total, limit)
            if takes_too_long(findings.total, limit):
                findings.failures.append(f"speed: {sentence}")
            else:
                findings.add_note(f"speed: {sentence}")

    def list_headlines(self, name: str, comparisons: Sequence[Comparison], product: Product) -> list[str]:
        """Say when AP over all objects stays within its tolerance and AP of some size fails."""
        headline = explain_flat_average(name, comparisons, product)
        return [headline] if headline else []


def check_adapter(path: Path, digest: str) -> None:
    """Refuse another adapter than the one that was judged."""
    present = digest_file(path) if path.is_file() else "no file"
    if present != digest:
        raise EvidenceError(
            f"{path}: expected the adapter that was judged ({digest[:12]}), found another "
            f"({present[:12]}); run `dvc repro` so that it is built and evaluated again"
        )
