"""The settings of a product of images: diffusers pipelines, what makes them smaller and faster, and what watches them.

Names are those of diffusers where it has one. What needs a file beside params.yaml is checked in
`pipeline/products/images/folders.py`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pipeline.products.images.metrics import IMAGES
from pipeline.settings.base import (
    Eval,
    Product,
    Settings,
    Trace,
    find_metric_problems,
    find_product_problems,
    find_repeated_steps,
    find_unwatched_evals,
    find_window_problems,
)
from pipeline.settings.execution import MAX_WORKERS

Dtype = Literal["float32", "bfloat16", "float16"]
# torchao's names of what diffusers' TorchAoConfig takes, and a CPU can run: `Float8DynamicActivationFloat8WeightConfig`
# needs a GPU, and `Int4WeightOnlyConfig` a library that has no CPU build
QuantizeScheme = Literal["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]
SAMPLE_MAX = 1.0  # the schedulers' own default


class PipelineStep(Settings):
    """A step of a pipeline."""

    renders_prompts: ClassVar[bool] = False  # it draws prompts of the first eval while the candidate is built
    rewrites_weights: ClassVar[bool] = False  # no step that does not may stand before it


class VaePrecisionStep(PipelineStep):
    """The number format that latents are decoded in; float32 is what diffusers calls `force_upcast`."""

    kind: Literal["vae_precision"]
    dtype: Dtype


class UnetPrecisionStep(PipelineStep):
    """The number format of the U-Net and the text encoders."""

    part: ClassVar[str] = "unet"
    kind: Literal["unet_precision"]
    dtype: Dtype


class TransformerPrecisionStep(PipelineStep):
    """The number format of the transformer and the text encoders, in a pipeline that denoises by one."""

    part: ClassVar[str] = "transformer"
    kind: Literal["transformer_precision"]
    dtype: Dtype


class VaeRangeFixStep(PipelineStep):
    """Rescale the decoder's residual stream so that float16 holds it, and prove that float32 output stays the same."""

    renders_prompts = rewrites_weights = True
    kind: Literal["vae_range_fix"]
    target_absmax: float = Field(default=4096.0, ge=256, le=32768)  # of the residual stream, after scaling
    num_prompts: int = Field(default=32, ge=4)  # at most, from all over the eval, whose latents are measured
    min_headroom: float = Field(default=2.0, ge=0)  # powers of two below the largest float16, in every module
    max_difference: float = Field(default=1e-3, gt=0)  # of the float32 output, whose range is -1 to 1


class QuantizeStep(PipelineStep):
    """The linear layers of a part in 8 bits, by diffusers' TorchAoConfig: a scale for each row of a weight."""

    rewrites_weights = True
    kind: Literal["quantize"]
    part: Literal["unet", "transformer"] = "unet"  # whichever the pipeline has; diffusers quantises parts of its own
    scheme: QuantizeScheme
    dtype: Dtype = "float32"  # of everything else of the part, and of the text encoders, as a step of precision says it
    exclude: list[Annotated[str, Field(min_length=1)]] = []  # linear layers that stay float: exact, or "re:<regex>"

    @property
    def number_format(self) -> Literal["int8", "float8_e4m3fn"]:
        """The format of weights."""
        return "float8_e4m3fn" if self.scheme.startswith("Float8") else "int8"

    @property
    def rounds_inputs(self) -> bool:
        """The input of a layer is rounded to that format too, a scale a token."""
        return "DynamicActivation" in self.scheme


class ChannelsLastStep(PipelineStep):
    """Channels-last memory format, for those of the parts that are measured to gain by it on this machine."""

    renders_prompts = True
    kind: Literal["channels_last"]
    parts: list[Literal["unet", "vae"]] = Field(min_length=1)


class Guidance(Settings):
    """Classifier-free guidance (Ho and Salimans 2022), and what keeps its range down."""

    scale: float = Field(ge=1, le=50)
    rescale: float = Field(default=0.0, ge=0, le=1)  # toward the conditional std (Lin et al. 2023)


class GuidanceStep(Guidance, PipelineStep):
    """Another guidance than the product's; `by_category` overrides it where a prompt has that bucket."""

    kind: Literal["guidance"]
    # of the absolute values of the predicted latents, per image and step (Saharia et al. 2022); None: no thresholding
    dynamic_threshold_percentile: float | None = Field(default=None, gt=50, lt=100)
    # The threshold is that percentile, at least 1 and at most this; latents are clipped at it and divided by it. They
    # have a standard deviation near 1, not a range of 1 as pixels have: at 1, a plain clamp, the third of the values
    # that lies beyond is cut, and above 1 all of them shrink until the largest is 1, so that contrast is lost.
    sample_max_value: float = Field(default=SAMPLE_MAX, ge=1)
    by_category: dict[str, Guidance] = {}


