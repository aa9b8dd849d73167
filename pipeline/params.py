"""params.yaml as a typed, strict, frozen object: the only validator of user settings.

Every stage calls `load_params` first, so whichever runs first validates the whole file: unknown
keys, wrong types and impossible combinations are refused with the path of the key. Checks that
need a file beside params.yaml (layer shapes, an evalset's buckets) are in `preflight.py`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.errors import SettingsError, describe_problem
from pipeline.image_params import IMAGE_STEP_KINDS, ImageTrack, find_image_problems
from pipeline.network_params import NETWORK_STEP_KINDS, DetectorTrack, UpscalerTrack, find_network_problems
from pipeline.settings import TRACKS, Settings, Track, describe_yaml_error, find_track_problems, find_unknown_metrics

TRANSFORMERS_METHODS = ("draft_model", "prompt_lookup")
# ways of verifying drafts that keep a token only when it is the target's own, or drawn as the target would draw it
LOSSLESS_REJECTION = ("standard", "strict", "block")
LOSSY_OPTIONS = ("posterior_threshold", "posterior_alpha", "typical_acceptance_sampler_posterior_threshold",
                 "assistant_ensemble_weight")  # fmt: skip

T = TypeVar("T", bound=Track)


class Calibration(Settings):
    """Which texts a quantiser sees, how many, how long, and how they are weighted."""

    sources: list[str] = Field(min_length=1)  # buckets of the calibration set
    num_samples: int = Field(ge=1)
    max_tokens: int = Field(ge=1)  # a sample is cut after this many tokens
    length_exponent: float = Field(ge=0, le=4)  # sampling weight = (number of tokens) ** exponent
    seed: int = Field(default=0, ge=0)  # the sign would be dropped


class _Int4Step(Settings):
    bits: Literal[4, 8] = 4
    group_size: int = Field(default=128, ge=1)
    symmetric: bool = True
    exclude: list[str] = ["lm_head"]  # layer-name patterns: exact, or "re:<regex>"
    calibration: Calibration


class GptqStep(_Int4Step):
    """GPTQ (Frantar et al. 2022): second-order rounding, layer by layer."""

    kind: Literal["gptq"]
    damping_fraction: float = Field(default=0.01, gt=0, lt=1)
    activation_order: bool = False


class AwqStep(_Int4Step):
    """AWQ (Lin et al. 2023): scale salient channels by activation before rounding."""

    kind: Literal["awq"]
    num_grid_points: int = Field(default=20, ge=3)  # the grid steps by 1 / (points - 2)


class SpeculativeStep(Settings):
    """Speculative decoding (Leviathan et al. 2022): tokens are drafted cheaply, the target checks them in one pass."""

    kind: Literal["speculative"]
    method: str  # "draft_model", "prompt_lookup", or another one that the engine knows
    draft: str | None = None  # checkpoint folder of the draft model
    num_tokens: int = Field(ge=1, le=16)  # drafted per target forward pass
    min_acceptance: float | None = Field(default=None, gt=0, le=1)  # of the drafted tokens; below it fails
    options: dict[str, Any] = {}  # further ones of the method, as the engine spells them
    lossy: bool = False  # the answers may be others than the target's own


Step = Annotated[GptqStep | AwqStep | SpeculativeStep, Field(discriminator="kind")]


NonEmpty = Annotated[str, Field(min_length=1)]


class TransformersEngine(Settings):
    """The embedded engine: `transformers serve` in processes of this environment."""

    kind: Literal["transformers"] = "transformers"


class VllmEngine(Settings):
    """vLLM, started from an environment or a container of its own."""

    kind: Literal["vllm"]
    command: list[NonEmpty] = Field(min_length=1)  # that runs `vllm serve`; `--config FILE --port N` is put behind it
    version: str = Field(pattern=r"^\d+\.\d+\.\d+")  # the release it must be
    options: dict[str, Any] = {}  # of `vllm serve`, as its config file spells them
    environment: dict[str, str] = {}  # variables that it is started with


class OpenaiEngine(Settings):
    """A server of the OpenAI API that somebody else runs."""

    kind: Literal["openai"]
    base_url: str
    model: NonEmpty
    api_key_env: NonEmpty | None = None  # variable that holds the key; the key itself is written nowhere


EngineSettings = Annotated[TransformersEngine | VllmEngine | OpenaiEngine, Field(discriminator="kind")]


class CandidateSettings(Settings):
    """A checkpoint, the steps that turn it into what would ship, and the engine that serves it."""

    checkpoint: str
    steps: list[Step]
    engine: EngineSettings = TransformersEngine()
    exact: bool = False  # any answer of the canary that differs from the reference path's fails

    @property
    def speculative(self) -> SpeculativeStep | None:
        """The step that changes how the candidate is served, or None."""
        return next((step for step in self.steps if isinstance(step, SpeculativeStep)), None)


class OptimizeSettings(Settings):
    """What all optimisation steps share."""

    calibration_texts: str  # an evalset folder of kind `documents`
    num_threads: int = Field(ge=1, le=256)  # torch threads


class ServingSettings(Settings):
    """How the embedded engine serves, and how hard the client drives it."""

    dtype: Literal["float32", "bfloat16", "float16"]
    continuous_batching: bool
    concurrency: int = Field(ge=1, le=512)  # requests in flight per server
    num_servers: int = Field(ge=1, le=64)
    num_threads: int = Field(ge=1, le=256)  # torch threads per server
    context_length: int = Field(ge=16)  # tokens
    max_tokens: int = Field(ge=1)  # completion tokens a request
    request_timeout_s: float = Field(gt=0)
    start_timeout_s: float = Field(gt=0)


class CanarySettings(Settings):
    """The prompts that every candidate answers several ways, and what a difference means."""

    num_prompts: int = Field(ge=8, le=10_000)  # spread over the evals that chat
    target_rate: float = Field(ge=0.001, lt=0.5)  # of answers that another path changes: what must be noticed
    session_calls: int = Field(default=5, ge=1)  # of a user's session: what a rate comes to over one


class PerplexityEval(Settings):
    """Perplexity and bits per byte of held-out documents, and the material for divergence."""

    kind: Literal["perplexity"]
    evalset: str
    top_logprobs: int = Field(default=20, ge=1, le=100)


class HarnessEval(Settings):
    """One lm-eval task: a task name, with the folder of its YAML when it is not built in."""

    kind: Literal["harness"]
    task: str
    include_path: str | None = None
    num_fewshot: int = Field(default=0, ge=0)


class ToolCallsEval(Settings):
    """Single tool calls with expected arguments."""

    kind: Literal["tool_calls"]
    evalset: str
    send_tools: bool = False  # put the card's tools into every request


class TrajectoriesEval(Settings):
    """Multi-step workflows against simulated tools, judged by the final state."""

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


class Params(Track):
    """The whole of params.yaml: the text track, and beside it the others."""

    name = "text"
    optimize: OptimizeSettings
    candidates: dict[str, CandidateSettings] = Field(min_length=1)
    serving: ServingSettings
    canary: CanarySettings
    evals: dict[str, EvalSettings] = Field(min_length=1)
    benchmark: BenchmarkSettings
    # other products, each gated on its own
    images: ImageTrack | None = None
    detector: DetectorTrack | None = None
    upscaler: UpscalerTrack | None = None

    @property
    def chat_evals(self) -> dict[str, ChatEval]:
        """The evals whose cases are conversations."""
        return {name: e for name, e in self.evals.items() if isinstance(e, ChatEval)}


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and validate params.yaml.

    Raises:
        SettingsError: with the key's path, what was expected and what came.
    """
    try:
        data = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: expected the settings file, found none; run from the project root") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid YAML: {describe_yaml_error(error)}") from None
    return parse_params(data, where=str(path))


