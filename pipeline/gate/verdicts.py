"""The judgement on a release, and what it means for the exit code.

`compare` writes a Judgement to reports/verdict.json whatever it says; the stage `gate` reads it
back, prints what blocks, and writes the marker `build/gate.ok` only on a pass. Nothing is computed
here and numpy is never imported, so the gate answers at once and on a machine without any weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

from pipeline.digests import canonical_json, digest_file, digest_files, digest_json, name_changed_file
from pipeline.errors import EvidenceError
from pipeline.files import write_text
from pipeline.fingerprints import find_difference, fingerprint
from pipeline.gate.speed import list_slow_cells
from pipeline.gate.wording import (
    format_harm,
    format_p,
    format_range,
    format_tolerance,
    format_value,
    name_comparison,
    name_metric,
    show_unprintable,
)
from pipeline.network_params import NetworkTrack
from pipeline.params import Params
from pipeline.record_files import Record
from pipeline.serving_config import read_track_candidate
from pipeline.settings import BUILDS, REPORTS, Tier, Track, name_stage
from pipeline.verdict_records import Comparison, Metric, Verdict

VERDICT_PATH, REPORT_PATH = REPORTS["text"] / "verdict.json", REPORTS["text"] / "report.md"
MIN_CLUSTERS = 30  # to prove anything: with fewer, the spread that a bound rests on is itself a guess
REFUSED = "refused: "  # starts each of a verdict's reasons that names unfit evidence
DRAFTS_FAILED = "fail: speculation: "  # starts the reason of a candidate whose drafts are accepted too seldom
PATH_FAILED = "fail: path: "  # starts the reason of a candidate whose path changes answers
SPEED_FAILED = "fail: speed: "  # starts the reason of a candidate that is slower than tolerated
UNPROVEN = "inconclusive: canary: "  # starts the reason of a path that was judged by too few prompts
NO_GAIN = "no gain: "  # starts the reason of a candidate that is there for speed and has none
UNSOUND = "note: images: "  # starts the reason that says why images are not sound
HEADLINES = ("perplexity flat", "aggregate flat")  # start the reason that says what an average hides
FAILED = (DRAFTS_FAILED, PATH_FAILED, SPEED_FAILED)  # start the reasons that no comparison stands for
DECLARED = "note: its fingerprint is declared"  # starts the reason that an attached endpoint gives


class GatedTolerance(Record):
    """The tolerance of one metric, as it was set when the judgement was made."""

    overall: float | None
    buckets: dict[str, float]
    tier: Tier = "critical"


class LoosenedSetting(Record):
    """A setting that lets more through than it did at the last release, and why."""

    was: float | str
    why: str


class Policy(Record):
    """What was asked of the gate: the part of params.yaml that a judgement rests on."""

    track: Literal["text", "images", "detector", "upscaler"] = "text"
    reference: str
    release: tuple[str, ...]
    alpha: float
    on_inconclusive: Literal["block", "warn"]
    tolerances: dict[str, GatedTolerance]
    tripwires: dict[str, float]
    evals: dict[str, dict[str, Any]]
    min_acceptance: dict[str, float] = {}  # of drafted tokens, by candidate
    canary: dict[str, float] = {}
    exact: tuple[str, ...] = ()  # candidates of which no answer may change
    benchmarked: tuple[str, ...] = ()  # candidates
    max_slowdown: float | None = None  # of their throughput, relative
    for_speed: tuple[str, ...] = ()  # candidates with a step whose only reason is speed
    loosened: dict[str, LoosenedSetting] = {}  # by key of params.yaml

    @property
    def eval_kinds(self) -> dict[str, str]:
        """The kind of each eval."""
        return {name: settings["kind"] for name, settings in self.evals.items()}


class Judgement(Record):
    """All verdicts of one comparison and the policy they rest on (`reports/verdict.json`).

    A comparison's `low` and `high` are one-sided bounds at 1 - alpha; a metric's are a two-sided
    interval at `interval_confidence`.
    """

    schema_version: Literal[1] = 1
    outcome: Literal["pass", "blocked"]
    blocked_by: tuple[str, ...]
    policy: Policy
    interval_confidence: float = 0.95
    reference_fingerprint: str
    reference_metrics: tuple[Metric, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def path(self) -> Path:
        """Where it lies."""
        return REPORTS[self.policy.track] / "verdict.json"


def describe_policy(track: Track) -> Policy:
    """Return what params.yaml asks of a track's gate."""
    gate = track.gate
    shared = Policy(
        track=cast(Any, track.name), reference=track.reference, release=tuple(track.release), alpha=gate.alpha,
        on_inconclusive=gate.on_inconclusive, tripwires=gate.tripwires,
        tolerances={name: GatedTolerance(**t.model_dump()) for name, t in gate.tolerances.items()},
        evals={name: settings.model_dump(mode="json") for name, settings in track.evals.items()},
        loosened={key: LoosenedSetting(**reason.model_dump()) for key, reason in gate.loosened.items()},
    )
    if isinstance(track, NetworkTrack):
        names = tuple(name for name, candidate in track.candidates.items() if candidate.is_for_speed)
        return shared.model_copy(update={"for_speed": names})
    return shared.model_copy(update=_describe_text(track)) if isinstance(track, Params) else shared


