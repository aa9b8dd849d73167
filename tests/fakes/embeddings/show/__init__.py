"""What report and MLflow show of embeddings: the steps, and how many dimensions are left."""

from __future__ import annotations

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.pairing import Evidence
from pipeline.products.embeddings.settings import EmbeddingsProduct
from pipeline.records.verdicts import Verdict
from pipeline.report.built_candidate import describe_built_candidate
from pipeline.report.presenting import Presenter, Words
from pipeline.report.sections import Block


class EmbeddingsPresenter(Presenter[EmbeddingsProduct]):
    """What is shown of kind `embeddings`."""

    words = Words(units="others\nin their own unit", clusters="as the evalset says", marks="- · reported only.\n")

    def build_candidate(
        self, verdict: Verdict, findings: CandidateFindings, evidence: Evidence, reference: Evidence | None
    ) -> list[Block]:
        """Return the steps, and how the encoder is run."""
        candidate = evidence.candidate
        return [f"{describe_built_candidate(candidate)} Run as {candidate.serving.summary}."]
