"""The objects that pass between stages, as JSON on disk.

`optimize` writes a Candidate, `evaluate` writes CaseRecords and an Evaluation that lists them,
`compare` writes Verdicts. All are frozen, refuse unknown keys and refuse NaN and infinity, so
that a broken number stops at the file where it was written. Files are written under a temporary
name and moved into place: a killed stage leaves no half file behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from pipeline.digests import canonical_json, digest_json
from pipeline.errors import EvidenceError, describe_problem
from pipeline.files import line_of, read_lines, write_text
from pipeline.fingerprints import fingerprint, name_command, read_environment


class Record(BaseModel):
    """Base of everything on disk: frozen, strict about keys and finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Checkpoint(Record):
    """A weights folder and what it holds.

    `path` is relative to the project root; `digest` covers the folder's content; `parent_digest`
    is the digest of the checkpoint it was made from, or None.
    """

    path: str
    kind: str  # the config's model_type, for example "llama"
    format: str  # "dense", or the quantisation format: "compressed-tensors", "gptq", "awq"
    dtype: str
    num_parameters: int
    num_bytes: int
    digest: str
    files: dict[str, str] = {}  # digest of each file: says which one it is when `digest` differs
    parent_digest: str | None = None


class SpeculativeConfig(Record):
    """How a server drafts tokens for the target to check. Where the draft model lies is not part of what it is."""

    method: str  # "draft_model", "prompt_lookup", or what the engine calls another one
    num_tokens: int  # drafted per target forward pass, at most
    options: dict[str, Any] = {}  # of the method, in the engine's own spelling
    draft_digest: str | None = None
    draft_path: str | None = None  # relative to the project root


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

    def identity(self) -> dict[str, Any]:
        """Return every setting that makes one way of serving another, by name: no address, no path."""
        plain = self.model_dump(exclude={"base_url", "api_key_env", "command", "version", "environment", "speculative"})
        parts = ("method", "num_tokens", "draft_digest", "options")
        return plain | {f"speculative.{part}": getattr(self.speculative, part, None) for part in parts} | {
            "command": name_command(self.command), "environment": read_environment(self.environment)
        }


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
    unet_dtype: str = "float32"
    vae_dtype: str = "float32"
    channels_last: tuple[str, ...] = ()  # parts in that memory format
    num_inference_steps: int
    guidance_scale: float
    guidance_rescale: float = 0.0
    guidance_by_category: dict[str, dict[str, float]] = {}  # bucket -> scale and rescale
    tiling: Tiling | None = None
    batch_size: int = 1  # prompts together
    num_threads: int = 1  # torch threads

    @property
    def summary(self) -> str:
        """The most important settings in a few words."""
        guidance = f"guidance {self.guidance_scale:g} rescale {self.guidance_rescale:g}"
        parts = [f"{self.engine} U-Net {self.unet_dtype} VAE {self.vae_dtype}", guidance]
        parts += [f"channels-last {' and '.join(self.channels_last)}"] if self.channels_last else []
        parts += [f"tiles of {self.tiling.tile} {self.tiling.window}"] if self.tiling else []
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
        plain = self.model_dump(exclude={"tiling", "guidance_by_category"}, mode="json")
        parts = {f"tiling.{key}": getattr(self.tiling, key, None) for key in Tiling.model_fields}
        return plain | parts | {"guidance_by_category": self.guidance_by_category}


class NetworkServing(Record):
    """How a torch module is run; everything here can change what comes out or its speed."""

    engine: Literal["torch"] = "torch"
    dtype: str = "float32"
    autocast: bool = False  # weights stay float32, and torch picks the operations that run in `dtype`
    channels_last: bool = False
    conv_policy: dict[str, ConvArithmetic] = {}  # by layer; empty: torch's own convolutions
    compile_mode: str | None = None
    compile_dynamic: bool | None = None  # shapes; None: as torch decides
    tiling: Tiling | None = None
    batch_size: int = 1  # pictures of one size together
    num_threads: int = 1  # torch threads

    @property
    def summary(self) -> str:
        """The most important settings in a few words."""
        kinds = sorted({f"{c.algorithm} {c.dtype}" for c in self.conv_policy.values()})
        parts = [f"{self.engine} {self.dtype}{' autocast' if self.autocast else ''}"]
        parts += [f"emulated {' and '.join(kinds)}"] if kinds else []
        parts += ["channels-last"] if self.channels_last else []
        parts += [f"compiled {self.compile_mode}"] if self.compile_mode else []
        parts += [f"tiles of {self.tiling.tile} {self.tiling.window}"] if self.tiling else []
        return ", ".join(parts)

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


