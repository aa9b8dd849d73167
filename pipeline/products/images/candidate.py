"""Build a candidate of the image product: apply its steps in order, write it at once.

A candidate has a pipeline folder of its own only where a step rewrites weights. Any other holds only its record, which
points at the original folder. How it is run follows from its steps and from the product's `serving`; `serve` adds the
latter.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

from pipeline.errors import NumericsError, SettingsError
from pipeline.evalsets.cards import load_evalset
from pipeline.products.images.folders import iterate_weights, read_pipeline_checkpoint
from pipeline.products.images.rendering import Prompt
from pipeline.products.images.serving import sample_plainly, serve
from pipeline.products.images.settings import ImagesProduct
from pipeline.products.images.shared_latents import PICTURE
from pipeline.products.images.steps import STEPS
from pipeline.records.digests import list_files
from pipeline.records.evaluations import BuiltCandidate, Fallback, ImageCandidate, LayerCoverage
from pipeline.records.files import replace_folder, share_files
from pipeline.records.record_files import write_record
from pipeline.records.serving import PipelineServing
from pipeline.running.gpu_failures import explain_gpu_failure
from pipeline.running.weight_files import check_finite

# what can change an image
LIBRARIES = ("torch", "diffusers", "transformers", "tokenizers", "safetensors", "pillow")


def build_image_candidate(name: str, product: ImagesProduct, *, root: Path, build: Path) -> ImageCandidate:
    """Build one candidate and write `candidates/<name>/` under `build`.

    Args:
        name: of the candidate.
        product: settings.
        root: project root, which paths of checkpoints and evalsets are relative to.
        build: folder of the product's results, inside `root`.

    Raises:
        SettingsError: no candidate has this name, or a step asks for what its pipeline can't do.
        CheckpointError: its pipeline folder is missing, damaged or unsafe.
        NumericsError: a range fix can't hold what it must.
    """
    if name not in product.candidates:
        raise SettingsError(f"candidates: expected one of {', '.join(product.candidates)}, got {name!r}")
    target = build / "candidates" / name
    working = target.with_name(f".{name}.new")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    try:
        built = _build(name, product, working, target, root=root)
        write_record(working / "candidate.json", built)
        share_files(working)
        replace_folder(working, target)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return serve(built, product)


def _build(name: str, product: ImagesProduct, working: Path, target: Path, *, root: Path) -> BuiltCandidate:
    settings = product.candidates[name]
    source = root / settings.checkpoint
    checkpoint = read_pipeline_checkpoint(source, root=root)
    check_finite(iterate_weights(source), where=source)
    folder = source
    if any(step.rewrites_weights for step in settings.steps):
        folder = working / "checkpoint"
        _copy_pipeline(source, folder)
    records, fallbacks, coverage = _apply_steps(name, product, folder, root)
    if folder != source:
        made = read_pipeline_checkpoint(folder, root=root, parent_digest=checkpoint.digest)
        changed = {file for file, digest in made.files.items() if checkpoint.files.get(file) != digest}
        check_finite(iterate_weights(folder, changed), where=folder)
        checkpoint = made.model_copy(update={"path": (target / "checkpoint").relative_to(root).as_posix()})
    libraries = LIBRARIES + ("torchao",) * (settings.quantize is not None)
    versions = {library: importlib.metadata.version(library) for library in libraries}
    return BuiltCandidate(
        name=name, checkpoint=checkpoint, steps=records, coverage=coverage, fallbacks=fallbacks, libraries=versions
    )


def _copy_pipeline(source: Path, folder: Path) -> None:
    """Copy what counts of a pipeline folder, but for pictures that came with it."""
    for name, path in list_files(source).items():
        if not name.endswith(PICTURE):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)


def _apply_steps(
    name: str, product: ImagesProduct, folder: Path, root: Path
) -> tuple[tuple[dict[str, Any], ...], tuple[Fallback, ...], tuple[LayerCoverage, ...]]:
    """Apply a candidate's steps, to its copy of the pipeline where it has one; return records, fallbacks, coverage."""
    serving, records = sample_plainly(product), []
    fallbacks: list[Fallback] = []
    coverage: tuple[LayerCoverage, ...] = ()
    for i, step in enumerate(product.candidates[name].steps):
        more = {"prompts": load_prompts(product, root)} if step.renders_prompts else {}
        where = f"candidates.{name}.steps.{i}"
        try:
            with explain_gpu_failure(f"{where}: the prompts that it draws", remedy="lower serving.batch_size"):
                done = STEPS[step.kind](folder, serving, step=step, **more)
        except (NumericsError, SettingsError) as error:
            raise type(error)(f"{where}: {error}") from None
        changes = {"serving": _list_changes(serving, done.serving)}
        records.append(step.model_dump(mode="json") | done.record | changes)
        fallbacks += done.fallbacks
        coverage += done.coverage
        serving = done.serving
    return tuple(records), tuple(fallbacks), coverage


def load_prompts(product: ImagesProduct, root: Path) -> list[Prompt]:
    """Return the prompts of the product's first eval, in its order."""
    evalset = load_evalset(root / next(iter(product.evals.values())).evalset)
    return [Prompt(case.prompt, case.seed) for case in evalset.cases]


def _list_changes(before: PipelineServing, after: PipelineServing) -> dict[str, Any]:
    was, now = before.model_dump(mode="json"), after.model_dump(mode="json")
    return {key: value for key, value in now.items() if was.get(key) != value}