def _describe_text(params: Params) -> dict[str, Any]:
    return {
        "min_acceptance": {name: c.speculative.min_acceptance for name, c in params.candidates.items()
                           if c.speculative and c.speculative.min_acceptance is not None},
        "canary": params.canary.model_dump(),
        "exact": tuple(name for name, c in params.candidates.items() if c.exact),
        "benchmarked": tuple(params.benchmark.candidates),
        "max_slowdown": params.benchmark.max_slowdown,
    }


def check_policy(judgement: Judgement, params: Track) -> None:
    """Check that the judgement rests on the present params.yaml.

    Raises:
        EvidenceError: with the first setting that differs.
    """
    judged, asked = judgement.policy.model_dump(mode="json"), describe_policy(params).model_dump(mode="json")
    if difference := _find_difference(judged, asked):
        raise EvidenceError(f"{judgement.path}: judged with {difference}; run `dvc repro` to judge again")


def _find_difference(judged: dict[str, Any], asked: dict[str, Any], parents: str = "") -> str | None:
    """Say which key is the first with unequal values, as a dotted path, and both values."""
    for key in judged | asked:
        was, says = (repr(side[key]) if key in side else "nothing" for side in (judged, asked))
        if isinstance(judged.get(key), dict) and isinstance(asked.get(key), dict):
            if deeper := _find_difference(judged[key], asked[key], f"{parents}{key}."):
                return deeper
        elif was != says:
            return f"{parents}{key} {was}, params.yaml says {says}"
    return None


def released_verdicts(judgement: Judgement) -> list[Verdict]:
    """Return the verdicts that decide.

    Raises:
        EvidenceError: a released candidate has no verdict.
    """
    by_name = {verdict.candidate: verdict for verdict in judgement.verdicts}
    for name in judgement.policy.release:
        if name not in by_name:
            raise EvidenceError(f"{judgement.path}: release names {name!r}, but there is no verdict on it; "
                                "run `dvc repro compare`")
    return [by_name[name] for name in judgement.policy.release]


def list_refusals(verdict: Verdict) -> list[str]:
    """Return why evidence was refused, one line each."""
    return [reason.removeprefix(REFUSED) for reason in verdict.reasons if reason.startswith(REFUSED)]


def is_proven(high: float, tolerance: float, effective_clusters: float) -> bool:
    """Say whether an upper bound of the harm proves a tolerance."""
    return high <= tolerance and effective_clusters >= MIN_CLUSTERS


def is_blocking(verdict: Verdict, policy: Policy) -> bool:
    """Say whether a verdict keeps the release from going out.

    `on_inconclusive: warn`, and a metric's tier `supporting`, let through what is within its tolerance as seen and not
    proven to be; a loss seen beyond the tolerance blocks, proven or not, and so does a step for speed alone that gains
    nothing.
    """
    is_unfit = bool(list_refusals(verdict)) or any(reason.startswith(FAILED) for reason in verdict.reasons)
    if verdict.outcome != "inconclusive" or is_unfit:
        return verdict.outcome != "pass"
    is_strict = policy.on_inconclusive == "block"
    return (_gains_nothing(verdict, policy)
            or (is_strict and any(reason.startswith(UNPROVEN) for reason in verdict.reasons))
            or any(is_stopping(c, policy) for c in verdict.comparisons))


def is_stopping(c: Comparison, policy: Policy) -> bool:
    """Say whether one comparison by itself keeps a released candidate from going out."""
    if c.tier == "advisory" or c.outcome in ("pass", "reported"):
        return False
    is_strict = policy.on_inconclusive == "block" and c.tier == "critical"
    return c.outcome != "inconclusive" or is_strict or c.harm > (c.tolerance or 0.0)


