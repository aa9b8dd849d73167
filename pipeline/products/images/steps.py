"""The steps that change how a pipeline is run: number formats, memory format, guidance, tiling.

Each takes the pipeline folder, which it leaves as it is, and the serving config so far, and returns the new one. The
steps that rewrite weights are `vae_range_fix.py` and `quantize.py`, the one that measures first is `channels_last.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.products.images.channels_last import run_channels_last
from pipeline.products.images.results import StepResult
from pipeline.products.images.schedulers import read_options
from pipeline.products.images.settings import (
    GuidanceStep,
    QuantizeStep,
    UnetPrecisionStep,
    VaePrecisionStep,
    VaeTilingStep,
)
from pipeline.products.images.vae_range_fix import run_vae_range_fix
from pipeline.records.serving import PipelineServing, Tiling


def run_vae_precision(folder: Path, serving: PipelineServing, *, step: VaePrecisionStep) -> StepResult:
    """Decode in a number format."""
    return StepResult(serving.model_copy(update={"vae_dtype": step.dtype}))


def run_unet_precision(folder: Path, serving: PipelineServing, *, step: UnetPrecisionStep) -> StepResult:
    """Denoise in a number format."""
    return StepResult(serving.model_copy(update={"unet_dtype": step.dtype}))


def run_guidance(folder: Path, serving: PipelineServing, *, step: GuidanceStep) -> StepResult:
    """Guide otherwise; thresholding is the scheduler's own.

    Raises:
        SettingsError: the scheduler knows no dynamic thresholding.
    """
    options = dict(serving.scheduler)
    if step.dynamic_threshold_percentile is not None:
        path = folder / "scheduler" / "scheduler_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        name = config.get("_class_name")
        # of a known class its own options: a config keeps those of the class that it was made from
        if "dynamic_thresholding_ratio" not in (read_options(str(name)) or config):
            raise SettingsError(
                f"dynamic_threshold_percentile: expected a scheduler with dynamic thresholding (DDIM, "
                f"DPM-Solver++, UniPC), got {name}; remove it or change the "
                "pipeline's scheduler"
            )
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
    "unet_precision": run_unet_precision,
    "vae_range_fix": run_vae_range_fix,
    "quantize": run_quantize,
    "channels_last": run_channels_last,
    "guidance": run_guidance,
    "vae_tiling": run_vae_tiling,
}
