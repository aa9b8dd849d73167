"""Does the path change answers? What the canary says about one candidate.

The weights of a quantised candidate are others than the reference's, and so are its answers; the path
that serves them may change no more than rounding does. So the path is judged where weights are equal on
both sides: against the reference, when the candidate has its weights (drafts, another engine, another
precision of serving), and against itself with its drafts switched off. How much the baseline differs from
itself, alone or again from loaded, is the floor. More differences than that floor explains are a failure, and so
are more differences of the candidate from itself. A canary that would most likely not notice the rate it is
there for proves no pass.

The number of differences that the floor explains is a quantile of the beta-binomial distribution that the
floor predicts (Jeffreys prior): a floor of 0 in 100 prompts is no proof of 0.

Reference: A. Gelman et al., Bayesian Data Analysis (2013), section 2.4, for the predictive distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import EvidenceError
from pipeline.gate.pairing import Evidence
from pipeline.gate.rates import detection_power, plan_trials, predictive_quantile, rate_upper_bound
from pipeline.gate.verdicts import OWN_PATH
from pipeline.products.text.findings.endpoint import holds_same_model
from pipeline.records.canary import CanaryAnswer, CanaryRecord, count_unstable, digest_behaviour, read_canary
from pipeline.records.differences import KINDS, classify_difference
from pipeline.records.digests import digest_file
from pipeline.records.verdicts import MIN_POWER, CanaryComparison, CanaryFlip

DEPLOYED = "loaded"
# margin below which rounding can turn a token, in nat: one step of the dtype for logits of 16 to 32, and for float32
# what sums of its terms in another order come to
RISK_NATS = {"float32": 1e-4, "bfloat16": 0.125, "float16": 0.016}


class CanaryRule(Protocol):
    """What params.yaml asks of a canary."""

    @property
    def num_prompts(self) -> int: ...

    @property
    def target_rate(self) -> float: ...

    @property
    def session_calls(self) -> int: ...


@dataclass(frozen=True)
class _Baseline:
    """A path that a candidate's is compared with, and its answers."""

    name: str
    records: Sequence[CanaryRecord]
    run: str  # of it, at the deployed concurrency
    is_same_weights: bool


def load_canary(evidence: Evidence) -> list[CanaryRecord]:
    """Load a candidate's canary; empty when no eval generates text.

    Raises:
        EvidenceError: it is missing, was edited, or does not say what the evaluation says of it.
    """
    file = evidence.evaluation.canary
    if file is None:
        if (name := _find_generating(evidence)) is not None:
            raise EvidenceError(
                f"{evidence.folder}: expected a canary, as {name} generates text, found none; run `dvc repro`"
            )
        return []
    path = evidence.folder / file.records
    if not path.is_file() or digest_file(path) != file.sha256:
        raise EvidenceError(f"{path}: expected the canary as it was written, found another; run `dvc repro`")
    records = read_canary(path)
    if (len(records), digest_behaviour(records), count_unstable(records)) != (
        file.num_prompts,
        file.behaviour,
        file.num_unstable,
    ):
        raise EvidenceError(f"{path}: the behavioural fingerprint is not that of its answers; run `dvc repro`")
    return records


def _find_generating(evidence: Evidence) -> str | None:
    """Return an eval whose answers are texts that the model generated; None where none is."""
    return next(
        (
            name
            for name, file in evidence.evaluation.evals.items()
            if file.kind in ("tool_calls", "trajectories")
            or any(record.num_completion_tokens for record in evidence.records.get(name, ()))
        ),
        None,
    )