def get_track(params: Params, name: str, *, kind: type[T]) -> T:
    """Return a track by its name.

    Args:
        params: the whole file.
        name: one of TRACKS.
        kind: of track that it must be; `Track` is any.

    Raises:
        SettingsError: there is no such track of this kind, or params.yaml has no section for it.
    """
    kinds: dict[str, type[Track]] = {t.name: t for t in (Params, ImageTrack, DetectorTrack, UpscalerTrack)}
    names = [known for known in TRACKS if issubclass(kinds[known], kind)]
    if name not in names:
        raise SettingsError(f"track: expected {' or '.join(names)}, got {name!r}")
    track = params if name == "text" else getattr(params, name)
    if track is None:
        raise SettingsError(f"{name}: expected this section in params.yaml, found none; add it, or remove its stages "
                            "from dvc.yaml")
    assert isinstance(track, kind)
    return track


def check_candidate(track: Track, argv: list[str]) -> str:
    """Return the candidate that a stage was given on its command line.

    Raises:
        SettingsError: not one word, or no candidate of the track.
    """
    if len(argv) != 1 or argv[0] not in track.candidates:
        where = "candidates" if track.name == "text" else f"{track.name}.candidates"
        raise SettingsError(f"{where}: expected one of {', '.join(track.candidates)}, got {' '.join(argv)!r}")
    return argv[0]


