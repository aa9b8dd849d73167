"""The decision rule: from bounds, a p-value and a tolerance to an outcome and the sentence for it.

With harm D (positive = the candidate is worse), one-sided bounds L and U at confidence 1 - alpha,
and tolerance delta:

    pass          U <= delta on at least 30 effective clusters: the loss is proven to be no larger than
                  tolerated; unless the gain is larger than delta and no chance, which is suspicious until
                  somebody accepts it (`accept_gain`)
    fail          D > delta, and the sign-flip test rejects "no difference" after Holm: p <= alpha; or no output is
                  valid at all (`validity.py`)
    inconclusive  anything else; the sentence says on which side of the tolerance it was seen
    refused       the evidence is not fit to be judged: decided in `pairing.py`, before any number

Holm's family is every gated comparison, buckets included, of every candidate in `release`: the
whole release is one decision, and its false alarms stay below alpha together. A candidate outside
the release is judged as if it were released alone, with its own gated comparisons as the family.
Advisory comparisons stop nothing and are in no family: each is judged by itself. Of what is watched (`categories.py`)
a fail alone counts; it is in the family.
Numbers are compared as computed, never rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.gate.outlook import is_too_close
from pipeline.gate.statistics import Tail, holm
from pipeline.gate.validity import is_without_output
from pipeline.gate.verdicts import MIN_CLUSTERS, is_decisive, is_proven
from pipeline.gate.wording import (
    definition_of,
    format_count,
    format_harm,
    format_num,
    format_p,
    format_tolerance,
    format_value,
)
from pipeline.records.verdicts import Comparison, JudgedTier

Floats = NDArray[np.float64]
Outcome = Literal["pass", "fail", "inconclusive", "refused"]


@dataclass(frozen=True)
class Measurement:
    """One metric in one bucket, measured on both sides and not judged yet.

    Attributes:
        p: one-sided p-value of the sign-flip test for harm.
        p_gain: the same test for a gain.
        more_cases: how many more cases would prove the tolerance at the flips seen; None when no
            affordable number would.
        tier: what an outcome other than pass means for the release.
        sums: harm of each cluster of the eval, in its evalset's order; 0 for clusters outside of the bucket.
        weights: of each cluster likewise: sum of `sums` over that of `weights` is the harm.
        tail: p-values of totals of `sums` under random signs.
        deff: design effect.
        accepts_gain: a gain beyond the tolerance is believed.
    """

    metric: str
    bucket: str | None
    reference: float
    candidate: float
    unit: str
    n: int
    num_clusters: int
    effective_clusters: float
    b: int | None
    c: int | None
    harm: float
    low: float
    high: float
    p: float
    p_gain: float
    tolerance: float | None
    more_cases: int | None
    tier: JudgedTier
    sums: Floats
    weights: Floats
    tail: Tail
    deff: float = 1.0
    accepts_gain: bool = False

    @property
    def is_decisive(self) -> bool:
        """Say whether it can stop a release: it belongs to Holm's family."""
        return self.tolerance is not None and self.tier != "advisory"


def harm_of(metric: str, difference: Floats) -> Floats:
    """Return harms on the scale of a metric's tolerance from differences of its sums per weight."""
    return np.expm1(difference) if definition_of(metric).harm == "relative" else difference


def judge_all(
    measured: dict[str, list[Measurement]], release: Sequence[str], *, alpha: float
) -> dict[str, list[Comparison]]:
    """Judge every candidate's measurements, with Holm over the family each belongs to."""
    released = [name for name in measured if name in release]
    families = [released] + [[name] for name in measured if name not in release]
    return {
        name: comparisons
        for family in families
        for name, comparisons in _judge_family({n: measured[n] for n in family}, alpha).items()
    }


def _judge_family(measured: dict[str, list[Measurement]], alpha: float) -> dict[str, list[Comparison]]:
    gated = [m for measurements in measured.values() for m in measurements if m.is_decisive]
    adjusted = iter(holm([m.p for m in gated]))
    return {
        name: [judge(m, next(adjusted) if m.is_decisive else m.p, alpha=alpha) for m in measurements]
        for name, measurements in measured.items()
    }


