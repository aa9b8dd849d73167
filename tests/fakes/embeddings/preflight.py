"""Check products of embeddings against the files that they name, before any work."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.evalsets.cards import load_evalset
from pipeline.evalsets.cases import CASES_FILE, check_distinct
from pipeline.evalsets.checks import check_buckets, load_kind
from pipeline.products.embeddings.encoder import PROJECTION
from pipeline.products.embeddings.settings import EmbeddingsProduct, TruncateStep
from pipeline.running.weight_files import read_tensors


def check_embeddings(product: EmbeddingsProduct, root: Path) -> None:
    """Refuse settings that the named files contradict.

    Raises:
        SettingsError: with the path of the key, what it names, and what there is.
        EvalsetError: with file and line.
        CheckpointError: an encoder without weights.
    """
    evalsets = {
        name: load_kind(load_evalset, root / e.evalset, product.locate(f"evals.{name}.evalset"), e.kind)
        for name, e in product.evals.items()
    }
    for name, evalset in evalsets.items():
        check_distinct(root / product.evals[name].evalset / CASES_FILE, evalset.cases)
    check_buckets(product, evalsets)
    for name, candidate in product.candidates.items():
        _, num_dimensions = read_tensors(root / candidate.checkpoint)[PROJECTION].shape
        for i, step in enumerate(candidate.steps):
            if isinstance(step, TruncateStep) and step.num_dimensions > num_dimensions:
                raise SettingsError(
                    f"candidates.{name}.steps.{i}.num_dimensions: expected at most {num_dimensions}, as the encoder "
                    f"has, got {step.num_dimensions}"
                )