def blocking_verdicts(judgement: Judgement) -> list[Verdict]:
    """Return the released verdicts that keep the release from going out."""
    return [verdict for verdict in released_verdicts(judgement) if is_blocking(verdict, judgement.policy)]


def check_outcomes(judgement: Judgement) -> None:
    """Check that each released outcome is the one that follows from what stands beside it.

    Raises:
        EvidenceError: an outcome that its own numbers, reasons or the policy contradict: the file was edited.
    """
    policy = judgement.policy
    for verdict in released_verdicts(judgement):
        gated = {(c.metric, c.bucket): c for c in verdict.comparisons if c.tolerance is not None}
        wrong = [name_comparison(c) for c in gated.values() if _contradicts(c, policy)]
        if not list_refusals(verdict):
            wrong += [name_metric(*key) for key in list_gated(policy) if key not in gated]
        if verdict.outcome != _expect_outcome(verdict, policy):
            wrong.append("the verdict")
        if wrong:
            raise EvidenceError(f"{judgement.path}: {verdict.candidate}: {wrong[0]} contradicts the numbers or the "
                                f"policy beside it; {_tell_edited(judgement)}")


def _expect_outcome(verdict: Verdict, policy: Policy) -> str:
    """Return the outcome that follows from a verdict's comparisons, reasons and other evidence."""
    outcomes = {c.outcome for c in verdict.comparisons if c.tolerance is not None and c.tier != "advisory"}
    has_failed = any(reason.startswith(FAILED) for reason in verdict.reasons)
    if has_failed or "fail" in outcomes:
        return "fail"
    if list_refusals(verdict) or not outcomes:
        return "refused"
    # numbers of which no reason speaks
    if _changes_answers(verdict, policy) or _drafts_too_few(verdict, policy) or _is_too_slow(verdict, policy):
        return "fail"
    if "inconclusive" in outcomes or (verdict.canary is not None and verdict.canary.is_blind):
        return "inconclusive"
    return "no gain" if _gains_nothing(verdict, policy) else "pass"


def _changes_answers(verdict: Verdict, policy: Policy) -> bool:
    """Say whether the path changes more answers than explained, or any where it must be exact, or nobody knows."""
    canary = verdict.canary
    if canary is None:  # it must be there where evals chat
        return bool({"tool_calls", "trajectories"} & set(policy.eval_kinds.values()))
    is_exact = verdict.candidate in policy.exact
    return canary.is_beyond_floor or (is_exact and canary.is_changed)


def _drafts_too_few(verdict: Verdict, policy: Policy) -> bool:
    """Say whether fewer drafts were accepted than must be, or nobody knows."""
    least = policy.min_acceptance.get(verdict.candidate)
    return least is not None and (verdict.speculation is None or verdict.speculation.acceptance_rate < least)


def _is_too_slow(verdict: Verdict, policy: Policy) -> bool:
    """Say whether speeds are missing that were asked for, or are below what is tolerated."""
    if verdict.speed is None:
        return verdict.candidate in policy.benchmarked
    return bool(list_slow_cells(verdict.speed, policy.max_slowdown))


def _gains_nothing(verdict: Verdict, policy: Policy) -> bool:
    """Say whether a step for speed alone has no sure gain, or nobody knows."""
    if verdict.gain is None:
        return verdict.candidate in policy.for_speed
    return not verdict.gain.is_sure or any(reason.startswith(NO_GAIN) for reason in verdict.reasons)


def list_gated(policy: Policy) -> list[tuple[str, str | None]]:
    """Return metric and bucket of every comparison that has a tolerance."""
    return [(metric, bucket) for metric, tolerance in policy.tolerances.items()
            for bucket in ([None] if tolerance.overall is not None else []) + list(tolerance.buckets)]