def compare_canary(
    reference: Evidence, candidate: Evidence, settings: CanaryRule, *, alpha: float
) -> CanaryComparison | None:
    """Compare a candidate's path with its baseline; None when no eval generates text.

    Args:
        reference: evidence of the reference.
        candidate: evidence of the candidate.
        settings: what must be noticed.
        alpha: chance that a path no worse than the floor is called worse.

    Raises:
        EvidenceError: the canary is missing on a side, was edited, or asked other prompts there.
    """
    ours, theirs = load_canary(reference), load_canary(candidate)
    if not ours and not theirs:
        return None
    for name, evidence in (("reference", reference), ("candidate", candidate)):
        file = evidence.evaluation.canary
        if file and file.num_asked != settings.num_prompts:
            raise EvidenceError(
                f"canary of the {name}: expected {settings.num_prompts} prompts, as params.yaml asks, "
                f"got {file.num_asked}; run `dvc repro`"
            )
    if [r.input_digest for r in ours] != [r.input_digest for r in theirs]:
        raise EvidenceError("canary: reference and candidate were asked different prompts; run `dvc repro`")
    plain = theirs if all("plain loaded" in record.answers for record in theirs) else []
    baselines = _list_baselines(reference, candidate, ours, plain)
    # the baseline from which it differs most
    compared = [_compare(baseline, theirs, candidate, settings, alpha=alpha) for baseline in baselines]
    return max(compared, key=lambda c: (c.num_diverged - c.allowed, c.is_same_weights))


def _compare(
    baseline: _Baseline, theirs: Sequence[CanaryRecord], candidate: Evidence, settings: CanaryRule, *, alpha: float
) -> CanaryComparison:
    pairs = [(a.answers[baseline.run], b.answers[DEPLOYED], a) for a, b in zip(baseline.records, theirs, strict=True)]
    different = [(a, b, record) for a, b, record in pairs if not a.is_same(b)]
    n, floor = len(theirs), count_unstable(baseline.records, baseline.run.removesuffix(DEPLOYED))
    allowed = predictive_quantile(floor, n, n, alpha=alpha)
    margins = [gap for record in baseline.records for gap in record.margins.get(baseline.run, ())]
    risk = RISK_NATS.get(candidate.candidate.serving.dtype, 0.0)
    return CanaryComparison(
        baseline=baseline.name,
        is_same_weights=baseline.is_same_weights,
        num_prompts=n,
        num_diverged=len(different),
        kinds=dict(Counter(classify_difference(a.text, b.text) or "tokens" for a, b, _ in different)),
        flips=tuple(_record_flip(a, b, record, baseline.run) for a, b, record in different),
        num_unstable=count_unstable(theirs),
        floor=floor,
        allowed=allowed,
        target_rate=settings.target_rate,
        session_calls=settings.session_calls,
        power=detection_power(allowed, n, settings.target_rate),
        num_planned=plan_trials(settings.target_rate, power=MIN_POWER, alpha=alpha),
        session_rate=1 - (1 - len(different) / n) ** settings.session_calls,
        session_rate_high=1 - (1 - rate_upper_bound(len(different), n, alpha=alpha)) ** settings.session_calls,
        num_tokens=len(margins),
        num_tokens_at_risk=sum(gap < risk for gap in margins),
        num_prompts_at_risk=sum(any(gap < risk for gap in r.margins.get(baseline.run, ())) for r in baseline.records),
        risk_nats=risk,
    )


def find_path_failure(compared: CanaryComparison, *, exact: bool, num_changed_outputs: int) -> str | None:
    """Return why a path fails, else None.

    Args:
        compared: of the candidate.
        exact: any difference fails.
        num_changed_outputs: of the evals, where the reference has the same weights.
    """
    if exact and (compared.is_changed or num_changed_outputs):
        return (
            f"exact is asked for, and answers changed: {compared.num_diverged} of the canary against "
            f"{compared.baseline}, {compared.num_unstable} between its own runs, {num_changed_outputs} outputs of "
            "the evals against the reference; serve it without drafts, in float32, or without `exact`"
        )
    if not compared.is_beyond_floor:
        return None
    num_differing, where = compared.num_unstable, "between its own runs alone and under load"
    if compared.is_same_weights and compared.num_diverged > compared.allowed:
        num_differing, where = compared.num_diverged, f"from {compared.baseline}"
    return (
        f"{num_differing} of {compared.num_prompts} canary answers differ {where}, {compared.floor} do from run to run "
        f"of {compared.baseline}: more than {compared.allowed} are not explained by that"
    )


