"""The settings of the text product: checkpoints, optimisation steps, engines, evals and the benchmark.

`problems.py` finds contradictions in them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.products.text.metrics import HARNESS, PERPLEXITY, TOOL_CALLS, TRAJECTORIES
from pipeline.products.text.schemes import (
    PRESETS,
    NumberFormat,
    Scheme,
    build_cache_format,
    find_preset,
    has_free_groups,
)
from pipeline.records.benchmarks import Work
from pipeline.settings.base import Eval, Product, Settings, Trace


class Calibration(Settings):
    """Which texts a quantiser sees, how many, how long, and how they are weighted."""

    sources: list[str] = Field(min_length=1)  # buckets of the calibration set
    num_samples: int = Field(ge=1)
    max_tokens: int = Field(ge=1)  # a sample is cut after this many tokens
    length_exponent: float = Field(ge=0, le=4)  # sampling weight = (number of tokens) ** exponent
    seed: int = Field(default=0, ge=0)  # the sign would be dropped


class WeightStep(Settings):
    """A step that rewrites weights; without a calibration it needs no texts."""

    kind: str
    calibration: Calibration | None = None


class NumberFormats(Settings):
    """A scheme of numbers: a preset of compressed-tensors by its name, or weights and inputs spelt out."""

    scheme: str | None = None
    group_size: int | None = Field(default=None, ge=1)  # input channels that share a scale; None: as the scheme has it
    weights: NumberFormat | None = None
    input_activations: NumberFormat | None = None

    def resolve(self) -> Scheme:
        """Return the scheme, with its groups of the size that was asked for."""
        if self.weights is None:
            return find_preset(self.scheme or "", self.group_size)
        return Scheme(weights=self.weights, input_activations=self.input_activations)

    def find_problems(self) -> Iterator[str]:
        """Yield what contradicts itself, one line each, starting with the key."""
        spelt_out = next((name for name in ("input_activations", "weights") if getattr(self, name)), None)
        if self.scheme is not None and self.scheme not in PRESETS:
            yield f"scheme: expected one of {', '.join(PRESETS)}, got {self.scheme!r}"
        elif self.scheme is not None and spelt_out:
            yield f"{spelt_out}: expected none beside the scheme {self.scheme}; remove one"
        elif self.scheme is None and self.weights is None:
            yield f"scheme: expected one of {', '.join(PRESETS)}, or weights spelt out, found none"
        elif self.scheme is not None and self.group_size and not has_free_groups(PRESETS[self.scheme]):
            yield f"group_size: expected none with scheme {self.scheme}, which has its own; remove it"
        elif self.weights is not None and self.group_size is not None:
            yield "group_size: expected it in weights, as they are spelt out; move it there"
        elif self.weights is not None:
            yield from self.resolve().find_problems()


class KvCache(Settings):
    """How keys and values are stored while a model answers.

    Attributes:
        dtype: "fp8" is E4M3.
        strategy: what shares a scale: a layer or a head ("tensor", "attn_head"), calibrated and stored; or each token,
            whose scale is taken while it runs.
    """

    dtype: Literal["fp8"]
    strategy: Literal["tensor", "attn_head", "token"] = "tensor"

    def resolve(self) -> NumberFormat:
        """Return the numbers that it is stored in."""
        return build_cache_format(self.strategy)


class LayerRule(NumberFormats):
    """The scheme of some layers, in place of the step's own."""

    layers: list[str] = Field(min_length=1)  # layer-name patterns: exact, or "re:<regex>"


# settings that one algorithm alone has
_OWN_SETTINGS = {"damping_fraction": "gptq", "activation_order": "gptq", "num_grid_points": "awq"}


