"""The settings of products of vision: plain torch modules, what makes them smaller and faster, and what watches them.

Each names an adapter, a file of the user's own that builds the module and knows its inputs and outputs
(`pipeline/products/vision/adapters.py`). No step rewrites weights: each says how they are run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.products.vision.detection_settings import DetectionEval, find_bucket_problems
from pipeline.products.vision.metrics import UPSCALING
from pipeline.settings.base import (
    Eval,
    GateSettings,
    Product,
    Settings,
    find_metric_problems,
    find_product_problems,
    find_repeated_steps,
    find_unwatched_evals,
    find_window_problems,
)

Dtype = Literal["float32", "bfloat16", "float16"]
Algorithm = Literal["direct", "winograd_f23", "winograd_f43"]


class PrecisionStep(Settings):
    """The number format of weights and activations, or with autocast of the operations that torch deems safe."""

    kind: Literal["precision"]
    dtype: Dtype
    autocast: bool = False


class ConvRule(Settings):
    """How the convolutions that a pattern names are computed."""

    layers: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)  # names, or shell patterns of them
    algorithm: Algorithm
    dtype: Dtype
    reason: str = ""


class ConvPolicyStep(Settings):
    """The algorithm and the arithmetic of each convolution (Lavin and Gray 2015), emulated exactly."""

    kind: Literal["conv_policy"]
    algorithm: Algorithm  # of the 3x3 convolutions with stride 1 that no rule names; all others are direct
    dtype: Dtype  # of all convolutions that no rule names
    rules: list[ConvRule] = []  # the first that names a layer holds


class MemoryFormatStep(Settings):
    """Channels-last memory format for weights and input."""

    kind: Literal["channels_last"]


class CompileStep(Settings):
    """torch.compile."""

    kind: Literal["compile"]
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    dynamic: bool | None = None  # shapes; None: as torch decides once it has met a second one


class TilingStep(Settings):
    """Run in tiles that overlap, which bounds memory."""

    kind: Literal["tiling"]
    tile: int = Field(ge=8)  # pixels of the input
    overlap: float = Field(ge=0, le=0.5)  # fraction of a tile
    window: Literal["none", "linear", "hann"]


NetworkStep = Annotated[
    PrecisionStep | ConvPolicyStep | MemoryFormatStep | CompileStep | TilingStep, Field(discriminator="kind")
]
SPEED_STEPS = ("channels_last", "compile")  # whose only reason is speed


class NetworkCandidateSettings(Settings):
    """A folder with config.json and model.safetensors, and the steps that say how it would be run."""

    checkpoint: str
    steps: list[NetworkStep]

    @property
    def is_for_speed(self) -> bool:
        """Some step's only reason is speed: without a sure gain it is not released."""
        return any(step.kind in SPEED_STEPS for step in self.steps)


class ServingSettings(Settings):
    """How pictures are run through a network, for all candidates alike: what can change an output."""

    batch_size: int = Field(ge=1, le=256)  # pictures of one size together
    num_threads: int = Field(ge=1, le=256)  # torch threads of each process


class ResourceSettings(Settings):
    """How much of the machine is taken: what changes no output."""

    num_workers: int = Field(ge=1, le=64)  # processes


class UpscalingEval(Eval):
    """Pictures enlarged, and compared with what they were made from."""

    metrics = UPSCALING
    hub_task = "image-to-image"
    kind: Literal["upscaling"]
    evalset: str


class NetworkGateSettings(GateSettings):
    """The decision rule's settings, and how slow a candidate may be."""

    # of the time of one batch, to that of the reference in float32 without a step: surely more fails
    max_slowdown: float | None = Field(default=None, gt=0, le=10)


VisionEval = Annotated[DetectionEval | UpscalingEval, Field(discriminator="kind")]


class VisionProduct(Product):
    """A product of kind `vision`: torch modules behind an adapter, all of whose evals are of one kind."""

    kind: Literal["vision"]
    adapter: str  # Python file
    calibration_images: str | None = None  # an evalset that nothing is evaluated on: what a policy is proposed from
    candidates: dict[str, NetworkCandidateSettings] = Field(min_length=1)
    serving: ServingSettings
    resources: ResourceSettings
    evals: dict[str, VisionEval] = Field(min_length=1)
    gate: NetworkGateSettings

    @property
    def task(self) -> str:
        """What it does, by the kind of its evals."""
        return next(iter(self.evals.values())).kind

    def list_rules(self) -> dict[str, Any]:
        """Return which candidates are there for speed, which must be timed, and how slow they may be."""
        return {
            "for_speed": tuple(name for name, candidate in self.candidates.items() if candidate.is_for_speed),
            "timed": tuple(name for name in self.candidates if self._must_be_timed(name)),
            "max_slowdown": self.gate.max_slowdown,
        }

    def _must_be_timed(self, name: str) -> bool:
        """Say whether a candidate may take another time than the reference: by a step, or as another checkpoint."""
        candidate, reference = self.candidates[name], self.candidates[self.reference]
        steps = {
            step.kind for step in candidate.steps if not isinstance(step, PrecisionStep) or step.dtype != "float32"
        }
        is_other = Path(candidate.checkpoint) != Path(reference.checkpoint) or "tiling" in steps
        is_asked = self.gate.max_slowdown is not None and is_other
        return "conv_policy" not in steps and (is_asked or bool(steps & {"precision", *SPEED_STEPS}))


def find_network_problems(product: VisionProduct) -> list[str]:
    """Return what contradicts itself in a product, one line each, starting with the key's path."""
    problems = find_product_problems(product) + find_metric_problems(product)
    problems += find_unwatched_evals(product, "finite_output_rate", "NaN and infinity")
    problems += [
        f"evals.{name}.kind: expected {product.task}, as the first eval has, got {settings.kind}: an adapter "
        "gives boxes or pictures; make it a product of its own"
        for name, settings in product.evals.items()
        if settings.kind != product.task
    ]
    problems += [
        f"candidates.{name}.{problem}"
        for name, candidate in product.candidates.items()
        for problem in _step_problems(candidate.steps, product.task)
    ]
    problems += [
        f"evals.{name}.{problem}"
        for name, settings in product.evals.items()
        if isinstance(settings, DetectionEval)
        for problem in find_bucket_problems(settings)
    ]
    return problems


def _step_problems(steps: list[Any], task: str) -> list[str]:
    kinds = [step.kind for step in steps]
    problems = find_repeated_steps(steps)
    if "conv_policy" in kinds:
        # an emulation's own speed and number format say nothing
        problems += [
            f"steps.{i}: expected no {kind} beside conv_policy, which is emulated in float32 and says for "
            "each layer in which arithmetic; remove one of them"
            for i, kind in enumerate(kinds)
            if kind in ("precision", "channels_last", "compile")
        ]
    if "tiling" in kinds and task == "detection":
        problems.append(
            f"steps.{kinds.index('tiling')}: expected a step that a detector knows, got tiling: a box may "
            "lie in two tiles; remove it"
        )
    problems += [
        f"steps.{i}.autocast: expected bfloat16 or float16 with it, got float32; remove autocast"
        for i, step in enumerate(steps)
        if isinstance(step, PrecisionStep) and step.autocast and step.dtype == "float32"
    ]
    return problems + find_window_problems(steps)
