"""Refuse settings that what denoises in a candidate's pipeline would ignore, before any work; free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.products.images.folders import read_denoiser, read_index, read_part_config
from pipeline.products.images.schedulers import SCHEDULER_CONFIG, check_thresholding
from pipeline.products.images.settings import (
    ChannelsLastStep,
    Guidance,
    GuidanceStep,
    ImagesProduct,
    QuantizeStep,
    TransformerPrecisionStep,
    UnetPrecisionStep,
)


def check_denoiser(product: ImagesProduct, name: str, root: Path) -> None:
    """Refuse a pipeline of another class than the reference's, a step for another part, and guidance that it ignores.

    Args:
        product: settings.
        name: of the candidate, whose folder was checked.
        root: project root.

    Raises:
        SettingsError: with the path of the key, what was expected and what there is.
    """
    folder = root / product.candidates[name].checkpoint
    kind = read_index(folder)["_class_name"]
    if kind != (wanted := read_index(root / product.candidates[product.reference].checkpoint)["_class_name"]):
        raise SettingsError(
            f"candidates.{name}.checkpoint: expected a {wanted}, as the reference is, whose decoder judges the same "
            f"latents, got a {kind}; give it a product of its own"
        )
    _check_steps(product, name, folder)
    _check_limits(product, folder)
    _check_guidance(product, name, folder)


def _check_steps(product: ImagesProduct, name: str, folder: Path) -> None:
    kind, part = read_index(folder)["_class_name"], read_denoiser(folder).part
    for i, step in enumerate(product.candidates[name].steps):
        where = f"candidates.{name}.steps.{i}"
        if isinstance(step, UnetPrecisionStep | TransformerPrecisionStep) and step.part != part:
            raise SettingsError(
                f"{where}: expected {part}_precision, as a {kind} denoises by its {part}, got {step.kind}; rename it"
            )
        if isinstance(step, QuantizeStep) and step.part != part:
            raise SettingsError(
                f"{where}.part: expected {part}, by which a {kind} denoises, got {step.part}; set part: {part}"
            )
        if isinstance(step, ChannelsLastStep) and part != "unet" and "unet" in step.parts:
            raise SettingsError(
                f"{where}.parts: expected vae alone, as a {kind} has no U-Net and its {part} hardly a convolution, got "
                "unet; remove that"
            )
        if isinstance(step, GuidanceStep) and step.dynamic_threshold_percentile is not None:
            try:
                check_thresholding(folder / SCHEDULER_CONFIG)
            except SettingsError as error:
                raise SettingsError(f"{where}.{error}") from None


def _check_limits(product: ImagesProduct, folder: Path) -> None:
    """Refuse a limit of what would be 1 whatever is drawn: without a second pass nothing widens a prediction."""
    limited = [("tolerances", key) for key in product.gate.tolerances]
    limited += [("tripwires", key) for key in product.gate.tripwires]
    for section, key in limited:
        if read_denoiser(folder).guidance == "input" and key.endswith("/guided_std_ratio"):
            raise SettingsError(
                f"{product.locate('gate')}.{section}.{key}: expected no limit of it, as {folder} is a "
                f"{read_index(folder)['_class_name']}, whose prediction is guided already; remove it"
            )


def _check_guidance(product: ImagesProduct, name: str, folder: Path) -> None:
    denoiser, kind = read_denoiser(folder), read_index(folder)["_class_name"]
    config = folder / denoiser.part / "config.json"
    takes_guidance = denoiser.takes_guidance(read_part_config(folder, denoiser.part))
    for where, guidance in _list_guidance(product, name):
        if guidance.rescale and denoiser.guidance != "rescaled":
            how = "whose U-Net takes guidance as an input" if denoiser.part == "unet" else "which rescales no guidance"
            raise SettingsError(
                f"{where}.rescale: expected 0, as {folder} is a {kind}, {how}, got {guidance.rescale:g}; remove it"
            )
        if guidance.rescale and guidance.scale == 1:
            raise SettingsError(
                f"{where}.rescale: expected 0 beside a scale of 1, which is no guidance that could be rescaled, got "
                f"{guidance.rescale:g}; remove it"
            )
        if guidance.scale != 1 and not takes_guidance:
            raise SettingsError(
                f"{where}.scale: expected 1, which is no guidance, as {config} has no true guidance_embeds, got "
                f"{guidance.scale:g}; set it to 1"
            )


def _list_guidance(product: ImagesProduct, name: str) -> Iterator[tuple[str, Guidance]]:
    """Yield the path and the values of each guidance that a candidate is run with."""
    for i, step in enumerate(product.candidates[name].steps):
        if isinstance(step, GuidanceStep):
            where = f"candidates.{name}.steps.{i}"
            yield where, step
            yield from ((f"{where}.by_category.{bucket}", guidance) for bucket, guidance in step.by_category.items())
            return
    yield product.locate("serving.guidance"), product.serving.guidance