class QuantizeStep(WeightStep, NumberFormats):
    """Quantise the linear layers: store weights in few bits, and round inputs where the scheme says so.

    Attributes:
        algorithm: how weights are rounded. "rtn" rounds to nearest. "gptq" (Frantar et al. 2022) makes up for errors
            layer by layer, to second order. "awq" (Lin et al. 2023) scales salient channels before it rounds.
        rules: of some layers; the first that matches a layer counts.
        kv_cache: keys and values in few bits; None: as they are. Without a scheme it is all that the step quantises.
        smoothing_strength: of SmoothQuant (Xiao et al. 2022), which moves outliers of inputs into the weights before
            they are rounded; None: it is left out.
        world_size: processes that share the calibration, one a GPU. Another number writes other weights.
    """

    kind: Literal["quantize", "gptq", "awq"]  # the last two are read as `quantize`, see below
    algorithm: Literal["rtn", "gptq", "awq"] = "rtn"
    exclude: list[str] = ["lm_head"]  # layer-name patterns: exact, or "re:<regex>"
    rules: list[LayerRule] = []
    kv_cache: KvCache | None = None
    smoothing_strength: float | None = Field(default=None, gt=0, lt=1)
    damping_fraction: float = Field(default=0.01, gt=0, lt=1)  # of the mean Hessian diagonal
    activation_order: bool = False
    num_grid_points: int = Field(default=20, ge=3)  # the grid steps by 1 / (points - 2)
    world_size: int = Field(default=1, ge=1, le=64)

    @property
    def rounds_to_nearest(self) -> bool:
        """Whether no weight is further than half a step from its source."""
        return self.algorithm != "gptq"

    @property
    def is_cache_alone(self) -> bool:
        """Whether weights and inputs stay as they are."""
        others = (self.scheme, self.group_size, self.weights, self.input_activations, *self.rules)
        return self.kv_cache is not None and all(other is None for other in others)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The step's own scheme, and those of its rules."""
        return () if self.is_cache_alone else (self.resolve(), *(rule.resolve() for rule in self.rules))

    def build_record(self) -> dict[str, Any]:
        """Return the settings as JSON, without those that another algorithm has; one process is as before any."""
        unused = {name for name, owner in _OWN_SETTINGS.items() if owner != self.algorithm}
        return self.model_dump(mode="json", exclude=unused | ({"world_size"} if self.world_size == 1 else set()))

    @model_validator(mode="before")
    @classmethod
    def _read_old(cls, data: Any) -> Any:
        """Take the settings of a released bundle, where the kind was the algorithm and `bits` stood for the scheme."""
        if not isinstance(data, dict) or data.get("kind") not in ("gptq", "awq"):
            return data
        bits, symmetric, size = data.get("bits", 4), data.get("symmetric", True), data.get("group_size", 128)
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size, "symmetric": symmetric}
        presets = {"4 True": "W4A16", "4 False": "W4A16_ASYM", "8 True": "W8A16"}
        preset = presets.get(f"{bits!r} {symmetric!r}")
        old = {"scheme": preset, "group_size": size} if preset else {"weights": weights}
        kept = {key: value for key, value in data.items() if key not in ("bits", "symmetric", "group_size")}
        return kept | old | {"kind": "quantize", "algorithm": data["kind"]}

    def find_problems(self) -> Iterator[str]:
        """Yield what contradicts itself, one line each, starting with the key."""
        formats: dict[str, NumberFormats] = {} if self.is_cache_alone else {"": self}
        formats |= {f"rules.{i}.": rule for i, rule in enumerate(self.rules)}
        problems = [at + text for at, one in formats.items() for text in NumberFormats.find_problems(one)]
        yield from problems
        for name, algorithm in _OWN_SETTINGS.items():
            is_changed = getattr(self, name) != type(self).model_fields[name].default
            if is_changed and algorithm != self.algorithm:
                yield f"{name}: {algorithm} alone has it, got algorithm {self.algorithm}; remove it"
        if self.smoothing_strength is not None and self.algorithm == "awq":
            yield "smoothing_strength: expected none with algorithm awq, which scales channels itself; remove it"
        if self.is_cache_alone and self.exclude != type(self).model_fields["exclude"].default:
            yield "exclude: expected none without a scheme, as no layer is quantised; remove it"
        if self.is_cache_alone and (self.algorithm != "rtn" or self.smoothing_strength is not None):
            yield "scheme: expected the numbers that weights are stored in, found none beside kv_cache; set one"
            return
        if problems:
            return
        coarse = next((s.weights.name for s in self.schemes if s.weights.strategy == "tensor"), None)
        if coarse and self.algorithm == "awq":
            yield f"algorithm: expected rtn or gptq, as {coarse} has one scale a layer and awq scales channels, got awq"
        needs = next((scheme.name for scheme in self.schemes if scheme.needs_calibration), None)
        if self.kv_cache and not self.kv_cache.resolve().dynamic:
            needs = f"kv_cache with strategy {self.kv_cache.strategy}"
        if self.smoothing_strength is not None:
            needs = "smoothing_strength"
        if self.algorithm != "rtn":
            needs = self.algorithm
        if needs and self.calibration is None:
            yield f"calibration: expected the texts that {needs} is calibrated on, found none"
        if self.calibration and not needs:
            yield "calibration: expected none, as rounding to nearest looks at no text here; remove it"
        if self.world_size > 1 and self.calibration is None:
            yield f"world_size: expected 1 without calibration, which is all that ranks share, got {self.world_size}"
        if self.calibration and self.world_size > (num := self.calibration.num_samples):
            yield f"world_size: expected at most a rank for each of {num} samples, got {self.world_size}"


