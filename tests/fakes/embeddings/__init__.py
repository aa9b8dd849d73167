"""Kind `embeddings`: encoders of sentences, judged by the passages that they find.

No part of the project: `tests/integration/test_new_kind.py` copies this folder to `pipeline/products/embeddings/` of a
copy, to see that a kind is one folder and its line in the list. It is small enough to read as an example of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import SettingsError
from pipeline.product import Inputs, OpenReplica, Start
from pipeline.products.embeddings.settings import EmbeddingsProduct, RetrievalEval, find_embedding_problems
from pipeline.running.environment import Machine
from pipeline.settings.base import Eval

if TYPE_CHECKING:
    from pipeline.gate.audits import Auditor
    from pipeline.report.presenting import Presenter


class EmbeddingsKind:
    """Encoders of sentences."""

    settings = EmbeddingsProduct
    evals: Mapping[str, type[Eval]] = {"retrieval": RetrievalEval}
    start_options: Mapping[str, str] = {}
    shards_at_once = 1
    has_servers = False

    def start_product(self, name: str, checkpoint: str, root: Path, options: Mapping[str, str]) -> Start:
        """Refuse: nobody starts with a kind of a test."""
        raise SettingsError("--kind: expected a kind that gives a start, got embeddings; write the section by hand")

    def find_problems(self, product: EmbeddingsProduct) -> list[str]:
        """Return what contradicts itself in the settings."""
        return find_embedding_problems(product)

    def check(self, product: EmbeddingsProduct, root: Path, machine: Machine, *, is_local: bool) -> list[str]:
        """Check encoders and cases."""
        from pipeline.products.embeddings.preflight import check_embeddings

        check_embeddings(product, root)
        return []

    def render_costs(self, product: EmbeddingsProduct, root: Path, machine: Machine, *, build: Path) -> str:
        """Estimate nothing."""
        return ""

    def list_inputs(self, product: EmbeddingsProduct, root: Path) -> Inputs:
        """Return the steps of what is built, the cases of what is evaluated."""
        from pipeline.records.digests import digest_folder

        evals = {name: settings.model_dump(mode="json") for name, settings in product.evals.items()}
        cases = {name: digest_folder(root / settings.evalset) for name, settings in product.evals.items()}
        steps = {name: candidate.model_dump(mode="json") for name, candidate in product.candidates.items()}
        return Inputs(steps, dict.fromkeys(steps, {"evals": evals, "cases": cases}))

    def preload(self, stage: str, product: EmbeddingsProduct, root: Path) -> None:
        """Import what the stages import."""
        import pipeline.products.embeddings.evaluate  # noqa: F401

    def optimize(self, name: str, product: EmbeddingsProduct, *, root: Path, build: Path) -> str:
        """Round weights, and record how many dimensions are kept."""
        from pipeline.products.embeddings.candidate import build_embedding_candidate

        return build_embedding_candidate(name, product, root=root, build=build).serving.summary

    def evaluate(self, name: str, product: EmbeddingsProduct, *, root: Path, build: Path) -> None:
        """Encode queries and passages, and look up each query's own."""
        from pipeline.products.embeddings.evaluate import evaluate_embeddings
        from pipeline.products.embeddings.serving import read_embedding_candidate

        evaluate_embeddings(read_embedding_candidate(build, name, product), product, root=root, build=build)

    def open_replica(
        self, name: str, product: EmbeddingsProduct, *, root: Path, build: Path
    ) -> AbstractContextManager[OpenReplica]:
        """Refuse: a query looks for its passage among those of all cases."""
        raise SettingsError(f"products.{product.name}: expected a whole evaluation, as each case looks at all others")

    def benchmark(self, product: EmbeddingsProduct, *, root: Path, build: Path) -> list[str]:
        """Time nothing."""
        return []

    def get_auditor(self) -> Auditor[EmbeddingsProduct]:
        """Return what the gate asks beside the scores."""
        from pipeline.products.embeddings.findings import EmbeddingsAuditor

        return EmbeddingsAuditor()

    def get_presenter(self) -> Presenter[EmbeddingsProduct]:
        """Return what the report and MLflow show."""
        from pipeline.products.embeddings.show import EmbeddingsPresenter

        return EmbeddingsPresenter()