class VaeTilingStep(PipelineStep):
    """Decode in tiles that overlap, which bounds memory."""

    kind: Literal["vae_tiling"]
    tile: int = Field(ge=8)  # pixels
    overlap: float = Field(ge=0, le=0.5)  # fraction of a tile
    window: Literal["none", "linear", "hann"]


ImageStep = Annotated[
    VaePrecisionStep
    | UnetPrecisionStep
    | TransformerPrecisionStep
    | VaeRangeFixStep
    | QuantizeStep
    | ChannelsLastStep
    | GuidanceStep
    | VaeTilingStep,
    Field(discriminator="kind"),
]


class ImageCandidateSettings(Settings):
    """A diffusers pipeline folder and the steps that turn it into what would ship."""

    checkpoint: str
    steps: list[ImageStep]
    trace: Trace = False

    @property
    def quantize(self) -> QuantizeStep | None:
        """The step that quantises; None where there is none."""
        return next((step for step in self.steps if isinstance(step, QuantizeStep)), None)


class ServingSettings(Settings):
    """How images are made, for all candidates alike: what can change a pixel."""

    num_inference_steps: int = Field(ge=1, le=1000)
    guidance: Guidance
    batch_size: int = Field(ge=1, le=256)  # prompts together; rounding depends on it
    num_threads: int = Field(ge=1, le=256)  # torch threads of each process


class ResourceSettings(Settings):
    """How much of the machine is taken: what changes no pixel."""

    num_workers: int = Field(default=1, ge=1, le=MAX_WORKERS)  # processes that render: one per core, or per GPU


class ImagesEval(Eval):
    """One image per prompt, judged as raw numbers, against the float32 decode, and by CLIP."""

    metrics = IMAGES
    hub_task = "text-to-image"
    kind: Literal["images"]
    evalset: str
    clip: str  # CLIP checkpoint folder
    oversaturated_above: float = Field(default=0.05, gt=0, lt=1)  # fraction of an image's pixels that are saturated


class ImagesProduct(Product):
    """A product of kind `images`: diffusers pipelines that draw prompts."""

    kind: Literal["images"]
    candidates: dict[str, ImageCandidateSettings] = Field(min_length=1)
    serving: ServingSettings
    resources: ResourceSettings = ResourceSettings()  # of params.yaml: as `execution` says
    evals: dict[str, ImagesEval] = Field(min_length=1)


def find_image_problems(product: ImagesProduct) -> list[str]:
    """Return what contradicts itself in a product, one line each, starting with the key's path."""
    problems = find_product_problems(product) + find_metric_problems(product)
    problems += find_unwatched_evals(product, "sound_image_rate", "black images and NaN")
    problems += [
        f"candidates.{name}.{problem}"
        for name, candidate in product.candidates.items()
        for problem in _step_problems(candidate.steps)
    ]
    return problems


def _step_problems(steps: list[ImageStep]) -> list[str]:
    problems = find_repeated_steps(steps)
    problems += [
        f"steps.{i}: expected {step.kind} to be the first step, found {before[0].kind} before it; it rewrites weights, "
        "which must be final: move it to the front"
        for i, step in enumerate(steps)
        if step.rewrites_weights and (before := [other for other in steps[:i] if not _may_precede(other, step)])
    ]
    problems += [
        f"steps.{i}: expected no {step.kind} beside quantize, which says by its dtype in which format everything "
        "else runs; remove it"
        for i, step in enumerate(steps)
        if isinstance(step, UnetPrecisionStep | TransformerPrecisionStep)
        and any(isinstance(other, QuantizeStep) for other in steps)
    ]
    problems += [
        f"steps.{i}.sample_max_value: expected dynamic_threshold_percentile beside it, whose threshold it limits, "
        "found none; add that, or remove it"
        for i, step in enumerate(steps)
        if isinstance(step, GuidanceStep)
        and step.dynamic_threshold_percentile is None
        and step.sample_max_value != SAMPLE_MAX
    ]
    return problems + find_window_problems(steps)


def _may_precede(step: ImageStep, other: ImageStep) -> bool:
    """Say whether a step may stand before one that rewrites weights: a range is measured in float32."""
    return step.rewrites_weights and isinstance(other, QuantizeStep)