class SpeculativeStep(Settings):
    """Speculative decoding (Leviathan et al. 2022): tokens are drafted cheaply, the target checks them in one pass."""

    kind: Literal["speculative"]
    method: str  # "draft_model", "prompt_lookup", or another one that the engine knows
    draft: str | None = None  # checkpoint of the draft model: a folder, or hf://ORG/NAME@REVISION
    num_speculative_tokens: int = Field(ge=1, le=16)  # drafted per target forward pass
    min_acceptance: float | None = Field(default=None, gt=0, le=1)  # of the drafted tokens; below it fails
    options: dict[str, Any] = {}  # further ones of the method, as the engine spells them
    lossy: bool = False  # the answers may be others than the target's own

    def build_record(self) -> dict[str, Any]:
        """Return the settings as JSON, without the gate's: another threshold makes no other candidate."""
        return self.model_dump(mode="json", exclude={"min_acceptance"})

    @model_validator(mode="before")
    @classmethod
    def _read_old(cls, data: Any) -> Any:
        """Take the settings of a released bundle, which may spell the number of drafted tokens `num_tokens`."""
        if not isinstance(data, dict) or "num_tokens" not in data or "num_speculative_tokens" in data:
            return data
        kept = {key: value for key, value in data.items() if key != "num_tokens"}
        return kept | {"num_speculative_tokens": data["num_tokens"]}


Step = Annotated[QuantizeStep | SpeculativeStep, Field(discriminator="kind")]

KERNEL_REPORT_OPTION = "worker-extension-cls"
KERNEL_REPORT = "quantgate_kernels.KernelReport"  # in serving/vllm_worker, which vLLM's workers import
NonEmpty = Annotated[str, Field(min_length=1)]


class Engine(Settings):
    """Base of an engine's settings, and as class attributes what the pipeline asks of its kind.

    Attributes:
        is_embedded: it runs in processes of this environment.
        is_attached: somebody else starts it and decides how it serves.
    """

    is_embedded: ClassVar[bool] = False
    is_attached: ClassVar[bool] = False

    def build_serving(self) -> dict[str, Any]:
        """Return what the engine adds to how a candidate is served, as `ServingConfig` names it."""
        return self.model_dump(exclude={"kind"})


class TransformersEngine(Engine):
    """The embedded engine: `transformers serve` in processes of this environment."""

    is_embedded = True
    kind: Literal["transformers"] = "transformers"


class VllmEngine(Engine):
    """vLLM, started from an environment or a container of its own."""

    kind: Literal["vllm"]
    command: list[NonEmpty] = Field(min_length=1)  # that runs `vllm serve`; `--config FILE --port N` is put behind it
    version: str = Field(pattern=r"^\d+\.\d+\.\d+")  # the release it must be
    options: dict[str, Any] = {}  # of `vllm serve`, as its config file spells them
    environment: dict[str, str] = {}  # variables that it is started with
    tensor_parallel_size: int = Field(default=1, ge=1)  # GPUs that share each layer
    data_parallel_size: int = Field(default=1, ge=1)  # copies of the model behind one address
    report_kernels: bool = False  # put the dispatched kernels into the fingerprint; the command must keep PYTHONPATH

    def build_serving(self) -> dict[str, Any]:
        """Return command, release and environment, and all that is asked for as options of `vllm serve`.

        An option that asks for nothing is left out: the fingerprint of a candidate that sets none stays as it was.
        """
        sizes = {"tensor-parallel-size": self.tensor_parallel_size, "data-parallel-size": self.data_parallel_size}
        options = self.options | {option: size for option, size in sizes.items() if size > 1}
        if self.report_kernels:
            options[KERNEL_REPORT_OPTION] = KERNEL_REPORT
        return self.model_dump(include={"command", "version", "environment"}) | {"options": options}


