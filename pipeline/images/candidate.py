"""Build a candidate of the image track: copy its pipeline folder, apply its steps in order, write it at once.

A candidate without steps holds only its record, which points at the original folder. How it is run follows from
its steps and from `images.sampling`; `serve` adds the latter, so that another sampling rebuilds nothing.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

from pipeline.errors import NumericsError, SettingsError
from pipeline.evalsets import load_evalset
from pipeline.image_params import ImageTrack, VaeRangeFixStep
from pipeline.image_serving import sample_plainly
from pipeline.images.folders import describe_pipeline, iterate_weights
from pipeline.images.rendering import Prompt
from pipeline.images.steps import STEPS
from pipeline.records import BuiltCandidate, ImageCandidate, PipelineServing, write_record
from pipeline.weight_files import check_finite

# what can change an image
LIBRARIES = ("torch", "diffusers", "transformers", "tokenizers", "safetensors")


def build_image_candidate(name: str, track: ImageTrack, *, root: Path, build: Path) -> ImageCandidate:
    """Build one candidate and write `candidates/<name>/` under `build`.

    Args:
        name: of the candidate.
        track: the section `images` of params.yaml.
        root: project root, which paths of checkpoints and evalsets are relative to.
        build: folder of the track's results, inside `root`.

    Raises:
        SettingsError: no candidate has this name, or a step asks for what its pipeline can't do.
        CheckpointError: its pipeline folder is missing, damaged or unsafe.
        NumericsError: a range fix can't hold what it must.
    """
    if name not in track.candidates:
        raise SettingsError(f"images.candidates: expected one of {', '.join(track.candidates)}, got {name!r}")
    target = build / "candidates" / name
    working = target.with_name(f".{name}.new")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    try:
        built, serving = _build(name, track, working, target, root=root)
        write_record(working / "candidate.json", built)
        shutil.rmtree(target, ignore_errors=True)
        working.rename(target)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return ImageCandidate(**built.model_dump(), serving=serving)


def _build(
    name: str, track: ImageTrack, working: Path, target: Path, *, root: Path
) -> tuple[BuiltCandidate, PipelineServing]:
    settings = track.candidates[name]
    source = root / settings.checkpoint
    checkpoint = describe_pipeline(source, root=root)
    check_finite(iterate_weights(source), where=source)
    serving, records = sample_plainly(track), []
    if settings.steps:
        folder = working / "checkpoint"
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("README.md", "card.json", "*.png"))
        for i, step in enumerate(settings.steps):
            more = {"prompts": load_prompts(track, root)} if isinstance(step, VaeRangeFixStep) else {}
            before = serving
            try:
                serving, record = STEPS[step.kind](folder, serving, step=step, **more)
            except (NumericsError, SettingsError) as error:
                raise type(error)(f"images.candidates.{name}.steps.{i}: {error}") from None
            records.append(step.model_dump(mode="json") | record | {"serving": _list_changes(before, serving)})
        made = describe_pipeline(folder, root=root, parent_digest=checkpoint.digest)
        check_finite(iterate_weights(folder), where=folder)
        checkpoint = made.model_copy(update={"path": (target / "checkpoint").relative_to(root).as_posix()})
    versions = {library: importlib.metadata.version(library) for library in LIBRARIES}
    built = BuiltCandidate(name=name, checkpoint=checkpoint, steps=tuple(records), libraries=versions)
    return built, serving


def load_prompts(track: ImageTrack, root: Path) -> list[Prompt]:
    """Return the prompts of the track's first eval, in its order."""
    evalset = load_evalset(root / next(iter(track.evals.values())).evalset)
    return [Prompt(case.prompt, case.seed) for case in evalset.cases]


def _list_changes(before: PipelineServing, after: PipelineServing) -> dict[str, Any]:
    was, now = before.model_dump(mode="json"), after.model_dump(mode="json")
    return {key: value for key, value in now.items() if was[key] != value}
