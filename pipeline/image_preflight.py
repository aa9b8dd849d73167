"""Check the section `images` against the files it names, before any work; free of torch and diffusers."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.digests import digest_folder
from pipeline.errors import CheckpointError, SettingsError
from pipeline.evalsets import load_evalset
from pipeline.image_params import GuidanceStep, ImageTrack
from pipeline.images.folders import open_pipeline
from pipeline.preflight import check_buckets, load_kind

_CLIP_FILES = ("config.json", "model.safetensors", "preprocessor_config.json")


def check_images(track: ImageTrack, root: Path) -> None:
    """Refuse settings that the named files contradict.

    Raises:
        SettingsError: with the path of the key, what it names, and what there is.
        EvalsetError: with file and line.
    """
    evalsets = {name: load_kind(load_evalset, root / e.evalset, f"images.evals.{name}.evalset", "prompts")
                for name, e in track.evals.items()}  # fmt: skip
    buckets = {bucket for evalset in evalsets.values() for bucket in evalset.card.buckets}
    for name, settings in track.evals.items():
        for file in _CLIP_FILES:
            if not (root / settings.clip / file).is_file():
                raise SettingsError(f"images.evals.{name}.clip: expected a CLIP checkpoint folder with {file}, found "
                                    f"none in {settings.clip!r}; correct the path, or save model and processor there")
    check_buckets("images.gate", track, evalsets)
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