class OpenaiEngine(Engine):
    """A server of the OpenAI API that somebody else runs."""

    is_attached = True
    kind: Literal["openai"]
    base_url: str
    model: NonEmpty
    api_key_env: NonEmpty | None = None  # variable that holds the key; the key itself is written nowhere


EngineSettings = Annotated[TransformersEngine | VllmEngine | OpenaiEngine, Field(discriminator="kind")]


class CandidateSettings(Settings):
    """A checkpoint, the steps that turn it into what would ship, and the engine that serves it."""

    checkpoint: str  # a folder, or hf://ORG/NAME@REVISION
    steps: list[Step]
    engine: EngineSettings = TransformersEngine()
    exact: bool = False  # any answer of the canary that differs from the reference path's fails
    trace: Trace = False

    @property
    def speculative(self) -> SpeculativeStep | None:
        """The step that changes how the candidate is served, or None."""
        return next((step for step in self.steps if isinstance(step, SpeculativeStep)), None)


class OptimizeSettings(Settings):
    """What all optimisation steps share."""

    calibration_texts: str | None = None  # an evalset folder of kind `documents`; None: no step calibrates
    num_threads: int = Field(default=1, ge=1, le=256)  # torch threads


class ServingSettings(Settings):
    """How the embedded engine serves, and how hard the client drives it: each setting can change an answer."""

    dtype: Literal["float32", "bfloat16", "float16"]
    continuous_batching: bool
    concurrency: int = Field(ge=1, le=512)  # requests in flight per server
    num_threads: int = Field(ge=1, le=256)  # torch threads per server
    context_length: int = Field(ge=16)  # tokens
    max_tokens: int = Field(ge=1)  # completion tokens a request
    # of the embedded engine's continuous batching; the device decides what is not set
    use_cuda_graph: bool | None = None
    max_batch_tokens: int | None = Field(default=None, ge=16, le=65_536)  # new tokens per forward

    @property
    def options(self) -> dict[str, Any]:
        """The settings that the embedded engine alone knows, in its own spelling, where they are set."""
        return self.model_dump(include={"use_cuda_graph", "max_batch_tokens"}, exclude_none=True)


class ResourceSettings(Settings):
    """How much of the machine is taken, and how long is waited: in float32 no setting changes an answer.

    In bfloat16 and float16 another cache, or another number of servers, batches otherwise and may turn a near tie.
    """

    num_servers: int = Field(default=1, ge=1, le=64)  # over the GPUs that are visible; params.yaml: as `execution` says
    kv_cache_gib: float | None = Field(default=None, gt=0)  # of the embedded engine; None: as much as helps and fits
    request_timeout_s: float = Field(default=300, gt=0)
    start_timeout_s: float = Field(default=600, gt=0)


class CanarySettings(Settings):
    """The prompts that every candidate answers several ways, and what a difference means."""

    num_prompts: int = Field(default=100, ge=8, le=10_000)  # spread over the evals that have the model write texts
    # of answers that another path changes; such a path must be noticed
    target_rate: float = Field(default=0.05, ge=0.001, lt=0.5)
    session_calls: int = Field(default=5, ge=1)  # of a user's session, over which a rate is stated


class TextEval(Eval):
    """Base of a text eval's settings, and as class attributes what the pipeline asks of its kind.

    Attributes:
        card_kind: the kind of evalset that it reads; "" where a task brings its own cases.
        needs_logprobs: it asks for the log-probabilities of given tokens.
        needs_first_token: it puts a BOS or EOS token before each text.
        shows_weights: its scores of an attached server show whether it serves the candidate's weights.
    """

    hub_task = "text-generation"
    card_kind: ClassVar[str] = ""
    needs_logprobs: ClassVar[bool] = False
    needs_first_token: ClassVar[bool] = False
    shows_weights: ClassVar[bool] = False


class PerplexityEval(TextEval):
    """Perplexity and bits per byte of held-out documents, and the material for divergence."""

    metrics = PERPLEXITY
    card_kind = "documents"
    needs_logprobs = True
    needs_first_token = True
    shows_weights = True
    kind: Literal["perplexity"]
    evalset: str
    top_logprobs: int = Field(default=20, ge=1, le=100)