class Fallback(Record):
    """A place where a library did something else than was asked."""

    layer: str
    reason: str


class LayerCoverage(Record):
    """The format one linear layer ended in, as read back from the saved folder."""

    layer: str
    format: str  # "int4-g128-symmetric", "bfloat16", ...
    num_bytes: int
    asked: bool  # True when a step asked for this layer to be quantised
    loss: float | None = None  # the library's per-layer calibration loss, where it has one


class BuiltCandidate(Record):
    """What the steps made of a checkpoint (`candidate.json`), whatever serves it.

    How it is served is added by `serving_config.serve`: another number of servers must not make a
    large checkpoint be quantised again.
    """

    name: str
    checkpoint: Checkpoint
    steps: tuple[dict[str, Any], ...] = ()
    coverage: tuple[LayerCoverage, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    speculative: SpeculativeConfig | None = None
    libraries: dict[str, str] = {}


class Candidate(BuiltCandidate):
    """A checkpoint plus a serving config: the thing that is evaluated and would ship."""

    serving: ServingConfig

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of its endpoint before one runs: content, serving config, library versions."""
        checkpoint = {"digest": self.checkpoint.digest, "files": self.checkpoint.files}
        facts = {"checkpoint": checkpoint, "serving": self.serving.identity()}
        # other engines bring libraries of their own
        libraries = {"transformers": self.libraries, "vllm": {"vllm": self.serving.version}}.get(self.serving.engine)
        return facts if libraries is None else facts | {"libraries": libraries}

    @property
    def fingerprint(self) -> str:
        """Sha256 over `facts`; that of a running endpoint also covers its runtime."""
        return fingerprint(self.facts)


class ImageCandidate(BuiltCandidate):
    """A pipeline folder plus how it is run: the thing that is evaluated and would ship."""

    serving: PipelineServing

    @property
    def facts(self) -> dict[str, Any]:
        """What is known before it runs: content, serving config, library versions."""
        checkpoint = {"digest": self.checkpoint.digest, "files": self.checkpoint.files}
        return {"checkpoint": checkpoint, "serving": self.serving.identity(), "libraries": self.libraries}

    @property
    def fingerprint(self) -> str:
        """Sha256 over `facts`."""
        return fingerprint(self.facts)


class NetworkCandidate(BuiltCandidate):
    """A torch module's folder plus how it is run: the thing that is evaluated and would ship."""

    serving: NetworkServing

    @property
    def facts(self) -> dict[str, Any]:
        """What is known before it runs: content, serving config, library versions, the adapter among them."""
        checkpoint = {"digest": self.checkpoint.digest, "files": self.checkpoint.files}
        return {"checkpoint": checkpoint, "serving": self.serving.identity(), "libraries": self.libraries}

    @property
    def fingerprint(self) -> str:
        """Sha256 over `facts`."""
        return fingerprint(self.facts)


class SpeculationCounts(Record):
    """What speculation did over one or more requests, counted where the target model runs.

    `accepted_by_position[i]` counts the target forward passes that kept at least i + 1 of their drafted tokens. A
    pass yields its accepted tokens and one more of its own, unless an accepted token ended the answer.
    """

    method: str
    num_tokens: int
    num_target_forwards: int
    num_completion_tokens: int
    num_drafted: int
    accepted_by_position: tuple[int, ...]

    @model_validator(mode="after")
    def _check_sums(self) -> Self:
        if len(self.accepted_by_position) != self.num_tokens:
            raise ValueError(f"expected {self.num_tokens} positions, got {len(self.accepted_by_position)}")
        if not self.num_accepted <= self.num_drafted <= self.num_tokens * self.num_target_forwards:
            raise ValueError(f"{self.num_accepted} accepted of {self.num_drafted} drafted tokens in "
                             f"{self.num_target_forwards} target forwards don't add up")
        return self

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that the target kept."""
        return sum(self.accepted_by_position)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 when nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens per target forward pass, on average."""
        return self.num_accepted / self.num_target_forwards if self.num_target_forwards else 0.0

    @property
    def forwards_per_token(self) -> float:
        """Target forward passes per completion token; 1 is decoding without speculation."""
        return self.num_target_forwards / self.num_completion_tokens if self.num_completion_tokens else 0.0

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        positions = zip(self.accepted_by_position, other.accepted_by_position, strict=True)
        return self.model_copy(update={
            "num_target_forwards": self.num_target_forwards + other.num_target_forwards,
            "num_completion_tokens": self.num_completion_tokens + other.num_completion_tokens,
            "num_drafted": self.num_drafted + other.num_drafted,
            "accepted_by_position": tuple(a + b for a, b in positions),
        })


def sum_speculation(counts: Iterable[SpeculationCounts | None]) -> SpeculationCounts | None:
    """Add up the counts of requests that one server config answered; None when there are none."""
    found = [c for c in counts if c is not None]
    return reduce(add, found) if found else None


class CaseRecord(Record):
    """What happened to one case.

    `failure` is None when the case was judged; otherwise it names why there is no judgement
    ("infrastructure: ...", "evaluator: ..."), and `scores` is empty. A wrong answer is not a
    failure: it is a score of 0.
    """

    case_id: str
    input_digest: str  # sha256 of what the case asks and expects
    cluster: str  # cases of one cluster share a document or template and are not independent
    buckets: tuple[str, ...] = ()
    prompt: str
    output: str
    scores: dict[str, float] = {}
    failure: str | None = None
    latency_s: float = 0.0
    num_completion_tokens: int = 0
    speculation: SpeculationCounts | None = None
    fingerprint: str


# the last line of an output when a conversation had no room left
OUTGROWN = "(not asked: the conversation outgrew serving.context_length)"


def describe_failures(records: Sequence[CaseRecord]) -> str | None:
    """Say how many cases have no judgement, of which class, and why the first has none; None when all are judged."""
    failed = [(r.case_id, " ".join(r.failure.split())) for r in records if r.failure is not None]
    if not failed:
        return None
    classes = Counter(failure.partition(":")[0] for _, failure in failed)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(classes.items()))
    case_id, failure = failed[0]
    return f"{len(failed)} of {len(records)} cases have no judgement ({counts}), first {case_id!r}: {failure[:300]}"


