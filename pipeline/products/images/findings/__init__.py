"""What the gate asks of drawn images beside their scores: whether there is an image at all, and if not, why."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pipeline.gate.audits import Auditor, CandidateFindings
from pipeline.gate.checks import check_checkpoint
from pipeline.gate.pairing import Evidence
from pipeline.products.images.findings.decoder import explain_emulation, explain_unsound
from pipeline.products.images.findings.likeness import add_likeness
from pipeline.products.images.metrics import LIKENESS_SCORE
from pipeline.products.images.serving import read_image_candidate
from pipeline.products.images.settings import ImagesProduct
from pipeline.records.evaluations import ImageCandidate
from pipeline.records.reasons import ReasonKind


class ImagesAuditor(Auditor[ImagesProduct]):
    """What the gate asks of kind `images`."""

    pair_scores: ClassVar[tuple[str, ...]] = (LIKENESS_SCORE,)

    def read_candidate(self, build: Path, name: str, product: ImagesProduct) -> ImageCandidate:
        """Read what was built of a candidate, and how it is run."""
        return read_image_candidate(build, name, product)

    def check_material(self, candidate: ImageCandidate, product: ImagesProduct, root: Path) -> None:
        """Check the checkpoint, which holds all."""
        check_checkpoint(candidate, product, root)

    def add_scores(self, findings: CandidateFindings, reference: Evidence, product: ImagesProduct, build: Path) -> None:
        """Add how alike each picture is to the reference's."""
        add_likeness(findings, reference, product, build)

    def audit_side(self, findings: CandidateFindings, evidence: Evidence, product: ImagesProduct) -> None:
        """Refuse a reference that draws nothing for a prompt: no candidate could lose anything there."""
        if evidence.candidate.name == product.reference:
            findings.refusals += [
                f"{eval_name}: {reason}; repair it, or leave these prompts out"
                for eval_name, records in evidence.records.items()
                if any(record.scores.get("sound") == 0 for record in records)
                and (reason := explain_unsound(evidence, eval_name))
            ]

    def audit_eval(
        self,
        findings: CandidateFindings,
        evidence: Evidence,
        reference: Evidence,
        eval_name: str,
        product: ImagesProduct,
    ) -> None:
        """Add why images are not sound, and that 8 bits were emulated."""
        if why := explain_unsound(evidence, eval_name):
            findings.add_note(f"images: {eval_name}: {why}", ReasonKind.CAUSE)
        if why := explain_emulation(evidence, eval_name):
            problem = f"quantize: {eval_name}: {why}"
            remedy = "exclude the layers that have no kernel"
            findings.judge_emulation(problem, evidence.candidate.name, product, remedy=remedy)
