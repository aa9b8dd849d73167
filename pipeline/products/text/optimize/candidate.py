"""Build a candidate: open its checkpoint, apply its steps in order, write its folder at once.

The folder `build/candidates/<name>/` appears whole or not at all: everything is written to a
hidden folder beside it and moved into place. A candidate without steps holds only its record,
which points at the original checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.errors import CheckpointError, SettingsError
from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.text.checkpoints import check_tied_head, open_checkpoint, read_checkpoint
from pipeline.products.text.model_loading import check_kernels
from pipeline.products.text.optimize.quantize import StepResult
from pipeline.products.text.optimize.registry import STEPS
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.step_settings import Step, WeightStep
from pipeline.records.digests import digest_files
from pipeline.records.evaluations import BuiltCandidate, Checkpoint
from pipeline.records.files import replace_folder, share_files
from pipeline.records.record_files import write_record
from pipeline.running.hub import locate_checkpoint
from pipeline.running.phases import Phases, format_phases
from pipeline.running.weight_files import check_finite, iterate_weights

# what can change an answer of a served text checkpoint
LIBRARIES = ("torch", "transformers", "compressed-tensors", "llmcompressor", "tokenizers", "safetensors")


def build_candidate(name: str, product: TextProduct, *, root: Path, build: Path) -> BuiltCandidate:
    """Build one candidate and write `candidates/<name>/` under `build`.

    Args:
        name: of the candidate.
        product: whose candidate it is.
        root: project root, which paths are relative to.
        build: folder of the product's results.

    Raises:
        SettingsError: no candidate has this name.
        CheckpointError: its checkpoint is missing, damaged or unsafe.
        EvalsetError: the calibration texts are malformed.
        QuantizationError: a step was refused or did not do what was asked.
    """
    if name not in product.candidates:
        raise SettingsError(f"candidates: expected one of {', '.join(product.candidates)}, got {name!r}")
    target = build / "candidates" / name
    working = target.with_name(f".{name}.new")
    shutil.rmtree(working, ignore_errors=True)
    try:
        working.mkdir(parents=True)
        candidate = _build(name, product, working, target, root=root)
        write_record(working / "candidate.json", candidate)
        share_files(working)
        replace_folder(working, target)
    except OSError as error:
        raise CheckpointError(f"{target}: can't be written: {error}; free some space or correct the rights") from error
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return candidate


def read_library_versions() -> dict[str, str]:
    """Return the installed versions of `LIBRARIES`."""
    return {library: importlib.metadata.version(library) for library in LIBRARIES}


def _build(name: str, product: TextProduct, working: Path, target: Path, *, root: Path) -> BuiltCandidate:
    settings = product.candidates[name]
    source = locate_checkpoint(settings.checkpoint, root)
    check_tied_head(source)
    weight_steps = [step for step in settings.steps if isinstance(step, WeightStep)]
    if weight_steps:
        made, results = _rewrite_weights(weight_steps, source, product, working=working, root=root)
        checkpoint = made.model_copy(update={"path": (target / "checkpoint").relative_to(root).as_posix()})
    else:
        checkpoint = read_checkpoint(source, root=root, reference=settings.checkpoint)
        if settings.engine.is_embedded:
            check_kernels(source)
        check_finite(iterate_weights(source), where=source)
        results = []
    coverage = results[-1].coverage if results else ()
    if settings.speculative is not None:
        results.append(STEPS[settings.speculative.kind](source, step=settings.speculative, root=root))
    return BuiltCandidate(
        name=name,
        checkpoint=checkpoint,
        steps=tuple(result.record for result in results),
        coverage=coverage,
        fallbacks=tuple(fallback for result in results for fallback in result.fallbacks),
        speculative=results[-1].speculative if results else None,
        libraries=read_library_versions(),
    )


def _rewrite_weights(
    steps: Sequence[Step], source: Path, product: TextProduct, *, working: Path, root: Path
) -> tuple[Checkpoint, list[StepResult]]:
    """Apply steps, describe the checkpoint that they made, and say on stderr how long each phase took."""
    texts = product.optimize.calibration_texts
    calibration_set = None if texts is None else load_evalset(root / texts)
    _pin_threads(product.optimize.num_threads)
    open_checkpoint(source)
    # the source is digested beside the work: hashing lets other threads run, and cores are free where a GPU works
    with ThreadPoolExecutor(1) as pool:
        digesting = pool.submit(digest_files, source)
        results = _apply_steps(steps, source, working=working, calibration_set=calibration_set)
        phases = Phases()
        for result in results:
            phases.add(result.seconds)
        with phases.measure("digest"):
            parent = read_checkpoint(source, root=root, files=digesting.result())
    made = read_checkpoint(working / "checkpoint", root=root, parent_digest=parent.digest, files=results[-1].files)
    print(f"seconds: {format_phases(phases.seconds)}", file=sys.stderr)
    return made, results


def _apply_steps(
    steps: Sequence[Step], source: Path, *, working: Path, calibration_set: Evalset | None
) -> list[StepResult]:
    results = []
    current = source
    for number, step in enumerate(steps, start=1):
        destination = working / f"step-{number}"
        results.append(STEPS[step.kind](current, destination, step=step, calibration_set=calibration_set))
        if current != source:
            shutil.rmtree(current)
        current = destination
    current.rename(working / "checkpoint")
    return results


def _pin_threads(num_threads: int) -> None:
    # sums are split by thread: with another number the same step writes other bytes
    import torch

    torch.set_num_threads(num_threads)