def parse_params(data: Any, where: str = "params.yaml") -> Params:
    """Validate settings that were already read from YAML."""
    try:
        params = Params.model_validate(data)
    except ValidationError as error:
        raise SettingsError(f"{where}: {_one_line(error)}") from None
    for problem in _contradictions(params):
        raise SettingsError(f"{where}: {problem}")
    return params


def _contradictions(params: Params) -> list[str]:
    problems = find_track_problems(params)
    problems += [f"candidates.{name}.steps.{i}{problem}" for name, c in params.candidates.items()
                 for i, step in enumerate(c.steps) if isinstance(step, SpeculativeStep)
                 for problem in _speculative_problems(step, c.engine, c.steps[i + 1:])]
    problems += [f"candidates.{name}.{problem}" for name, c in params.candidates.items()
                 for problem in _quantising_problems(c.steps)]
    problems += [f"candidates.{name}.engine.{problem}" for name, c in params.candidates.items()
                 for problem in _engine_problems(c.engine)]
    problems += [f"candidates.{name}.exact: expected an eval of kind tool_calls or trajectories, whose answers show "
                 "whether it is, found none; add one, or remove exact"
                 for name, c in params.candidates.items() if c.exact and not params.chat_evals]
    if params.serving.max_tokens >= params.serving.context_length:
        problems.append(f"serving.max_tokens: expected less than serving.context_length "
                        f"({params.serving.context_length}), which prompt and answer share, got "
                        f"{params.serving.max_tokens}; lower it")
    problems += find_unknown_metrics(params)
    problems += [f"benchmark.{problem}" for problem in _benchmark_problems(params)]
    problems += find_image_problems(params.images) if params.images else []
    for network in (params.detector, params.upscaler):
        problems += find_network_problems(network) if network else []
    return problems


def _benchmark_problems(params: Params) -> list[str]:
    benchmark, serving, problems = params.benchmark, params.serving, []
    for i, name in enumerate(benchmark.candidates):
        if name not in params.candidates or name == params.reference:
            others = ", ".join(c for c in params.candidates if c != params.reference)
            problems.append(f"candidates.{i}: expected one of the candidates beside the reference ({others}), "
                            f"got {name!r}")
        if name in benchmark.candidates[:i]:
            problems.append(f"candidates.{i}: {name!r} is listed twice; remove one")
    if benchmark.candidates and not params.chat_evals:
        problems.append("candidates: the prompts are those of evals of kind tool_calls or trajectories, found none; "
                        "add one, or list no candidate")
    for i, number in enumerate(benchmark.concurrency):
        if number > serving.concurrency or number in benchmark.concurrency[:i]:
            problems.append(f"concurrency.{i}: expected distinct numbers up to serving.concurrency "
                            f"({serving.concurrency}), got {number}")
    ends = [end for band in benchmark.prompt_tokens for end in band]
    if ends != sorted(ends) or any(ends[i] == ends[i + 1] for i in range(1, len(ends) - 1, 2)):
        problems.append("prompt_tokens: expected bands [least, most] that rise and don't overlap, got "
                        f"{benchmark.prompt_tokens}")
    if ends[-1] + benchmark.num_tokens > serving.context_length:
        problems.append(f"num_tokens: expected at most {serving.context_length - ends[-1]}, as the longest prompts "
                        f"({ends[-1]} tokens) share serving.context_length ({serving.context_length}) with the answer, "
                        f"got {benchmark.num_tokens}")
    return problems


def _engine_problems(engine: EngineSettings) -> list[str]:
    if isinstance(engine, OpenaiEngine):
        return find_address_problems(engine.base_url)
    return _command_problems(engine) if isinstance(engine, VllmEngine) else []


def _command_problems(engine: VllmEngine) -> list[str]:
    command = engine.command
    first = command.index("serve") + 1 if "serve" in command else len(command)
    problems = [f"command.{i}: expected no option behind `serve`, got {command[i]!r}: put it into engine.options, or "
                "into a speculative step" for i in range(first, len(command))]
    if Path(command[0]).name in ("docker", "podman"):
        passed = {word.partition("=")[0] for flag, word in pairwise(command) if flag in ("-e", "--env")}
        problems += [f"environment.{name}: expected `-e {name}` in engine.command, as a container gets no variable of "
                     "its client by itself; add it" for name in engine.environment if name not in passed]
    return problems


