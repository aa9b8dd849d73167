"""The judgement on a release, what it rests on, and which of its verdicts keep the release from going out.

`compare` writes a Judgement to reports/<product>/verdict.json whatever it says; `checks.py` asks whether it still
holds, and `terminal.py` prints it. Nothing is computed here and numpy is never imported, so the gate answers at once
and on a machine without any weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from pipeline.errors import EvidenceError
from pipeline.records.digests import canonical_json, digest_file
from pipeline.records.files import write_text
from pipeline.records.medians import MedianInterval
from pipeline.records.reasons import ReasonKind
from pipeline.records.record_files import Record
from pipeline.records.verdicts import Comparison, Metric, Speed, SpeedCell, Verdict
from pipeline.settings.base import REPORTS, Product, Tier

VERDICT_FILE, REPORT_FILE = "verdict.json", "report.md"  # in a product's folder of reports
OWN_PATH = "its own path without drafts"  # the name of a canary's baseline that is not the reference
WATCHED_METRIC = "ap"  # whose tolerance judges each category of a detector that has none (`categories.py`)
MIN_CLUSTERS = 30  # to prove anything: with fewer, the spread that a bound rests on is itself a guess


class GatedTolerance(Record):
    """The tolerance of one metric, as it was set when the judgement was made."""

    overall: float | None
    buckets: dict[str, float]
    tier: Tier = "critical"
    accept_gain: str | None = None  # why a gain beyond it is believed


class LoosenedSetting(Record):
    """A setting that lets more through than it did at the last release: from what to what, and why."""

    was: float | str
    now: float | str
    why: str


class Policy(Record):
    """What was asked of the gate: the part of params.yaml that a judgement rests on."""

    product: str = ""  # "": records that no product of params.yaml made
    kind: str = "text"
    reference: str
    release: tuple[str, ...]
    alpha: float
    on_inconclusive: Literal["block", "warn"]
    tolerances: dict[str, GatedTolerance]
    tripwires: dict[str, float]
    evals: dict[str, dict[str, Any]]
    chats: tuple[str, ...] = ()  # evals whose cases are conversations: the path that answers is judged too
    min_acceptance: dict[str, float] = {}  # of drafted tokens, by candidate
    canary: dict[str, float] = {}
    exact: tuple[str, ...] = ()  # candidates of which no answer may change
    benchmarked: tuple[str, ...] = ()  # candidates
    max_slowdown: float | None = None  # relative: of their throughput, of a network's time
    grid: dict[str, Any] = {}  # of the benchmark: settings that say what is timed, and how often
    for_speed: tuple[str, ...] = ()  # candidates with a step whose only reason is speed
    timed: tuple[str, ...] = ()  # networks that may take another time than the reference
    loosened: dict[str, LoosenedSetting] = {}  # by key of params.yaml

    @model_validator(mode="before")
    @classmethod
    def _read_old(cls, data: Any) -> Any:
        """Take a policy of before products had names: its `track` was both name and kind."""
        if not isinstance(data, dict) or "track" not in data:
            return data
        name = data["track"]
        named = {"product": name, "kind": "vision" if name in ("detector", "upscaler") else name}
        chats = [name for name, settings in data["evals"].items() if settings["kind"] in ("tool_calls", "trajectories")]
        kept = {key: value for key, value in data.items() if key != "track"}
        return kept | named | {"chats": chats} | _read_old_limits(data)

    @property
    def eval_kinds(self) -> dict[str, str]:
        """The kind of each eval."""
        return {name: settings["kind"] for name, settings in self.evals.items()}


def _read_old_limits(data: dict[str, Any]) -> dict[str, Any]:
    """Say which candidates must be timed: of the track text, which did not, each that was released under a limit."""
    is_limited = data["track"] == "text" and data.get("max_slowdown") is not None
    return {"timed": data["release"]} if is_limited else {}


class Judgement(Record):
    """All verdicts of one comparison and the policy they rest on (`reports/<product>/verdict.json`).

    A comparison's `low` and `high` are one-sided bounds at 1 - alpha; a metric's are a two-sided
    interval at `interval_confidence`.
    """

    schema_version: Literal[1] = 1
    outcome: Literal["pass", "blocked"]
    blocked_by: tuple[str, ...]
    policy: Policy
    cases: dict[str, str] = {}  # digest of those that the reference answered, by eval
    interval_confidence: float = 0.95
    reference_fingerprint: str
    reference_metrics: tuple[Metric, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def path(self) -> Path:
        """Where it lies."""
        return REPORTS / self.policy.product / VERDICT_FILE


def build_policy(product: Product) -> Policy:
    """Return what params.yaml asks of a product's gate."""
    gate = product.gate
    return Policy(
        product=product.name,
        kind=product.kind,
        reference=product.reference,
        release=tuple(product.release),
        alpha=gate.alpha,
        on_inconclusive=gate.on_inconclusive,
        tripwires=gate.tripwires,
        tolerances={name: GatedTolerance(**t.model_dump()) for name, t in gate.tolerances.items()},
        evals={name: settings.model_dump(mode="json") for name, settings in product.evals.items()},
        chats=tuple(name for name, settings in product.evals.items() if settings.chats),
        loosened={key: LoosenedSetting(**reason.model_dump()) for key, reason in gate.loosened.items()},
        **product.list_rules(),
    )


