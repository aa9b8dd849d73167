"""What passes between stages: a candidate, what happened to each case, and the index of an evaluation.

`optimize` writes a BuiltCandidate, `evaluate` adds how it is served and writes CaseRecords and an Evaluation that lists
them, `compare` writes Verdicts (`pipeline/gate/verdicts.py`). How a candidate is served is in `serving.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline.records.canary import CanaryFile
from pipeline.records.fingerprints import fingerprint
from pipeline.records.record_files import Record, iterate_records
from pipeline.records.serving import AnyServing, LocalServing, NetworkServing, PipelineServing, ServingConfig
from pipeline.records.speculation import SpeculationCounts, SpeculativeConfig


class Checkpoint(Record):
    """A weights folder and what it holds.

    `path` is relative to the project root, or names a model of a hub (`hf://...`). `digest` covers the folder's
    content; `parent_digest` is the digest of the checkpoint it was made from, or None.
    """

    path: str
    kind: str  # the config's model_type, for example "llama"
    format: str  # "dense", or the quantisation format: "compressed-tensors", "gptq", "awq"
    dtype: str
    num_parameters: int
    num_bytes: int
    rounded: tuple[str, ...] = ()  # formats that inputs and cache are rounded to while it runs
    digest: str
    files: dict[str, str] = {}  # digest of each file: says which one it is when `digest` differs
    parent_digest: str | None = None


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


class LocalCandidate(BuiltCandidate):
    """A folder plus how it is run, in processes of the stage itself: no engine stands between."""

    serving: PipelineServing | NetworkServing | LocalServing

    @property
    def facts(self) -> dict[str, Any]:
        """What is known before it runs: content, serving config, library versions, an adapter among them."""
        checkpoint = {"digest": self.checkpoint.digest, "files": self.checkpoint.files}
        return {"checkpoint": checkpoint, "serving": self.serving.identity(), "libraries": self.libraries}

    @property
    def fingerprint(self) -> str:
        """Sha256 over `facts`."""
        return fingerprint(self.facts)


class ImageCandidate(LocalCandidate):
    """A pipeline folder plus how it is run: the thing that is evaluated and would ship."""

    serving: PipelineServing


class NetworkCandidate(LocalCandidate):
    """The folder of a torch module or an .onnx file plus how it is run: what is evaluated and would ship."""

    serving: NetworkServing


def _is_empty(value: str | int) -> bool:
    return not value


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
    # left out of the record where it is empty: what was generated, where `output` is what a task's filter made of it
    answer: str = Field(default="", exclude_if=_is_empty)
    # as above: the setting that ended an answer before the model or a stop string did
    cut_by: str = Field(default="", exclude_if=_is_empty)
    # as above: of how many choices the answer is one, where they are given
    num_choices: int = Field(default=0, ge=0, exclude_if=_is_empty)
    scores: dict[str, float] = {}
    failure: str | None = None
    latency_s: float = 0.0
    num_completion_tokens: int = 0
    speculation: SpeculationCounts | None = None
    fingerprint: str


def read_cases(path: Path) -> list[CaseRecord]:
    """Read case records; a malformed line is an EvidenceError with its number."""
    return list(iterate_records(path, CaseRecord))


def count_choices(sample: Mapping[str, Any], num_scored: int) -> int:
    """Return how many choices a question gives; 0: its answer is free.

    Args:
        sample: of lm-eval.
        num_scored: how many continuations are scored for it.
    """
    num = num_scored // (2 if "acc_mutual_info" in sample else 1)  # that scores each without its question, too
    return num if num > 1 else 0


# the last line of an output when a conversation had no room left
OUTGROWN = "(not asked: the conversation outgrew serving.context_length)"


def format_failures(records: Sequence[CaseRecord]) -> str | None:
    """Say how many cases have no judgement, of which class, and why the first has none; None when all are judged."""
    failed = [(r.case_id, " ".join(r.failure.split())) for r in records if r.failure is not None]
    if not failed:
        return None
    classes = Counter(failure.partition(":")[0] for _, failure in failed)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(classes.items()))
    case_id, failure = failed[0]
    return f"{len(failed)} of {len(records)} cases have no judgement ({counts}), first {case_id!r}: {failure[:300]}"


def format_cut(records: Sequence[CaseRecord]) -> str | None:
    """Say how many answers a limit ended, of how many, and which limit; None when all ended by themselves."""
    limits = Counter(record.cut_by for record in records if record.cut_by)
    if not limits:
        return None
    return f"{limits.total()} of {len(records)} answers cut by {' and '.join(sorted(limits))}"


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


class ShardCounts(Record):
    """How an evaluation came together: in how many shards, and how many attempts at them did not end."""

    num_shards: int
    num_attempts: int
    num_unfinished: int
    num_hosts: int


class Evaluation(Record):
    """The index of one candidate's evaluation folder (`evaluation.json`)."""

    candidate: str
    fingerprint: str
    checkpoint_digest: str
    serving: AnyServing  # as it was evaluated
    evals: dict[str, EvalFile]
    served_by: dict[str, Any]  # facts about the endpoint by section, see pipeline/records/fingerprints.py
    proof: str = ""  # who says so
    is_declared: bool = False  # the weights are the settings' word, not the endpoint's
    config: dict[str, str] = {}  # digests of the files of the engine's own configuration, under config/
    canary: CanaryFile | None = None
    speculation: SpeculationCounts | None = None  # over all chat requests of its cases
    shards: ShardCounts | None = None  # None: one process evaluated it
    seconds: float
