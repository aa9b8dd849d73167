"""How an encoder is run, derived from params.yaml: one place for whoever runs it and whoever judges it."""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict

from pipeline.products.embeddings.settings import EmbeddingsProduct
from pipeline.records.built_candidates import fold_steps, read_built
from pipeline.records.evaluations import BuiltCandidate, LocalCandidate
from pipeline.records.serving import LocalServing


class EmbeddingServing(LocalServing):
    """How an encoder is run; everything here can change an embedding."""

    model_config = ConfigDict(extra="forbid")

    engine: str = "numpy"
    num_dimensions: int | None = None  # the first ones; None: all

    @property
    def summary(self) -> str:
        """The most important settings in a few words."""
        return f"{self.engine} {self.dtype}, {self.num_dimensions or 'all'} dimensions"


class EmbeddingCandidate(LocalCandidate):
    """An encoder's folder plus how it is run: the thing that is evaluated and would ship."""

    serving: EmbeddingServing


def serve(built: BuiltCandidate) -> EmbeddingCandidate:
    """Add the serving config: what the steps changed of the plain one."""
    return EmbeddingCandidate(**built.model_dump(), serving=fold_steps(built, EmbeddingServing()))


def read_embedding_candidate(build: Path, name: str, product: EmbeddingsProduct) -> EmbeddingCandidate:
    """Read what was built of a candidate and add how it is run.

    Raises:
        EvidenceError: it was not built, or its record is another candidate's or of other steps.
    """
    asked = [step.model_dump(mode="json") for step in product.candidates[name].steps]
    return serve(read_built(build, name, asked))
