"""How a candidate is run, as JSON on disk: a server of a checkpoint, a diffusers pipeline, a torch module, or another.

Each has an `identity`: settings that make one way of serving another, by name. `evaluations.py` says what is served.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SerializeAsAny, SerializerFunctionWrapHandler, model_serializer

from pipeline.records.fingerprints import name_command, read_environment
from pipeline.records.record_files import Record
from pipeline.records.speculation import SpeculativeConfig


class ServingConfig(Record):
    """How a checkpoint is served; everything here can change an answer or its speed.

    `concurrency` is the number of requests in flight per server: in reduced precision the batch
    composition alone can flip an answer, so it belongs to the fingerprint.
    """

    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    dtype: str = "float32"
    attention: str = "sdpa"
    continuous_batching: bool = True
    concurrency: int = 32
    num_threads: int = 1
    context_length: int = 1024  # tokens
    temperature: float = 0.0
    max_tokens: int = 128  # completion tokens a request
    base_url: str | None = None
    model: str | None = None
    api_key_env: str | None = None  # variable that holds the key
    command: tuple[str, ...] = ()  # that starts the engine
    version: str | None = None  # of the engine, where it is not a library of this environment
    options: dict[str, Any] = {}  # of the engine, in its own spelling
    environment: dict[str, str] = {}  # that the engine is started with
    speculative: SpeculativeConfig | None = None

    @property
    def summary(self) -> str:
        """The most important settings in a few words."""
        return f"{self.engine} {self.dtype} {self.attention}, {self.concurrency} in flight"

    @property
    def tiling(self) -> None:
        """Pictures only: a text is not cut."""

    def identity(self) -> dict[str, Any]:
        """Return every setting that makes one way of serving another, by name: no address, no path."""
        plain = self.model_dump(exclude={"base_url", "api_key_env", "command", "version", "environment", "speculative"})
        parts = ("method", "num_tokens", "draft_digest", "options")
        return (
            plain
            | {f"speculative.{part}": getattr(self.speculative, part, None) for part in parts}
            | {"command": name_command(self.command), "environment": read_environment(self.environment)}
        )


class LocalServing(Record):
    """How a kind of product that has no record in this file is run; its own record derives from this one.

    Read back as this class it keeps all that the record has, so that its digest is the same.
    """

    model_config = ConfigDict(extra="allow")

    engine: str
    dtype: str = "float32"

    @property
    def summary(self) -> str:
        """The most important settings in a few words."""
        return f"{self.engine} {self.dtype}"

    @property
    def tiling(self) -> None:
        """Pictures only."""

    @property
    def speculative(self) -> None:
        """Text only: no drafts."""

    @property
    def base_url(self) -> None:
        """Text only: runs in the process of the stage."""

    def identity(self) -> dict[str, Any]:
        """Return every setting that makes one way of serving another, by name."""
        return self.model_dump(mode="json")


class Tiling(Record):
    """How an input is cut into tiles whose outputs are blended."""

    tile: int  # pixels: of the image that a decoder writes, of the picture that a network is given
    overlap: float  # fraction of a tile
    window: Literal["none", "linear", "hann"]

    @property
    def overlap_pixels(self) -> int:
        """The overlap in the pixels of `tile`, at most half a tile."""
        return min(round(self.tile * self.overlap), self.tile // 2)


class ConvArithmetic(Record):
    """How one convolution is computed."""

    algorithm: Literal["direct", "winograd_f23", "winograd_f43"]
    dtype: Literal["float32", "bfloat16", "float16"]


class PipelineServing(Record):
    """How a diffusers pipeline is run; everything here can change an image or its speed."""

    engine: Literal["diffusers"] = "diffusers"
    unet_dtype: str = "float32"  # of the U-Net or transformer, and the text encoders
    vae_dtype: str = "float32"
    channels_last: tuple[str, ...] = ()  # parts in that memory format
    num_inference_steps: int
    guidance_scale: float
    guidance_rescale: float = 0.0
    guidance_by_category: dict[str, dict[str, float]] = {}  # bucket -> scale and rescale
    tiling: Tiling | None = None
    batch_size: int = 1  # prompts together
    num_threads: int = 1  # torch threads
    scheduler: dict[str, Any] = {}  # options that differ from its config in the checkpoint

    @model_serializer(mode="wrap")
    def _leave_out_nothing(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write the scheduler's options only where there are any: releases of before they were kept have none."""
        written: dict[str, Any] = write(self)
        return {key: value for key, value in written.items() if key != "scheduler" or value}

    @property
    def summary(self) -> str:
        """The most important settings in a few words."""
        guidance = f"guidance {self.guidance_scale:g} rescale {self.guidance_rescale:g}"
        parts = [f"{self.engine} denoiser {self.unet_dtype} VAE {self.vae_dtype}", guidance]
        parts += [f"channels-last {' and '.join(self.channels_last)}"] if self.channels_last else []
        parts += [f"tiles of {self.tiling.tile} {self.tiling.window}"] if self.tiling else []
        parts += ["dynamic thresholding"] if self.scheduler.get("thresholding") else []
        return ", ".join(parts)

    @property
    def dtype(self) -> str:
        """The number format of most of the work."""
        return self.unet_dtype

    @property
    def speculative(self) -> None:
        """Text only: no drafts."""

    @property
    def base_url(self) -> None:
        """Text only: runs in the process of the stage."""

    def identity(self) -> dict[str, Any]:
        """Return every setting that makes one way of serving another, by name."""
        plain = self.model_dump(exclude={"tiling", "guidance_by_category", "scheduler"}, mode="json")
        parts = {f"tiling.{key}": getattr(self.tiling, key, None) for key in Tiling.model_fields}
        return plain | parts | {"guidance_by_category": self.guidance_by_category, "scheduler": self.scheduler}


