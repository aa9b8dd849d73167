"""The settings of products of vision: torch modules or .onnx files, what makes them faster, and what watches them.

Each names an adapter, a file of the user's own that builds the module and knows its inputs and outputs
(`pipeline/products/vision/adapters.py`). One step rewrites weights, `quantize`; each other says how they are run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from pipeline.products.vision.detection_settings import DetectionEval, find_bucket_problems
from pipeline.products.vision.metrics import UPSCALING
from pipeline.settings.base import (
    Eval,
    GateSettings,
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
Algorithm = Literal["direct", "winograd_f23", "winograd_f43"]


class VisionStep(Settings):
    """A step of a network: it says how weights are run, or rewrites them."""

    is_for_speed: ClassVar[bool] = False  # its only reason is speed: without a sure gain it is not released
    is_emulated: ClassVar[bool] = False  # an emulation's own speed and number format say nothing
    fits_emulation: ClassVar[bool] = True  # it may stand beside a step that is emulated
    runs_tiles: ClassVar[bool] = False  # another amount of work than the whole picture

    @property
    def changes_time(self) -> bool:
        """The same work takes another time with it."""
        return self.is_for_speed

    def build_serving(self) -> dict[str, Any]:
        """Return what it changes of the serving config; nothing where that depends on the network."""
        return {}


class PrecisionStep(VisionStep):
    """The number format of weights and activations, or with autocast of the operations that torch deems safe."""

    fits_emulation = False
    kind: Literal["precision"]
    dtype: Dtype
    autocast: bool = False

    @property
    def changes_time(self) -> bool:
        """Float32 is what the reference runs in."""
        return self.dtype != "float32"

    def build_serving(self) -> dict[str, Any]:
        """Return the number format."""
        return {"dtype": self.dtype, "autocast": self.autocast}


class QuantizeStep(VisionStep):
    """Static quantisation after training: weights per channel, activations per tensor, by calibration pictures."""

    fits_emulation = False
    kind: Literal["quantize"]
    dtype: Literal["int8"]
    num_pictures: int = Field(ge=1)  # of `calibration_images`
    # how the range of an activation is found: its extremes, or the part of its histogram that loses least
    observer: Literal["minmax", "histogram"] = "histogram"
    exclude: list[Annotated[str, Field(min_length=1)]] = []  # names of layers that stay float, or shell patterns

    @property
    def changes_time(self) -> bool:
        """Other kernels run."""
        return True


class ConvRule(Settings):
    """How the convolutions that a pattern names are computed."""

    layers: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)  # names, or shell patterns of them
    algorithm: Algorithm
    dtype: Dtype
    reason: str = ""


class ConvPolicyStep(VisionStep):
    """The algorithm and the arithmetic of each convolution (Lavin and Gray 2015), emulated exactly."""

    is_emulated = True
    kind: Literal["conv_policy"]
    algorithm: Algorithm  # of the 3x3 convolutions with stride 1 that no rule names; all others are direct
    dtype: Dtype  # of all convolutions that no rule names
    rules: list[ConvRule] = []  # the first that names a layer holds


class MemoryFormatStep(VisionStep):
    """Channels-last memory format for weights and input."""

    is_for_speed, fits_emulation = True, False
    kind: Literal["channels_last"]

    def build_serving(self) -> dict[str, Any]:
        """Return the memory format."""
        return {"channels_last": True}


class CompileStep(VisionStep):
    """torch.compile."""

    is_for_speed, fits_emulation = True, False
    kind: Literal["compile"]
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    dynamic: bool | None = None  # shapes; None: as torch decides once it has met a second one

    def build_serving(self) -> dict[str, Any]:
        """Return how it is compiled."""
        return {"compile_mode": self.mode, "compile_dynamic": self.dynamic}


class TilingStep(VisionStep):
    """Run in tiles that overlap, which bounds memory."""

    runs_tiles = True
    kind: Literal["tiling"]
    tile: int = Field(ge=8)  # pixels of the input
    overlap: float = Field(ge=0, le=0.5)  # fraction of a tile
    window: Literal["none", "linear", "hann"]

    def build_serving(self) -> dict[str, Any]:
        """Return the tiles."""
        return {"tiling": self.model_dump(exclude={"kind"})}


AnyStep = PrecisionStep | QuantizeStep | ConvPolicyStep | MemoryFormatStep | CompileStep | TilingStep
NetworkStep = Annotated[AnyStep, Field(discriminator="kind")]
SPEED_STEPS = tuple(
    get_args(step.model_fields["kind"].annotation)[0] for step in get_args(AnyStep) if step.is_for_speed
)


class NetworkCandidateSettings(Settings):
    """A folder with config.json and model.safetensors, and the steps that say how it would be run; or an .onnx file."""

    checkpoint: str
    steps: list[NetworkStep]
    trace: Trace = False

    @property
    def is_for_speed(self) -> bool:
        """Some step's only reason is speed: without a sure gain it is not released."""
        return any(step.is_for_speed for step in self.steps)

    @property
    def quantize(self) -> QuantizeStep | None:
        """The step that rewrites weights; None where there is none."""
        return next((step for step in self.steps if isinstance(step, QuantizeStep)), None)


