"""Does a judgement still hold: of these settings, of these weights, and of the numbers that stand in it?

The stage `gate` asks before it lets a release out, and `verify` of a bundle. Not covered: whether the numbers are those
of the records, which `verify` computes anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, EvidenceError
from pipeline.gate.audits import Auditor, P
from pipeline.gate.validity import is_without_output
from pipeline.gate.verdicts import (
    GatedTolerance,
    Judgement,
    Policy,
    build_policy,
    gains_nothing,
    has_reason,
    is_decisive,
    is_proven,
    list_gated,
    list_refusals,
    list_slow_cells,
    released_verdicts,
    takes_too_long,
)
from pipeline.gate.wording import (
    name_comparison,
    name_metric,
)
from pipeline.records.digests import digest_files, digest_json, name_changed_file
from pipeline.records.evaluations import BuiltCandidate
from pipeline.records.fingerprints import find_difference, fingerprint
from pipeline.records.reasons import ReasonKind
from pipeline.records.verdicts import Comparison, Verdict
from pipeline.running.hub import locate_checkpoint
from pipeline.settings.base import Product


def check_policy(judgement: Judgement, product: Product) -> None:
    """Check that the judgement rests on the present params.yaml.

    Raises:
        EvidenceError: with the first setting that differs.
    """
    if difference := find_other_policy(judgement, product):
        raise EvidenceError(f"{judgement.path}: judged with {difference}; run `dvc repro` to judge again")


def find_other_policy(judgement: Judgement, product: Product) -> str | None:
    """Say which setting is the first that the judgement does not rest on, with both values; None: it rests on all."""
    return _find_difference(judgement.policy.model_dump(mode="json"), build_policy(product).model_dump(mode="json"))


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
            raise EvidenceError(
                f"{judgement.path}: {verdict.candidate}: {wrong[0]} contradicts the numbers or the "
                f"policy beside it; {_explain_remedy(judgement)}"
            )


def _expect_outcome(verdict: Verdict, policy: Policy) -> str:
    """Return the outcome that follows from a verdict's comparisons, reasons and other evidence."""
    outcomes = {c.outcome for c in verdict.comparisons if c.tolerance is not None and is_decisive(c)}
    if has_reason(verdict, ReasonKind.FAILED) or "fail" in outcomes:
        return "fail"
    if list_refusals(verdict) or not outcomes:
        return "refused"
    # numbers of which no reason speaks
    if _changes_answers(verdict, policy) or _drafts_too_few(verdict, policy) or _is_too_slow(verdict, policy):
        return "fail"
    is_blind = verdict.canary is not None and verdict.canary.is_blind
    if "inconclusive" in outcomes or has_reason(verdict, ReasonKind.UNPROVEN) or is_blind:
        return "inconclusive"
    return "no gain" if gains_nothing(verdict, policy) else "pass"


def _changes_answers(verdict: Verdict, policy: Policy) -> bool:
    """Say whether the path changes more answers than explained, or any where it must be exact, or nobody knows."""
    canary = verdict.canary
    if canary is None:  # it must be there where evals chat
        return bool(policy.chats)
    is_exact = verdict.candidate in policy.exact
    return canary.is_beyond_floor or (is_exact and canary.is_changed)


def _drafts_too_few(verdict: Verdict, policy: Policy) -> bool:
    """Say whether fewer drafts were accepted than must be, or nobody knows."""
    least = policy.min_acceptance.get(verdict.candidate)
    return least is not None and (verdict.speculation is None or verdict.speculation.acceptance_rate < least)


def _is_too_slow(verdict: Verdict, policy: Policy) -> bool:
    """Say whether speeds are missing that were asked for, or are below what is tolerated, or a network's time above."""
    if verdict.speed is None:
        is_untimed = verdict.candidate in policy.benchmarked or _lacks_time(verdict, policy)
        return is_untimed or takes_too_long(verdict.total, policy.max_slowdown)
    return bool(list_slow_cells(verdict.speed, policy.max_slowdown))


def _lacks_time(verdict: Verdict, policy: Policy) -> bool:
    """Say whether a network has no time in total that a limit asks for; where nothing is in force, it gains nothing."""
    is_asked = policy.max_slowdown is not None and verdict.candidate in policy.timed
    return is_asked and verdict.total is None and not gains_nothing(verdict, policy)


