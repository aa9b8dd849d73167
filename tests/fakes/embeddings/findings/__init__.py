"""What the gate asks of embeddings beside their scores: that what ships is what was judged."""

from __future__ import annotations

from pathlib import Path

from pipeline.gate.audits import Auditor
from pipeline.gate.checks import check_checkpoint
from pipeline.products.embeddings.serving import EmbeddingCandidate, read_embedding_candidate
from pipeline.products.embeddings.settings import EmbeddingsProduct


class EmbeddingsAuditor(Auditor[EmbeddingsProduct]):
    """What the gate asks of kind `embeddings`."""

    def read_candidate(self, build: Path, name: str, product: EmbeddingsProduct) -> EmbeddingCandidate:
        """Read what was built of a candidate, and how it is run."""
        return read_embedding_candidate(build, name, product)

    def check_material(self, candidate: EmbeddingCandidate, product: EmbeddingsProduct, root: Path) -> None:
        """Check the checkpoint, which holds all."""
        check_checkpoint(candidate, product, root)