class CanaryAnswer(Record):
    """What one path answered to a prompt of the canary."""

    text: str
    token_ids: tuple[int, ...] | None = None  # None: the endpoint does not give them

    @property
    def content(self) -> Any:
        """What is digested: the token ids where they are known."""
        return self.text if self.token_ids is None else self.token_ids

    def is_same(self, other: CanaryAnswer) -> bool:
        """Compare by token ids where both sides know them, else by text."""
        if self.token_ids is None or other.token_ids is None:
            return self.text == other.text
        return self.token_ids == other.token_ids


class CanaryRecord(Record):
    """One prompt of the canary, and what each path made of it.

    A run is named "alone" (one request at a time), "loaded" (at the deployed concurrency) or "again" (that once
    more), with "plain " before it when speculation was off. `margins` holds, for the answers of a run, how far
    each token is ahead of the second most likely one, in nat.
    """

    case_id: str
    input_digest: str
    answers: dict[str, CanaryAnswer]
    margins: dict[str, tuple[float, ...]] = {}


class CanaryFile(Record):
    """The canary's records on disk, and the digest of each run's answers: the behavioural fingerprint."""

    num_asked: int  # of params.yaml; there may be fewer cases
    num_prompts: int
    num_unstable: int  # prompts on which the path differs from itself: the floor
    records: str  # file name inside the evaluation folder
    sha256: str
    behaviour: dict[str, str]