class NetworkServing(Record):
    """How a network is run, by torch or ONNX Runtime; everything here can change what comes out or its speed."""

    engine: Literal["torch", "onnxruntime"] = "torch"
    dtype: str = "float32"
    autocast: bool = False  # weights stay float32, and torch picks the operations that run in `dtype`
    channels_last: bool = False
    conv_policy: dict[str, ConvArithmetic] = {}  # by layer; empty: torch's own convolutions
    compile_mode: str | None = None
    compile_dynamic: bool | None = None  # shapes; None: as torch decides
    tiling: Tiling | None = None
    batch_size: int = 1  # pictures of one size together
    num_threads: int = 1  # that one operation uses

    @property
    def summary(self) -> str:
        """The most important settings in a few words."""
        if self.engine == "onnxruntime":  # the file says in which format what runs
            return self.engine
        kinds = sorted({f"{c.algorithm} {c.dtype}" for c in self.conv_policy.values()})
        parts = [f"{self.engine} {self.dtype}{' autocast' if self.autocast else ''}"]
        parts += [f"emulated {' and '.join(kinds)}"] if kinds else []
        parts += ["channels-last"] if self.channels_last else []
        parts += [f"compiled {self.compile_mode}"] if self.compile_mode else []
        parts += [f"tiles of {self.tiling.tile} {self.tiling.window}"] if self.tiling else []
        return ", ".join(parts)

    @property
    def plain(self) -> NetworkServing:
        """The run without a step: in float32, whole pictures."""
        return NetworkServing(engine=self.engine, batch_size=self.batch_size, num_threads=self.num_threads)

    @property
    def plain_tiled(self) -> NetworkServing | None:
        """The run without a step in the same tiles.

        None where it would say nothing: of an emulated policy, and of what is run that way itself.
        """
        plain = self.plain.model_copy(update={"tiling": self.tiling})
        return None if self.conv_policy or self == plain else plain

    def choose_total(self, *, is_other: bool) -> NetworkServing | None:
        """Return the run of the reference beside which the time in total is told.

        Without a step, in the same tiles; whole pictures where tiles are the only step. None where it would say
        nothing: of an emulated policy, and of the reference's own weights run plainly.

        Args:
            is_other: the candidate's checkpoint is not the reference's.
        """
        if self.conv_policy or self.plain_tiled is not None:
            return self.plain_tiled
        return self.plain if is_other or self.tiling else None

    @property
    def speculative(self) -> None:
        """Text only: no drafts."""

    @property
    def base_url(self) -> None:
        """Text only: runs in the process of the stage."""

    def identity(self) -> dict[str, Any]:
        """Return every setting that makes one way of serving another, by name."""
        plain = self.model_dump(exclude={"tiling"}, mode="json")
        return plain | {f"tiling.{key}": getattr(self.tiling, key, None) for key in Tiling.model_fields}


# in this order: a record of the last class may hold anything
AnyServing = Annotated[
    ServingConfig | PipelineServing | NetworkServing | SerializeAsAny[LocalServing], Field(union_mode="left_to_right")
]