class ServingSettings(Settings):
    """How pictures are run through a network, for all candidates alike: what can change an output."""

    batch_size: int = Field(ge=1, le=256)  # pictures of one size together
    num_threads: int = Field(ge=1, le=256)  # of each process, by which one operation is run


class ResourceSettings(Settings):
    """How much of the machine is taken: what changes no output."""

    num_workers: int = Field(default=1, ge=1, le=MAX_WORKERS)  # processes


class UpscalingEval(Eval):
    """Pictures enlarged, and compared with what they were made from."""

    metrics = UPSCALING
    may_tile: ClassVar[bool] = True  # a picture is put together of tiles
    hub_task = "image-to-image"
    kind: Literal["upscaling"]
    evalset: str


class NetworkGateSettings(GateSettings):
    """The decision rule's settings, and how slow a candidate may be."""

    # of the time of one batch, to that of the reference in float32 without a step: surely more fails
    max_slowdown: float | None = Field(default=None, gt=0, le=10)


VisionEval = Annotated[DetectionEval | UpscalingEval, Field(discriminator="kind")]


class VisionProduct(Product):
    """A product of kind `vision`: torch modules or .onnx files behind an adapter, with evals of one kind."""

    kind: Literal["vision"]
    adapter: str  # Python file
    calibration_images: str | None = (
        None  # an evalset that nothing is evaluated on, to quantise and to propose policies by
    )
    candidates: dict[str, NetworkCandidateSettings] = Field(min_length=1)
    serving: ServingSettings
    resources: ResourceSettings = ResourceSettings()  # of params.yaml: as `execution` says
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
        if any(step.is_emulated for step in candidate.steps):
            return False
        runs_tiles = any(step.runs_tiles for step in candidate.steps)
        is_other = Path(candidate.checkpoint) != Path(reference.checkpoint) or runs_tiles
        is_asked = self.gate.max_slowdown is not None and is_other
        return is_asked or any(step.changes_time for step in candidate.steps)


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
        f"candidates.{name}.steps.{i}: expected calibration pictures, found no products.{product.name}."
        "calibration_images; name an evalset that nothing is evaluated on"
        for name, candidate in product.candidates.items()
        for i, step in enumerate(candidate.steps)
        if isinstance(step, QuantizeStep) and product.calibration_images is None
    ]
    may_tile = all(settings.may_tile for settings in product.evals.values())
    problems += [
        f"candidates.{name}.{problem}"
        for name, candidate in product.candidates.items()
        for problem in _step_problems(candidate.steps, may_tile=may_tile)
    ]
    problems += [
        f"evals.{name}.{problem}"
        for name, settings in product.evals.items()
        if isinstance(settings, DetectionEval)
        for problem in find_bucket_problems(settings)
    ]
    return problems


def _step_problems(steps: list[AnyStep], *, may_tile: bool) -> list[str]:
    problems = find_repeated_steps(steps)
    problems += [
        f"steps.{i}: expected no {step.kind} beside {emulated.kind}, which is emulated in float32 and says for "
        "each layer in which arithmetic; remove one of them"
        for emulated in [step for step in steps if step.is_emulated][:1]
        for i, step in enumerate(steps)
        if not step.fits_emulation
    ]
    problems += [
        f"steps.{i}: expected no precision beside quantize, which says for each layer in which format it runs; "
        "remove one of them"
        for i, step in enumerate(steps)
        if isinstance(step, PrecisionStep) and any(isinstance(other, QuantizeStep) for other in steps)
    ]
    problems += [
        f"steps.{i}: expected a step that a detector knows, got {step.kind}: a box may lie in two tiles; remove it"
        for i, step in enumerate(steps)
        if step.runs_tiles and not may_tile
    ]
    problems += [
        f"steps.{i}.autocast: expected bfloat16 or float16 with it, got float32; remove autocast"
        for i, step in enumerate(steps)
        if isinstance(step, PrecisionStep) and step.autocast and step.dtype == "float32"
    ]
    return problems + find_window_problems(steps)
