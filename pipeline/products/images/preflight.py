"""Check products of images against the files it names, before any work; free of torch and diffusers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, SettingsError
from pipeline.evalsets.cards import load_evalset
from pipeline.evalsets.cases import CASES_FILE, PromptCase
from pipeline.evalsets.checks import check_buckets, check_each_once, check_seams_are_gated, load_kind
from pipeline.products.images.denoiser_checks import check_denoiser
from pipeline.products.images.folders import ImageShape, open_pipeline, read_part, read_shape
from pipeline.products.images.linear_layers import choose_layers, list_stored_matrices
from pipeline.products.images.settings import GuidanceStep, ImagesProduct, QuantizeStep, VaeTilingStep
from pipeline.running.kept_digests import digest_once
from pipeline.running.weight_folders import read_config_file

_CLIP_FILES = ("config.json", "model.safetensors", "preprocessor_config.json")


def check_images(product: ImagesProduct, root: Path) -> None:
    """Refuse settings that the named files contradict.

    Raises:
        SettingsError: with the path of the key, what it names, and what there is.
        EvalsetError: with file and line.
    """
    evalsets = {
        name: load_kind(load_evalset, root / e.evalset, product.locate(f"evals.{name}.evalset"), "prompts")
        for name, e in product.evals.items()
    }
    buckets = {bucket for evalset in evalsets.values() for bucket in evalset.card.buckets}
    for name, settings in product.evals.items():
        check_each_once(root / settings.evalset / CASES_FILE, evalsets[name].cases)
        for file in _CLIP_FILES:
            if not (root / settings.clip / file).is_file():
                raise SettingsError(
                    f"{product.locate('evals')}.{name}.clip: expected a CLIP checkpoint folder with {file}, found "
                    f"none in {settings.clip!r}; correct the path, or save model and processor there"
                )
    check_buckets(product, evalsets)
    cases = [case for evalset in evalsets.values() for case in evalset.cases]
    check = cache(open_pipeline)  # most candidates share a folder
    wanted = _read_shape(product, product.reference, root, check)
    for name, candidate in product.candidates.items():
        shape = _read_shape(product, name, root, check)
        if shape != wanted:
            raise SettingsError(
                f"candidates.{name}.checkpoint: expected images as the reference draws them, "
                f"{wanted.pixels} pixels from {wanted.latent_channels} latent channels, got "
                f"{shape.pixels} from {shape.latent_channels}; they can't be compared"
            )
        check_denoiser(product, name, root)
        for i, step in enumerate(candidate.steps):
            where = f"candidates.{name}.steps.{i}"
            if isinstance(step, GuidanceStep):
                _check_categories(where, step, buckets, cases)
            elif isinstance(step, VaeTilingStep):
                _check_tiles(where, step, shape)
                check_seams_are_gated(product)
            elif isinstance(step, QuantizeStep):
                _check_layers(where, step, root / candidate.checkpoint)


def _read_shape(product: ImagesProduct, name: str, root: Path, check: Callable[[Path], object]) -> ImageShape:
    folder = root / product.candidates[name].checkpoint
    try:
        check(folder)
        return read_shape(folder)
    except CheckpointError as error:
        raise SettingsError(f"candidates.{name}.checkpoint: {error}") from None


def _check_tiles(where: str, step: VaeTilingStep, shape: ImageShape) -> None:
    """Refuse tiles that cut nothing, or whose window has no whole latent pixel to blend."""
    if step.tile >= shape.pixels or step.tile % shape.factor:
        raise SettingsError(
            f"{where}.tile: expected less than the images' {shape.pixels} pixels, which one "
            f"tile would hold, and a multiple of {shape.factor}, got {step.tile}"
        )
    if step.window != "none" and step.tile * step.overlap < shape.factor:
        raise SettingsError(
            f"{where}.overlap: expected a latent pixel ({shape.factor} pixels) or more for window "
            f"{step.window} to blend, got {step.overlap:g} of a tile of {step.tile}; raise it, or set "
            "window: none"
        )


def _check_layers(where: str, step: QuantizeStep, folder: Path) -> None:
    """Refuse a part that is quantised already, and patterns that name none of its layers, by its headers alone."""
    config = folder / step.part / "config.json"
    if "quantization_config" in read_config_file(
        config, f"the config of component {step.part!r}", if_missing="mend it"
    ):
        raise SettingsError(
            f"{where}: expected float weights to quantise, {config} has a quantization_config; name the float pipeline"
        )
    try:
        choose_layers(list_stored_matrices(read_part(folder / step.part)), step.exclude)
    except SettingsError as error:
        raise SettingsError(f"{where}.{error}" if str(error).startswith("exclude") else f"{where}: {error}") from None


def _check_categories(where: str, step: GuidanceStep, buckets: set[str], cases: Sequence[PromptCase]) -> None:
    for category in step.by_category:
        if category not in buckets:
            raise SettingsError(
                f"{where}.by_category.{category}: the evalsets have no such bucket; they have "
                f"{', '.join(sorted(buckets)) or 'none'}"
            )
    for case in cases:
        if len(guided := [bucket for bucket in case.buckets if bucket in step.by_category]) > 1:
            raise SettingsError(
                f"{where}.by_category: expected one guidance for a prompt, got those of "
                f"{' and '.join(guided)} for case {case.id!r}; name fewer buckets"
            )


def digest_material(product: ImagesProduct, root: Path) -> dict[str, Any]:
    """Return the digests of what results depend on beside candidates, and the version of diffusers."""
    folders = [folder for e in product.evals.values() for folder in (e.evalset, e.clip)]
    folders.append(product.candidates[product.reference].checkpoint)
    notes = frozenset({"README.md"})
    return {
        "folders": {f: digest_once(root / f, root=root, ignore=notes) for f in folders},
        "diffusers": _read_version("diffusers"),
    }


def read_torchao() -> dict[str, str]:
    """Return the version of torchao, which quantised candidates depend on."""
    return {"torchao": _read_version("torchao")}


def _read_version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "absent"
