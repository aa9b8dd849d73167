"""The settings of products of embeddings, and the cases that they are judged on."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pipeline.evalsets.cases import Case
from pipeline.settings.base import (
    Eval,
    Product,
    Settings,
    find_metric_problems,
    find_product_problems,
    find_repeated_steps,
)
from pipeline.settings.metrics import MetricDefinition


class RetrievalCase(Case):
    """A query, and the one passage of the evalset that it should find."""

    card_kind: ClassVar[str] = "retrieval"
    query: str = Field(min_length=1)
    passage: str = Field(min_length=1)


class RoundStep(Settings):
    """Round the weights to integers with one scale a dimension."""

    kind: Literal["round"]
    bits: int = Field(ge=2, le=8)


class TruncateStep(Settings):
    """Keep the first dimensions only (Kusupati et al. 2022, arXiv:2205.13147)."""

    kind: Literal["truncate"]
    num_dimensions: int = Field(ge=1)


class EmbeddingCandidateSettings(Settings):
    """A folder with config.json and model.safetensors, and the steps that make it smaller."""

    checkpoint: str
    steps: list[Annotated[RoundStep | TruncateStep, Field(discriminator="kind")]]


class RetrievalEval(Eval):
    """Queries that look for their passage among those of all cases."""

    metrics = tuple(MetricDefinition(f"recall_at_{k}", "proportion", f"hit_{k}", "higher", "") for k in (1, 10))
    hub_task = "sentence-similarity"
    kind: Literal["retrieval"]
    evalset: str


class ResourceSettings(Settings):
    """How much of the machine is taken: one process, which is all that it needs."""

    num_workers: int = Field(default=1, ge=1)


class EmbeddingsProduct(Product):
    """A product of kind `embeddings`."""

    kind: Literal["embeddings"]
    resources: ResourceSettings = ResourceSettings()
    candidates: dict[str, EmbeddingCandidateSettings] = Field(min_length=1)
    evals: dict[str, RetrievalEval] = Field(min_length=1)


def find_embedding_problems(product: EmbeddingsProduct) -> list[str]:
    """Return what contradicts itself in a product, one line each, starting with the key's path."""
    return (
        find_product_problems(product)
        + find_metric_problems(product)
        + [
            f"candidates.{name}.{problem}"
            for name, candidate in product.candidates.items()
            for problem in find_repeated_steps(candidate.steps)
        ]
    )