def describe_canary(compared: CanaryComparison) -> str:
    """Say in a few sentences what the canary showed and what it could have shown."""
    c = compared
    kinds = ", ".join(f"{kind} {c.kinds[kind]}" for kind in (*KINDS, "tokens") if kind in c.kinds)
    text = f"Canary: {c.num_diverged} of {c.num_prompts} greedy answers differ from {c.baseline}"
    text += f" ({kinds})" if kinds else ""
    if gaps := [flip.margin for flip in c.flips if flip.margin is not None]:
        text += f", where the first other token was ahead by {min(gaps):.2g} to {max(gaps):.2g} nat"
    text += (
        f"; {c.num_unstable} between its own runs alone and loaded. Over a session of {c.session_calls} calls "
        f"{c.session_rate:.1%} see another answer, at most {c.session_rate_high:.1%}."
    )
    if c.is_same_weights:
        text += _describe_threshold(c)
    if c.num_tokens:
        text += (
            f" At risk: {c.num_tokens_at_risk:,} of {c.num_tokens:,} tokens there are ahead by less than "
            f"{c.risk_nats:g} nat, in {c.num_prompts_at_risk} prompts."
        )
    return text


def describe_batching(compared: CanaryComparison, dtype: str) -> str:
    """Say what batching changed of the answers; nothing in float32 where it changed none, as is usual.

    Args:
        compared: of the candidate.
        dtype: that it is served in.
    """
    if dtype == "float32" and not compared.num_unstable:
        return ""
    return (
        f"Served in {dtype}: who shares a batch can turn a near tie. Batches changed {compared.num_unstable} of "
        f"{compared.num_prompts} canary answers between alone and loaded."
    )


def describe_blind(compared: CanaryComparison, *, num_asked: int) -> str:
    """Say that a canary is too small, or its floor too high, to notice what it is there for.

    Args:
        compared: of the candidate.
        num_asked: prompts that the settings ask for; the evals may have fewer cases.
    """
    enough = f"({compared.num_planned:,} do when the floor is none)"
    remedy = f"raise canary.num_prompts {enough} or canary.target_rate"
    if compared.num_prompts < num_asked:
        remedy = (
            f"the evals that generate text have only {compared.num_prompts} cases: add cases {enough}, or raise "
            "canary.target_rate"
        )
    return (
        f"{compared.num_prompts} prompts with a floor of {compared.floor} notice a path that changes "
        f"{compared.target_rate:.1%} of answers with probability {compared.power:.0%} only, expected "
        f"{MIN_POWER:.0%}; {remedy}"
    )


def _describe_threshold(c: CanaryComparison) -> str:
    more = f" ({c.num_planned:,} prompts would for {MIN_POWER:.0%})" if c.is_blind else ""
    return (
        f" Floor: {c.floor} differ there from run to run, so up to {c.allowed} may be chance; a path that changes "
        f"{c.target_rate:.1%} of answers is noticed with probability {c.power:.0%}{more}."
    )


def _list_baselines(
    reference: Evidence, candidate: Evidence, ours: Sequence[CanaryRecord], own: Sequence[CanaryRecord]
) -> list[_Baseline]:
    """Return the paths that serve the same weights; the reference, when there is none."""
    baselines = []
    if holds_same_model(reference.candidate.checkpoint, candidate.candidate.checkpoint):
        baselines.append(_Baseline("the reference's path", ours, DEPLOYED, True))
    if own:
        baselines.append(_Baseline(OWN_PATH, own, f"plain {DEPLOYED}", True))
    return baselines or [_Baseline("the reference, whose weights are others", ours, DEPLOYED, False)]


def _record_flip(reference: CanaryAnswer, candidate: CanaryAnswer, record: CanaryRecord, run: str) -> CanaryFlip:
    ours, theirs = reference.token_ids, candidate.token_ids
    if ours is None or theirs is None:
        return CanaryFlip(
            case_id=record.case_id, token=None, margin=None, reference=reference.text, candidate=candidate.text
        )
    shorter = min(len(ours), len(theirs))
    token = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    gaps = record.margins.get(run, ())
    return CanaryFlip(
        case_id=record.case_id,
        token=token,
        margin=gaps[token] if token < len(gaps) else None,
        reference=reference.text,
        candidate=candidate.text,
    )
