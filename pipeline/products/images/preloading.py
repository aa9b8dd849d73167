"""What drawing and judging will import: libraries of pipelines import their parts when they are first named."""

from __future__ import annotations

import importlib
from pathlib import Path

import diffusers
import transformers

import pipeline.products.images.batches
import pipeline.products.images.candidate
import pipeline.products.images.evaluate  # noqa: F401
from pipeline.products.images.folders import read_index
from pipeline.products.images.settings import ImagesProduct

_JUDGES = {"transformers": ("AutoTokenizer", "CLIPImageProcessor", "CLIPModel")}


def import_libraries(product: ImagesProduct, root: Path) -> None:
    """Import the classes of the candidates' pipelines and those of the CLIP that judges."""
    for package in (diffusers, transformers):  # as drawing does
        package.utils.logging.set_verbosity_error()
    wanted = {(library, name) for library, names in _JUDGES.items() for name in names}
    for folder in {root / candidate.checkpoint for candidate in product.candidates.values()}:
        index = read_index(folder)
        wanted.add(("diffusers", index["_class_name"]))
        wanted |= {tuple(part) for part in index.values() if isinstance(part, list)}
    for library, name in sorted(wanted):
        getattr(importlib.import_module(library), name)
