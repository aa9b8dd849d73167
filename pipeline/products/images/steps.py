"""The steps that change how a pipeline is run: number formats, memory format, guidance, tiling.

Each takes the pipeline folder, which it leaves as it is, and the serving config so far, and returns the new one. The
steps that rewrite weights are `vae_range_fix.py` and `quantize.py`, the one that measures first is `channels_last.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.products.images.channels_last import run_channels_last
from pipeline.products.images.results import StepResult
from pipeline.products.images.schedulers import SCHEDULER_CONFIG, check_thresholding
from pipeline.products.images.settings import (
    GuidanceStep,
    QuantizeStep,
    TransformerPrecisionStep,
    UnetPrecisionStep,
    VaePrecisionStep,
    VaeTilingStep,
)
from pipeline.products.images.vae_range_fix import run_vae_range_fix
from pipeline.records.serving import PipelineServing, Tiling


def run_vae_precision(folder: Path, serving: PipelineServing, *, step: VaePrecisionStep) -> StepResult:
    """Decode in a number format."""
    return StepResult(serving.model_copy(update={"vae_dtype": step.dtype}))


def run_denoiser_precision(
    folder: Path, serving: PipelineServing, *, step: UnetPrecisionStep | TransformerPrecisionStep
) -> StepResult:
    """Denoise in a number format; the record's name of it is from when there were U-Nets alone."""
    return StepResult(serving.model_copy(update={"unet_dtype": step.dtype}))


def run_guidance(folder: Path, serving: PipelineServing, *, step: GuidanceStep) -> StepResult:
    """Guide otherwise; thresholding is the scheduler's own.

    Raises:
        SettingsError: the scheduler knows no dynamic thresholding.
    """
    options = dict(serving.scheduler)
    if step.dynamic_threshold_percentile is not None:
        check_thresholding(folder / SCHEDULER_CONFIG)
        options |= {
            "thresholding": True,
            "dynamic_thresholding_ratio": step.dynamic_threshold_percentile / 100,
            "sample_max_value": step.sample_max_value,
        }
    return StepResult(
        serving.model_copy(
            update={
                "guidance_scale": step.scale,
                "guidance_rescale": step.rescale,
                "guidance_by_category": {name: guidance.model_dump() for name, guidance in step.by_category.items()},
                "scheduler": options,
            }
        )
    )


def run_vae_tiling(folder: Path, serving: PipelineServing, *, step: VaeTilingStep) -> StepResult:
    """Decode in tiles."""
    return StepResult(serving.model_copy(update={"tiling": Tiling(**step.model_dump(exclude={"kind"}))}))


def run_quantize(folder: Path, serving: PipelineServing, *, step: QuantizeStep) -> StepResult:
    """Store linear layers in 8 bits; torchao is imported for this alone."""
    from pipeline.products.images import quantize

    return quantize.run_quantize(folder, serving, step=step)


STEPS: dict[str, Callable[..., StepResult]] = {
    "vae_precision": run_vae_precision,
    "unet_precision": run_denoiser_precision,
    "transformer_precision": run_denoiser_precision,
    "vae_range_fix": run_vae_range_fix,
    "quantize": run_quantize,
    "channels_last": run_channels_last,
    "guidance": run_guidance,
    "vae_tiling": run_vae_tiling,
}
