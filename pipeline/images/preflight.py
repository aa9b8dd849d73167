"""Check the section `images` against the files it names, before any work; free of torch and diffusers."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.digests import digest_folder
from pipeline.errors import CheckpointError, SettingsError
from pipeline.evalsets import CASES_FILE, Evalset, load_evalset
from pipeline.image_params import GuidanceStep, ImageTrack
from pipeline.images.folders import open_pipeline

_CLIP_FILES = ("config.json", "model.safetensors", "preprocessor_config.json")


def check_images(track: ImageTrack, root: Path) -> None:
    """Refuse settings that the named files contradict.

    Raises:
        SettingsError: with the path of the key, what it names, and what there is.
        EvalsetError: with file and line.
    """
    evalsets = {name: _load_prompts(f"images.evals.{name}", root / e.evalset) for name, e in track.evals.items()}
    buckets = {bucket for evalset in evalsets.values() for bucket in evalset.card.buckets}
    for name, settings in track.evals.items():
        for file in _CLIP_FILES:
            if not (root / settings.clip / file).is_file():
                raise SettingsError(f"images.evals.{name}.clip: expected a CLIP checkpoint folder with {file}, found "
                                    f"none in {settings.clip!r}; correct the path, or save model and processor there")
    for metric, tolerance in track.gate.tolerances.items():
        known = evalsets[metric.split("/")[0]].card.buckets
        for bucket in tolerance.buckets:
            if bucket not in known:
                raise SettingsError(f"images.gate.tolerances.{metric}.buckets.{bucket}: the evalset has no such "
                                    f"bucket; it has {', '.join(known) or 'none'}")
    check = cache(open_pipeline)  # most candidates share a folder
    for name, candidate in track.candidates.items():
        try:
            check(root / candidate.checkpoint)
        except CheckpointError as error:
            raise SettingsError(f"images.candidates.{name}.checkpoint: {error}") from None
        for i, step in enumerate(candidate.steps):
            for category in step.by_category if isinstance(step, GuidanceStep) else ():
                if category not in buckets:
                    raise SettingsError(f"images.candidates.{name}.steps.{i}.by_category.{category}: the evalsets have "
                                        f"no such bucket; they have {', '.join(sorted(buckets)) or 'none'}")


def describe_material(track: ImageTrack, root: Path) -> dict[str, Any]:
    """Return what the track's results depend on beside candidates: DVC watches it."""
    folders = [folder for e in track.evals.values() for folder in (e.evalset, e.clip)]
    folders.append(track.candidates[track.reference].checkpoint)
    notes = frozenset({"README.md"})
    try:
        diffusers = version("diffusers")
    except PackageNotFoundError:
        diffusers = "absent"
    return {"folders": {f: digest_folder(root / f, ignore=notes) for f in folders}, "diffusers": diffusers}


def _load_prompts(where: str, folder: Path) -> Evalset:
    if not (folder / CASES_FILE).is_file():
        raise SettingsError(f"{where}.evalset: expected an evalset folder with card.yaml and {CASES_FILE}, got "
                            f"{str(folder)!r}")
    evalset = load_evalset(folder)
    if evalset.card.kind != "prompts":
        raise SettingsError(f"{where}.evalset: expected an evalset of kind 'prompts', {evalset.card.name!r} is of kind "
                            f"{evalset.card.kind!r}")
    return evalset