class HarnessEval(TextEval):
    """One lm-eval task: a task name, with the folder of its YAML when it is not built in."""

    metrics = HARNESS
    needs_logprobs = True
    kind: Literal["harness"]
    task: str
    include_path: str | None = None
    num_fewshot: int = Field(default=0, ge=0)


class ToolCallsEval(TextEval):
    """Single tool calls with expected arguments."""

    metrics = TOOL_CALLS
    chats = True
    card_kind = "tool_calls"
    kind: Literal["tool_calls"]
    evalset: str
    send_tools: bool = False  # put the card's tools into every request


class TrajectoriesEval(TextEval):
    """Multi-step workflows against simulated tools, judged by the final state."""

    metrics = TRAJECTORIES
    chats = True
    card_kind = "trajectories"
    kind: Literal["trajectories"]
    evalset: str
    max_turns: int = Field(ge=1)
    send_tools: bool = False


ChatEval = ToolCallsEval | TrajectoriesEval
EvalSettings = Annotated[PerplexityEval | HarnessEval | ChatEval, Field(discriminator="kind")]


_Count = Annotated[int, Field(ge=1)]


class BenchmarkSettings(Settings):
    """Which candidates are timed against the reference, and on what work."""

    candidates: list[str]
    concurrency: list[_Count] = Field(min_length=1)  # requests in flight
    prompt_tokens: list[Annotated[list[_Count], Field(min_length=2, max_length=2)]] = Field(min_length=1)
    num_tokens: int = Field(ge=2)  # completion tokens of every request; one has no inter-token latency
    rounds: int = Field(ge=6, le=100)  # fewer have no 95 % interval of their median
    max_slowdown: float | None = Field(default=None, gt=0, lt=1)  # of the throughput, relative; more fails

    def build_work(self) -> Work:
        """Return the part of the settings that says what work is done."""
        return Work(**self.model_dump(include=set(Work.model_fields)))


NOTHING_TIMED = BenchmarkSettings(candidates=[], concurrency=[1], prompt_tokens=[[1, 2]], num_tokens=2, rounds=6)


class TextProduct(Product):
    """A product of kind `text`: checkpoints of language models, served and asked."""

    takes_hub_models = True
    workers_key = "num_servers"
    kind: Literal["text"]
    optimize: OptimizeSettings = OptimizeSettings()
    candidates: dict[str, CandidateSettings] = Field(min_length=1)
    serving: ServingSettings
    resources: ResourceSettings = ResourceSettings()
    canary: CanarySettings = CanarySettings()
    evals: dict[str, EvalSettings] = Field(min_length=1)
    benchmark: BenchmarkSettings = NOTHING_TIMED

    @property
    def chat_evals(self) -> dict[str, ChatEval]:
        """The evals whose cases are conversations."""
        return {name: e for name, e in self.evals.items() if isinstance(e, ChatEval)}

    @property
    def task_evals(self) -> dict[str, HarnessEval]:
        """The evals that are lm-eval tasks."""
        return {name: e for name, e in self.evals.items() if isinstance(e, HarnessEval)}

    @property
    def may_generate(self) -> bool:
        """Whether an eval may have the model write texts; of a task only its own files say so."""
        return bool(self.chat_evals or self.task_evals)

    def list_rules(self) -> dict[str, Any]:
        """Return the rules for drafts, canary and benchmark."""
        limit = self.benchmark.max_slowdown
        return {
            "min_acceptance": {
                name: c.speculative.min_acceptance
                for name, c in self.candidates.items()
                if c.speculative and c.speculative.min_acceptance is not None
            },
            "canary": self.canary.model_dump(),
            "exact": tuple(name for name, c in self.candidates.items() if c.exact),
            "benchmarked": tuple(self.benchmark.candidates),
            "max_slowdown": limit,
            "grid": self.benchmark.model_dump(exclude={"candidates", "max_slowdown"}),
            "timed": () if limit is None else tuple(self.release),
        }

    def restrict(self, names: Collection[str]) -> Self:
        """Return the settings with only these candidates, timed ones among them."""
        timed = [name for name in self.benchmark.candidates if name in names]
        return (
            super()
            .restrict(names)
            .model_copy(update={"benchmark": self.benchmark.model_copy(update={"candidates": timed})})
        )
