"""The settings of the text product: candidates, engines, serving, evals and the benchmark.

Those of optimisation steps are in `step_settings.py`; `problems.py` finds contradictions in all of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from pipeline.products.text.metrics import HARNESS, PERPLEXITY, TOOL_CALLS, TRAJECTORIES
from pipeline.products.text.step_settings import SpeculativeStep, Step
from pipeline.records.benchmarks import Work
from pipeline.settings.base import Eval, Product, Settings, Trace
from pipeline.settings.execution import MAX_WORKERS

KERNEL_REPORT_OPTION = "worker-extension-cls"
KERNEL_REPORT = "quantgate_kernels.KernelReport"  # in serving/vllm_worker, which vLLM's workers import
CONTAINER_PROGRAMS = ("docker", "podman")
NonEmpty = Annotated[str, Field(min_length=1)]


class Engine(Settings):
    """Base of an engine's settings, and as class attributes what the pipeline asks of its kind.

    Attributes:
        is_embedded: it runs in processes of this environment.
        is_attached: somebody else starts it and decides how it serves.
    """

    is_embedded: ClassVar[bool] = False
    is_attached: ClassVar[bool] = False

    @property
    def num_stages(self) -> int:
        """Parts that have whole layers."""
        return 1

    @property
    def num_parts(self) -> int:
        """Parts of the weights, each on a GPU of its own."""
        return 1

    @property
    def num_copies(self) -> int:
        """Copies of the weights behind one address."""
        return 1

    @property
    def num_whole_gpus(self) -> int:
        """GPUs that it takes whole; 0: it shares them."""
        return 0

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

    @property
    def num_stages(self) -> int:
        """Parts that have whole layers; a number that is none is vLLM's to refuse."""
        stages = self.options.get("pipeline-parallel-size", 1)
        return stages if type(stages) is int and stages > 0 else 1

    @property
    def num_parts(self) -> int:
        """Parts of the weights, by layer and within layers."""
        return self.tensor_parallel_size * self.num_stages

    @property
    def num_copies(self) -> int:
        """Copies of the weights behind one address."""
        return self.data_parallel_size

    @property
    def num_whole_gpus(self) -> int:
        """GPUs of all copies."""
        return self.num_parts * self.num_copies

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

    num_servers: int = Field(
        default=1, ge=1, le=MAX_WORKERS
    )  # over the GPUs that are visible; params.yaml: as `execution` says
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

    def count_whole_gpus(self, candidate: str) -> int:
        """Return how many GPUs a candidate's engine takes whole, as vLLM does."""
        return self.candidates[candidate].engine.num_whole_gpus

    def restrict(self, names: Collection[str]) -> Self:
        """Return the settings with only these candidates, timed ones among them."""
        timed = [name for name in self.benchmark.candidates if name in names]
        return (
            super()
            .restrict(names)
            .model_copy(update={"benchmark": self.benchmark.model_copy(update={"candidates": timed})})
        )