def digest_behaviour(records: Sequence[CanaryRecord]) -> dict[str, str]:
    """Return the digest of each run's answers: the behavioural fingerprint."""
    runs = dict.fromkeys(run for record in records for run in record.answers)
    return {run: digest_json([[r.input_digest, r.answers[run].content] for r in records if run in r.answers])
            for run in runs}


def count_unstable(records: Sequence[CanaryRecord], prefix: str = "") -> int:
    """Count the prompts on which a path differs from itself: alone or again from loaded, whichever differs more."""
    pairs = [(prefix + "loaded", prefix + other) for other in ("alone", "again")]
    return max(sum(not r.answers[a].is_same(r.answers[b]) for r in records if {a, b} <= r.answers.keys())
               for a, b in pairs)


class EvalFile(Record):
    """One eval's records on disk.

    `key` is the digest of everything but the endpoint that they came from: the eval's settings, its
    evalset, and the code that asked and scored.
    """

    kind: str
    settings: dict[str, Any]  # of params.yaml, as it was evaluated
    key: str
    evalset_digest: str
    num_cases: int
    records: str  # file name inside the evaluation folder
    sha256: str
    arrays_sha256: str | None = None  # of "<eval>.npz" beside the records, for an eval that keeps arrays
    notes_sha256: str | None = None  # of "<eval>.json", for one that keeps more than cases say


class Evaluation(Record):
    """The index of one candidate's evaluation folder (`evaluation.json`)."""

    candidate: str
    fingerprint: str
    checkpoint_digest: str
    serving: ServingConfig | PipelineServing | NetworkServing  # as it was evaluated
    evals: dict[str, EvalFile]
    served_by: dict[str, Any]  # facts about the endpoint by section, see pipeline/fingerprints.py
    proof: str = ""  # who says so
    is_declared: bool = False  # the weights are the settings' word, not the endpoint's
    config: dict[str, str] = {}  # digests of the files of the engine's own configuration, under config/
    canary: CanaryFile | None = None
    speculation: SpeculationCounts | None = None  # over all chat requests of its cases
    seconds: float


R = TypeVar("R", bound=Record)


def write_record(path: Path, record: Record) -> None:
    """Write one record as indented JSON."""
    write_text(path, record.model_dump_json(indent=2) + "\n")


def read_record(path: Path, kind: type[R]) -> R:
    """Read one record back.

    Raises:
        EvidenceError: the file is missing, not JSON, or not a record of this kind.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise EvidenceError(f"{path}: expected {article} {kind.__name__}, found no file; run `dvc repro`") from None
    except ValidationError as error:
        raise EvidenceError(f"{path}: not a valid {kind.__name__}: {first_problem(error)}") from None


def write_cases(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines in canonical form, in the order given."""
    write_text(path, "".join(canonical_json(r.model_dump()) + "\n" for r in records))


def read_cases(path: Path) -> list[CaseRecord]:
    """Read case records; a malformed line is an EvidenceError with its number."""
    return list(_iterate_records(path, CaseRecord))


def read_canary(path: Path) -> list[CanaryRecord]:
    """Read the canary's records; a malformed line is an EvidenceError with its number."""
    return list(_iterate_records(path, CanaryRecord))


def _iterate_records(path: Path, kind: type[R]) -> Iterator[R]:
    try:
        lines = read_lines(path)
    except FileNotFoundError:
        raise EvidenceError(f"{path}: expected case records, found no file; run `dvc repro`") from None
    except UnicodeDecodeError as error:
        raise EvidenceError(f"{path}:{line_of(error)}: not UTF-8 ({error.reason})") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield kind.model_validate_json(line)
        except ValidationError as error:
            raise EvidenceError(f"{path}:{number}: not a case record: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """Say the first problem of a validation error in one line: where, what, what came."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"]) or "(whole)"
    more = error.error_count() - 1
    return f"{where}: {describe_problem(problem)}" + (f" (and {more} more)" if more else "")