def _contradicts(c: Comparison, policy: Policy) -> bool:
    """Say whether a gated comparison does not follow from its own numbers and the policy."""
    allowed = policy.tolerances.get(c.metric)
    tolerance = c.tolerance or 0.0
    if allowed is None or c.tolerance != (allowed.buckets.get(c.bucket) if c.bucket else allowed.overall):
        return True
    if c.tier != allowed.tier:
        return True
    if not c.low <= c.harm <= c.high or (c.b is not None and abs(c.harm - (c.b - (c.c or 0)) / c.n) > 1e-9):
        return True
    if is_proven(c.high, tolerance, c.effective_clusters):
        # proven and yet no pass: only a gain larger than the tolerance
        return c.outcome != "pass" and not (c.outcome == "inconclusive" and c.harm < -tolerance)
    is_fail = c.harm > tolerance and c.p_holm is not None and c.p_holm <= policy.alpha
    return c.outcome != ("fail" if is_fail else "inconclusive")


def check_candidates(judgement: Judgement, params: Track, root: Path) -> bool:
    """Check that what was judged is what would ship, where the candidates are present.

    The weights are read and hashed again: a record that says the right thing about another file proves nothing. An
    attached endpoint has its own fingerprint, which no file here can tell.

    Returns:
        False in a clone without the candidates: there is nothing to compare with.

    Raises:
        EvidenceError: a candidate was rebuilt, its serving or its weights changed, or it is gone since it was judged.
    """
    build = root / BUILDS[judgement.policy.track]
    if not (build / "candidates").is_dir():
        return False
    for verdict in released_verdicts(judgement):
        path = build / "candidates" / verdict.candidate / "candidate.json"
        if verdict.outcome == "refused":
            continue
        if not path.is_file():
            raise EvidenceError(f"{path}: expected the candidate that was judged ({verdict.fingerprint[:12]}), found "
                                "none: making it again has failed; run `dvc repro`")
        candidate = read_track_candidate(build, verdict.candidate, params)
        if fingerprint(verdict.facts) != verdict.fingerprint:
            raise EvidenceError(f"{judgement.path}: {verdict.candidate}: expected the fingerprint of the facts beside "
                                f"it, found another; {_tell_edited(judgement)}")
        if missing := candidate.facts.keys() - verdict.facts.keys():
            raise EvidenceError(f"{judgement.path}: {verdict.candidate}: expected facts about {min(missing)}, found "
                                f"none; {_tell_edited(judgement)}")
        if difference := find_difference(verdict.facts, candidate.facts):
            raise EvidenceError(f"{path}: {difference.field}: judged with {difference.expected!r}, what would ship has "
                                f"{difference.found!r}; run `dvc repro` so that it is evaluated again")
        if candidate.serving.engine == "openai":
            continue
        own = path.with_name("checkpoint").relative_to(root).as_posix()
        expected = own if (root / own).is_dir() else params.candidates[candidate.name].checkpoint
        if Path(candidate.checkpoint.path) != Path(expected):
            raise EvidenceError(f"{path}: expected the checkpoint {expected!r}, got {candidate.checkpoint.path!r}; run "
                                "`dvc repro` so that it is built again")
        _check_files(root / candidate.checkpoint.path, candidate.checkpoint.digest, candidate.checkpoint.files)
        if isinstance(params, NetworkTrack):
            _check_adapter(root / params.adapter, candidate.libraries.get("adapter", "none"))
        speculative = candidate.serving.speculative
        if speculative and speculative.draft_path and speculative.draft_digest:
            _check_files(root / speculative.draft_path, speculative.draft_digest, {})
    return True


def _check_files(folder: Path, digest: str, files: dict[str, str]) -> None:
    found = digest_files(folder)
    if digest_json(found) != digest:
        raise EvidenceError(f"{folder}: expected the checkpoint that was judged ({digest[:12]}), found other files "
                            f"({digest_json(found)[:12]}: {name_changed_file(files, found)}); run `dvc repro` so that "
                            "it is built and evaluated again")


def _check_adapter(path: Path, digest: str) -> None:
    found = digest_file(path) if path.is_file() else "no file"
    if found != digest:
        raise EvidenceError(f"{path}: expected the adapter that was judged ({digest[:12]}), found another "
                            f"({found[:12]}); run `dvc repro` so that it is built and evaluated again")


def write_marker(path: Path, judgement: Judgement, *, verdict_path: Path) -> None:
    """Write the proof of a pass: the digest of the judgement, and of each candidate its outcome and fingerprint."""
    release = {verdict.candidate: {"outcome": verdict.outcome, "fingerprint": verdict.fingerprint,
                                   "behaviour": verdict.behaviour}
               for verdict in released_verdicts(judgement)}
    write_text(path, canonical_json({"verdict_sha256": digest_file(verdict_path), "release": release}) + "\n")


