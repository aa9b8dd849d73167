"""An encoder of sentences in numpy: counts of hashed character trigrams, times a matrix."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.running.weight_files import WEIGHTS_FILE

PROJECTION = "projection"  # the tensor, of shape (hashes, dimensions)


def write_encoder(folder: Path, *, num_hashes: int, num_dimensions: int, seed: int) -> None:
    """Write an encoder with a random projection, which keeps angles about as they are."""
    random = np.random.default_rng(seed)
    projection = random.normal(size=(num_hashes, num_dimensions)).astype(np.float32)
    save_projection(folder, projection)


def load_projection(folder: Path) -> NDArray[np.float32]:
    """Read the matrix of an encoder."""
    from safetensors.numpy import load_file

    projection: NDArray[np.float32] = load_file(folder / WEIGHTS_FILE)[PROJECTION]
    return projection


def save_projection(folder: Path, projection: NDArray[np.float32]) -> None:
    """Write the folder of an encoder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "hashed-trigrams"}), encoding="utf-8")
    save_file({PROJECTION: projection}, folder / WEIGHTS_FILE)


def encode(texts: Sequence[str], projection: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return an embedding of length 1 for each text, of shape (texts, dimensions)."""
    counts = np.zeros((len(texts), len(projection)))
    for row, text in zip(counts, texts, strict=True):
        for start in range(len(text) - 2):
            row[zlib.crc32(text[start : start + 3].encode()) % len(projection)] += 1
    embeddings = counts @ projection.astype(np.float64)
    return np.asarray(embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True))