def judge(measurement: Measurement, p_holm: float, *, alpha: float) -> Comparison:
    """Apply the rule to one measurement."""
    outcome, sentence = _decide(measurement, p_holm, alpha)
    m = measurement
    return Comparison(
        metric=m.metric,
        bucket=m.bucket,
        reference=m.reference,
        candidate=m.candidate,
        unit=m.unit,
        n=m.n,
        num_clusters=m.num_clusters,
        effective_clusters=m.effective_clusters,
        design_effect=m.deff,
        b=m.b,
        c=m.c,
        harm=m.harm,
        low=m.low,
        high=m.high,
        p=m.p,
        p_holm=None if m.tolerance is None else p_holm,
        tolerance=m.tolerance,
        tier=m.tier,
        outcome=outcome,
        sentence=sentence,
    )


def _decide(
    m: Measurement, p_holm: float, alpha: float
) -> tuple[Literal["pass", "fail", "inconclusive", "reported"], str]:
    if m.tolerance is None:
        return "reported", "not gated: no tolerance is set"
    allowed = format_tolerance(m.metric, m.tolerance)
    if m.harm < -m.tolerance and m.p_gain <= alpha and not m.accepts_gain:
        return "inconclusive", (
            f"suspicious gain: better by {format_harm(m.metric, -m.harm)}, more than the "
            f"tolerance of {allowed}; check that both sides did the same work, then accept it by "
            "`accept_gain` with a reason, or pin the better one as the reference"
        )
    if is_proven(m.high, m.tolerance, m.effective_clusters):
        if m.high < 0:
            return "pass", f"proven: a gain of at least {format_harm(m.metric, -m.high)}, and no loss"
        return "pass", f"proven: the loss is at most {format_harm(m.metric, m.high)}, tolerated {allowed}"
    if m.harm > m.tolerance and p_holm <= alpha:
        flips = f" (b {m.b} against c {m.c})" if m.b is not None else ""
        return "fail", (
            f"beyond tolerance: lost {format_harm(m.metric, m.harm)}{flips}, tolerated {allowed}, "
            f"and that there is a loss at all is not chance (p {format_p(p_holm)} after Holm)"
        )
    if m.harm > m.tolerance and is_without_output(m.metric, m.bucket, m.reference, m.candidate):
        values = " became ".join(format_value(m.metric, x) for x in (m.reference, m.candidate))
        return "fail", f"no valid output: {values} in {m.n} cases, which is a fact and no chance, however few there are"
    if m.harm > m.tolerance:
        return "inconclusive", (
            f"beyond tolerance as seen ({format_harm(m.metric, m.harm)}, tolerated {allowed}), "
            f"could be noise (p {format_p(p_holm)} after Holm)"
        )
    seen = f"within tolerance as seen ({format_harm(m.metric, m.harm)}, tolerated {allowed}), not proven"
    if m.effective_clusters < MIN_CLUSTERS:
        return "inconclusive", (
            f"{seen}: its {format_num(m.num_clusters, 'cluster weighs', 'clusters weigh')} as much as "
            f"{m.effective_clusters:.0f} of equal size, too few to bound a loss; at least {MIN_CLUSTERS} are needed"
        )
    return "inconclusive", (
        f"{seen} (the loss may be {format_harm(m.metric, m.high)}): {_describe_outlook(m, m.tolerance)}"
    )


def _describe_outlook(m: Measurement, tolerance: float) -> str:
    """Say what would prove the tolerance: more cases, or, where the loss takes most of it, something else."""
    if is_too_close(m.more_cases, m.n, harm=m.harm, tolerance=tolerance):
        return (
            "the loss seen is so close to the tolerance that more cases will hardly settle it; what helps is a better "
            "candidate, or a wider tolerance if the product can afford it"
        )
    like = "prove it with losses and gains like these"
    if m.more_cases is None:
        return f"no affordable number of cases would {like}"
    return f"{format_count(m.more_cases)} more cases, in clusters of their own, would give an even chance to {like}"


def combine(comparisons: Iterable[Comparison], refusals: Sequence[str], failures: Sequence[str] = ()) -> Outcome:
    """Return a candidate's outcome: fail, else refused, else inconclusive, else pass.

    A candidate with nothing gated is refused: no evidence is not a pass.
    """
    outcomes = {comparison.outcome for comparison in comparisons if is_decisive(comparison)} - {"reported"}
    if failures or "fail" in outcomes:
        return "fail"
    if refusals or not outcomes or "refused" in outcomes:
        return "refused"
    return "inconclusive" if "inconclusive" in outcomes else "pass"
