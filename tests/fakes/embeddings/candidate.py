"""Build a candidate of embeddings: round its weights where a step asks for that, and write the record."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.products.embeddings.encoder import load_projection, save_projection
from pipeline.products.embeddings.serving import EmbeddingCandidate, serve
from pipeline.products.embeddings.settings import EmbeddingsProduct, RoundStep
from pipeline.records.evaluations import BuiltCandidate, Checkpoint
from pipeline.records.files import replace_folder
from pipeline.records.record_files import write_record
from pipeline.running.weight_files import read_tensors
from pipeline.running.weight_folders import build_checkpoint


def build_embedding_candidate(name: str, product: EmbeddingsProduct, *, root: Path, build: Path) -> EmbeddingCandidate:
    """Build one candidate and write `candidates/<name>/` under `build`."""
    target = build / "candidates" / name
    working = target.with_name(f".{name}.new")
    shutil.rmtree(working, ignore_errors=True)
    source, steps = root / product.candidates[name].checkpoint, product.candidates[name].steps
    checkpoint = _describe(source, root)
    records: list[dict[str, Any]] = []
    for step in steps:
        record = step.model_dump(mode="json")
        if isinstance(step, RoundStep):
            _round_weights(source, working / "checkpoint", bits=step.bits)
            written = _describe(working / "checkpoint", root)
            path = (target / "checkpoint").resolve().relative_to(root.resolve()).as_posix()
            checkpoint = written.model_copy(update={"path": path, "parent_digest": checkpoint.digest})
        else:
            record["serving"] = {"num_dimensions": step.num_dimensions}
        records.append(record)
    libraries = {"numpy": importlib.metadata.version("numpy")}
    built = BuiltCandidate(name=name, checkpoint=checkpoint, steps=tuple(records), libraries=libraries)
    write_record(working / "candidate.json", built)
    replace_folder(working, target)
    return serve(built)


def _describe(folder: Path, root: Path) -> Checkpoint:
    return build_checkpoint(folder, read_tensors(folder).values(), root=root, kind="hashed-trigrams", format="dense")


def _round_weights(source: Path, target: Path, *, bits: int) -> None:
    projection = load_projection(source)
    scales = np.abs(projection).max(axis=0) / (2 ** (bits - 1) - 1)
    save_projection(target, (np.round(projection / scales) * scales).astype(np.float32))