def _contradicts(c: Comparison, policy: Policy) -> bool:
    """Say whether a gated comparison does not follow from its own numbers and the policy."""
    allowed = policy.tolerances.get(c.metric)
    tolerance = c.tolerance or 0.0
    if allowed is None or (c.tolerance, c.tier) != _find_limit(c.bucket, allowed):
        return True
    if not c.low <= c.harm <= c.high or (c.b is not None and abs(c.harm - (c.b - (c.c or 0)) / c.n) > 1e-9):
        return True
    if is_proven(c.high, tolerance, c.effective_clusters):
        # proven and yet no pass: only a gain larger than the tolerance that nobody accepts
        is_open = c.outcome == "inconclusive" and c.harm < -tolerance and allowed.accept_gain is None
        return c.outcome != "pass" and not is_open
    is_sure = c.p_holm is not None and c.p_holm <= policy.alpha
    is_fail = c.harm > tolerance and (is_sure or is_without_output(c.metric, c.bucket, c.reference, c.candidate))
    return c.outcome != ("fail" if is_fail else "inconclusive")


def _find_limit(bucket: str | None, allowed: GatedTolerance) -> tuple[float | None, str]:
    """Return the tolerance and the tier of a metric in a bucket: one without its own is watched by the metric's."""
    if bucket is None or bucket not in allowed.buckets:
        return allowed.overall, allowed.tier if bucket is None else "watched"
    return allowed.buckets[bucket], allowed.tier


def check_candidates(judgement: Judgement, product: P, kind: Auditor[P], root: Path) -> bool:
    """Check that what was judged is what would ship, where the candidates are present.

    The weights are read and hashed again: a record that says the right thing about another file proves nothing. An
    attached endpoint has its own fingerprint, which no file here can tell.

    Returns:
        False in a clone without the candidates: there is nothing to compare with.

    Raises:
        EvidenceError: a candidate was rebuilt, its serving or its weights changed, or it is gone since it was judged.
    """
    build = root / product.build
    if not (build / "candidates").is_dir():
        return False
    for verdict in released_verdicts(judgement):
        path = build / "candidates" / verdict.candidate / "candidate.json"
        if verdict.outcome == "refused":
            continue
        if not path.is_file():
            raise EvidenceError(
                f"{path}: expected the candidate that was judged ({verdict.fingerprint[:12]}), found "
                "none: making it again has failed; run `dvc repro`"
            )
        candidate = kind.read_candidate(build, verdict.candidate, product)
        if fingerprint(verdict.facts) != verdict.fingerprint:
            raise EvidenceError(
                f"{judgement.path}: {verdict.candidate}: expected the fingerprint of the facts beside "
                f"it, found another; {_explain_remedy(judgement)}"
            )
        if missing := candidate.facts.keys() - verdict.facts.keys():
            raise EvidenceError(
                f"{judgement.path}: {verdict.candidate}: expected facts about {min(missing)}, found "
                f"none; {_explain_remedy(judgement)}"
            )
        if difference := find_difference(verdict.facts, candidate.facts):
            raise EvidenceError(
                f"{path}: {difference.field}: judged with {difference.expected!r}, what would ship has "
                f"{difference.actual!r}; run `dvc repro` so that it is evaluated again"
            )
        kind.check_material(candidate, product, root)
    return True


def check_checkpoint(candidate: BuiltCandidate, product: Product, root: Path) -> None:
    """Refuse another checkpoint than the one that was judged: the candidate's own, or the one it was made from."""
    path = root / product.build / "candidates" / candidate.name / "candidate.json"
    built = path.with_name("checkpoint").relative_to(root).as_posix()
    expected = built if (root / built).is_dir() else product.candidates[candidate.name].checkpoint
    if Path(candidate.checkpoint.path) != Path(expected):
        raise EvidenceError(
            f"{path}: expected the checkpoint {expected!r}, got {candidate.checkpoint.path!r}; run "
            "`dvc repro` so that it is built again"
        )
    folder = locate_judged(candidate.checkpoint.path, root)
    # DVC keeps a file for unchanged that has its size and time, and would leave it there
    remedy = f"remove {path.parent} and run `dvc repro`" if folder == root / built else "run `dvc repro`"
    check_files(folder, candidate.checkpoint.digest, candidate.checkpoint.files, remedy=remedy)


def locate_judged(reference: str, root: Path) -> Path:
    """Return the folder of a checkpoint that was judged; judging downloads nothing.

    Raises:
        EvidenceError: it is a pinned model that is not on this machine.
    """
    try:
        return locate_checkpoint(reference, root, may_download=False)
    except CheckpointError as error:
        raise EvidenceError(str(error)) from None


def check_files(folder: Path, digest: str, files: dict[str, str], *, remedy: str = "run `dvc repro`") -> None:
    """Refuse a folder that holds other files than those that were judged, and say the remedy."""
    present = digest_files(folder)
    if digest_json(present) != digest:
        raise EvidenceError(
            f"{folder}: expected the checkpoint that was judged ({digest[:12]}), found other files "
            f"({digest_json(present)[:12]}: {name_changed_file(files, present)}); {remedy} so that "
            "it is built and evaluated again"
        )


def _explain_remedy(judgement: Judgement) -> str:
    return f"the file was edited: run `dvc repro -f -s compare@{judgement.policy.product}`"