def released_verdicts(judgement: Judgement) -> list[Verdict]:
    """Return the verdicts that decide.

    Raises:
        EvidenceError: a released candidate has no verdict.
    """
    by_name = {verdict.candidate: verdict for verdict in judgement.verdicts}
    for name in judgement.policy.release:
        if name not in by_name:
            raise EvidenceError(
                f"{judgement.path}: release names {name!r}, but there is no verdict on it; "
                f"run `dvc repro compare@{judgement.policy.product}`"
            )
    return [by_name[name] for name in judgement.policy.release]


def list_refusals(verdict: Verdict) -> list[str]:
    """Return why evidence was refused, one line each."""
    return [reason.text for reason in verdict.reasons if reason.kind == ReasonKind.REFUSED]


def has_reason(verdict: Verdict, *kinds: ReasonKind) -> bool:
    """Say whether a verdict has a reason of one of these kinds."""
    return any(reason.kind in kinds for reason in verdict.reasons)


def is_proven(high: float, tolerance: float, effective_clusters: float) -> bool:
    """Say whether an upper bound of the harm proves a tolerance."""
    return high <= tolerance and effective_clusters >= MIN_CLUSTERS


def is_blocking(verdict: Verdict, policy: Policy) -> bool:
    """Say whether a verdict keeps the release from going out.

    `on_inconclusive: warn`, and a metric's tier `supporting`, let through what is within its tolerance as seen and not
    proven to be; a loss seen beyond the tolerance blocks, proven or not, and so does a step for speed alone that gains
    nothing.
    """
    if verdict.outcome != "inconclusive" or has_reason(verdict, ReasonKind.REFUSED, ReasonKind.FAILED):
        return verdict.outcome != "pass"
    is_strict = policy.on_inconclusive == "block"
    return (
        gains_nothing(verdict, policy)
        or (is_strict and has_reason(verdict, ReasonKind.UNPROVEN))
        or any(is_stopping(c, policy) for c in verdict.comparisons)
    )


def is_decisive(c: Comparison) -> bool:
    """Say whether a comparison's outcome is part of its candidate's: no advisory one, and of what is watched a fail."""
    return c.tier != "advisory" and (c.tier != "watched" or c.outcome == "fail")


def is_open_watched(c: Comparison) -> bool:
    """Say whether a comparison is watched and not proven, as most are: no news beside what decides."""
    return c.tier == "watched" and c.outcome == "inconclusive"


def is_stopping(c: Comparison, policy: Policy) -> bool:
    """Say whether one comparison by itself keeps a released candidate from going out."""
    if not is_decisive(c) or c.outcome in ("pass", "reported"):
        return False
    is_strict = policy.on_inconclusive == "block" and c.tier == "critical"
    return c.outcome != "inconclusive" or is_strict or c.harm > (c.tolerance or 0.0)


def blocking_verdicts(judgement: Judgement) -> list[Verdict]:
    """Return the released verdicts that keep the release from going out."""
    return [verdict for verdict in released_verdicts(judgement) if is_blocking(verdict, judgement.policy)]


def order_for_readers(judgement: Judgement) -> list[Verdict]:
    """Return all verdicts: those that block first, then what else is released, each in the order of params.yaml."""
    policy = judgement.policy
    return sorted(judgement.verdicts, key=lambda v: (not (v.is_release and is_blocking(v, policy)), not v.is_release))


def gains_nothing(verdict: Verdict, policy: Policy) -> bool:
    """Say whether a step for speed alone has no sure gain, or nobody knows."""
    if verdict.gain is None:
        return verdict.candidate in policy.for_speed
    return not verdict.gain.is_sure or has_reason(verdict, ReasonKind.NO_GAIN)


def list_slow_cells(speed: Speed, max_slowdown: float | None) -> list[SpeedCell]:
    """Return the cells whose throughput is surely below what is tolerated: their whole interval is."""
    if max_slowdown is None:
        return []
    return [cell for cell in speed.cells if cell.throughput_tokens_per_s.ratio.high < 1 - max_slowdown]


def takes_too_long(total: MedianInterval | None, max_slowdown: float | None) -> bool:
    """Say whether a network surely takes longer than `gate.max_slowdown` allows."""
    return total is not None and max_slowdown is not None and total.low > 1 + max_slowdown


def list_gated_evals(tolerances: Iterable[str]) -> list[str]:
    """Return the evals of metrics that have a tolerance, in their order."""
    return list(dict.fromkeys(metric.partition("/")[0] for metric in tolerances))


def list_gated(policy: Policy) -> list[tuple[str, str | None]]:
    """Return metric and bucket of every comparison that has a tolerance."""
    return [
        (metric, bucket)
        for metric, tolerance in policy.tolerances.items()
        for bucket in ([None] if tolerance.overall is not None else []) + list(tolerance.buckets)
    ]


def write_marker(path: Path, judgement: Judgement, *, verdict_path: Path) -> None:
    """Write the proof of a pass: the digest of the judgement, and of each candidate its outcome and fingerprint."""
    release = {
        verdict.candidate: {
            "outcome": verdict.outcome,
            "fingerprint": verdict.fingerprint,
            "behaviour": verdict.behaviour,
        }
        for verdict in released_verdicts(judgement)
    }
    write_text(path, canonical_json({"verdict_sha256": digest_file(verdict_path), "release": release}) + "\n")