def render_gate(judgement: Judgement, *, are_here: bool = True) -> str:
    """Write what a person at the terminal needs: the verdicts, and where to look when one blocks.

    Args:
        are_here: the candidates are, and were checked.
    """
    lines = [render_verdicts(judgement)]
    if blocking_verdicts(judgement):
        report = judgement.path.with_name("report.md")
        lines += ["", "look closer:", f"  {report}      every comparison, the plots and the worst flips",
                  "  dvc metrics diff        numbers against the last commit",
                  "  make ui                 MLflow: predictions side by side"]
    if not are_here:
        candidates = BUILDS[judgement.policy.track] / "candidates"
        lines += ["", f"{candidates} is not here: that these weights would ship was not checked"]
    return "\n".join(lines)


def render_verdicts(judgement: Judgement) -> str:
    """Write the released verdicts: a table, and for each that is no pass why."""
    verdicts = released_verdicts(judgement)
    width = max(len("release"), *(len(v.candidate) for v in verdicts))
    lines = [f"{'release':<{width}}  {'verdict':<12}  gated  fail  inconclusive  refused"]
    lines += [_row(verdict, width) for verdict in verdicts]
    for verdict in verdicts:
        if verdict.outcome != "pass":
            lines += _why(verdict, judgement.policy)
    lines += _describe_limits(judgement, verdicts)
    return "\n".join(map(show_unprintable, lines))


def _describe_limits(judgement: Judgement, verdicts: list[Verdict]) -> list[str]:
    """Say what the verdicts do not cover: evals without a tolerance, endpoints that nobody could look into."""
    gated = {metric.partition("/")[0] for metric in judgement.policy.tolerances}
    ungated = [name for name in judgement.policy.eval_kinds if name not in gated]
    lines = [f"not gated, as no tolerance is set: {', '.join(ungated)}"] if ungated else []
    lines += [f"{verdict.candidate}: {note}" for verdict in verdicts for note in verdict.reasons
              if note.startswith(DECLARED)]
    return ["", *lines] if lines else []


def _row(verdict: Verdict, width: int) -> str:
    outcomes = [c.outcome for c in verdict.comparisons if c.outcome != "reported"]
    num_refused = len(list_refusals(verdict))
    return (f"{verdict.candidate:<{width}}  {verdict.outcome.upper():<12}  {len(outcomes):>5}  "
            f"{outcomes.count('fail'):>4}  {outcomes.count('inconclusive'):>12}  {num_refused:>7}")


def _why(verdict: Verdict, policy: Policy) -> list[str]:
    reason = "gate.on_inconclusive is warn" if policy.on_inconclusive == "warn" else "what is open is not critical"
    effect = "blocks the release" if is_blocking(verdict, policy) else f"does not block: {reason}"
    lines = ["", f"{verdict.candidate}: {verdict.outcome}, {effect}"]
    lines += [f"  {reason}" for reason in verdict.reasons if reason.startswith(HEADLINES)]
    for label, starts in (("refused", REFUSED), ("fail", FAILED), ("inconclusive", UNPROVEN), ("no gain", NO_GAIN),
                          ("images", UNSOUND)):
        lines += [f"  {label:<12} {reason.removeprefix('note: ').removeprefix(f'{label}: ')}"
                  for reason in verdict.reasons if reason.startswith(starts)]
    shown = [c for outcome in ("fail", "inconclusive") for c in verdict.comparisons if c.outcome == outcome]
    for comparison in shown:
        lines += describe(comparison)
    return lines


def describe(comparison: Comparison) -> list[str]:
    """Write one comparison in three lines: name, numbers, sentence."""
    c = comparison
    flips = f"b {c.b}, c {c.c} of n {c.n}" if c.b is not None else f"n {c.n}"
    tolerance = format_tolerance(c.metric, c.tolerance) if c.tolerance is not None else "none"
    return [
        f"  {c.outcome:<12} {name_comparison(c)}",
        f"      {format_value(c.metric, c.reference)} -> {format_value(c.metric, c.candidate)}; {flips}; "
        f"harm {format_harm(c.metric, c.harm)} ({format_range(c.metric, c.low, c.high)}), tolerance {tolerance}, "
        f"p {format_p(c.p_holm)}",
        f"      {c.sentence}",
    ]


def _tell_edited(judgement: Judgement) -> str:
    return f"the file was edited: run `dvc repro -f -s {name_stage('compare', judgement.policy.track)}`"