def _speculative_problems(step: SpeculativeStep, engine: EngineSettings, later: list[Step]) -> list[str]:
    problems = []
    if step.method == "draft_model" and step.draft is None:
        problems.append(".draft: expected the draft model's checkpoint folder for method draft_model, found none")
    if step.method == "prompt_lookup" and step.draft is not None:
        problems.append(f".draft: expected none for method prompt_lookup, got {step.draft!r}; remove it")
    if isinstance(engine, TransformersEngine) and step.method not in TRANSFORMERS_METHODS:
        problems.append(f".method: expected one of {', '.join(TRANSFORMERS_METHODS)} for engine transformers, got "
                        f"{step.method!r}; name another engine")
    if isinstance(engine, TransformersEngine) and step.options:
        problems.append(f".options: expected none for engine transformers, got {step.options!r}; remove them")
    own = [key for key in step.options if key in ("method", "model", "num_speculative_tokens")]
    problems += [f".options.{key}: expected an option that the step does not set itself; it is method, draft or "
                 "num_tokens: remove it" for key in own]
    if reason := _name_loss(step):
        problems.append(f".lossy: expected true, as {reason}, got false; say so, or remove the option")
    if any(key.startswith("synthetic") for key in step.options) or "synthetic" in step.options.values():
        problems.append(".options: expected drafts that are verified, got synthetic acceptance, which accepts tokens "
                        "without looking at them; remove it")
    if later and later[0].kind == "speculative":
        problems.append(": expected one speculative step at most, found another after it; remove one")
    elif later:
        problems.append(f": expected speculative to be the last step, found {later[0].kind} after it: it changes how "
                        "the weights are served, so they must be final; move it to the end")
    return problems


def _name_loss(step: SpeculativeStep) -> str | None:
    """Say why a speculative step may change greedy answers by more than rounding, unless it says so itself."""
    if step.lossy:
        return None
    how = step.options.get("rejection_sample_method", "standard")
    if how not in LOSSLESS_REJECTION:
        return f"rejection_sample_method {how!r} is not known to keep the target's own tokens"
    found = next((key for key in LOSSY_OPTIONS if key in step.options), None)
    return f"{found} lets tokens through that are not the target's" if found else None


def _quantising_problems(steps: list[Step]) -> list[str]:
    problems, found = [], [(i, step) for i, step in enumerate(steps) if not isinstance(step, SpeculativeStep)]
    if len(found) > 1:
        problems.append(f"steps.{found[1][0]}: expected one quantising step at most, found {found[1][1].kind} after "
                        f"{found[0][1].kind}: what is quantised can't be quantised again; remove one")
    for i, step in found:
        sources = step.calibration.sources
        problems += [f"steps.{i}.calibration.sources.{n}: {source!r} is listed twice, and counts once; remove one"
                     for n, source in enumerate(sources) if source in sources[:n]]
    return problems


def find_address_problems(url: str) -> list[str]:
    """Return what is wrong with a text as the address of a server, one line each."""
    try:
        parts = urlsplit(url)
        # a port that is no number below 65536 raises
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment or any(ch.isspace() for ch in url):
        return [f"base_url: expected http://host:port, got {url!r}"]
    if parts.username is not None or parts.password is not None:
        return ["base_url: expected no user and password, which would be written into reports and records; put a key "
                "into an environment variable and name it in api_key_env"]
    return []


def _one_line(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    # a misspelled key is two problems, and the spelling that came says more than the one that is missing
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    tags = {"gptq", "awq", "speculative", "perplexity", "harness", "tool_calls", "trajectories", "transformers", "vllm",
            "openai", *IMAGE_STEP_KINDS, *NETWORK_STEP_KINDS}
    loc = [str(p) for p in problem["loc"]]
    # pydantic puts the union's tag into the path; the file has no such level
    where = ".".join(p for i, p in enumerate(loc) if not (p in tags and i and loc[i - 1].isdigit())
                     and not (p in tags and i == 2 and loc[0] == "evals")
                     and not (p in tags and loc[i - 1] == "engine"))
    return f"{where or '(whole)'}: {describe_problem(problem)}"
