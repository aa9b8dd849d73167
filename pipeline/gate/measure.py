"""From paired case scores to measurements: every metric, overall and in every bucket.

A metric's definition says which score it averages and which direction is better; this module
turns it into the harm of each case, asks `statistics` for bounds and p-values, and keeps what the
decision rule needs. It does not decide. A metric that can't be measured is an EvidenceError that
names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EvidenceError
from pipeline.gate.case_table import CaseTable
from pipeline.gate.clusters import hiding_clusters, measure_spread, sum_by_cluster
from pipeline.gate.decision import Measurement
from pipeline.gate.detection import estimate_precision, list_object_buckets, measure_precision
from pipeline.gate.outlook import cases_to_bound, cases_to_prove
from pipeline.gate.pairing import PairedCases, read_scores, select_bucket
from pipeline.gate.scales import find_document_room, find_room
from pipeline.gate.statistics import (
    Bounds,
    proportion_bounds,
    proportion_interval,
    ratio_bounds,
    ratio_interval,
    sign_flip_tail,
    tail_at,
)
from pipeline.gate.wording import name_metric, natural_key
from pipeline.records.detections import MatchTable
from pipeline.records.evaluations import CaseRecord
from pipeline.records.verdicts import JudgedTier, Metric
from pipeline.settings.metrics import MetricDefinition

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class GradedScore(MetricDefinition):
    """A score that others gave their cases and that is no rate: any case may lose as much as the scores span."""


@dataclass(frozen=True)
class Scores:
    """One metric's score per case, the weights it is divided by, and the clusters of the cases."""

    definition: MetricDefinition
    values: Floats
    weights: Floats
    clusters: Ints

    def at(self, positions: Ints) -> Scores:
        """Return the scores of some cases, with their clusters numbered anew."""
        clusters = np.unique(self.clusters[positions], return_inverse=True)[1].astype(np.int64)
        return Scores(self.definition, self.values[positions], self.weights[positions], clusters)

    def value(self) -> float:
        """Return the metric's value over these cases."""
        return self._on_scale(float(self.values.sum()) / float(self.weights.sum()))

    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the value."""
        if self.definition.estimator == "proportion":
            return proportion_interval(self.values, self.clusters)
        low, high = ratio_interval(self.values, self.weights, self.clusters)
        return self._on_scale(low), self._on_scale(high)

    def _on_scale(self, ratio: float) -> float:
        return math.exp(ratio) if self.definition.harm == "relative" else ratio


def collect_scores(
    records: Sequence[CaseRecord], definition: MetricDefinition, clusters: Ints, *, where: str
) -> Scores:
    """Read one metric's scores from records.

    Raises:
        EvidenceError: a score is absent, is no share where one is expected, or weights sum to nothing.
    """
    values = read_scores(records, definition.score, where=where)
    weights = np.ones(len(values))
    if definition.weight is not None:
        weights = read_scores(records, definition.weight, where=where)
    is_valid = weights > 0
    if definition.estimator == "proportion":
        is_valid &= np.isin(values, (0.0, 1.0))
    for i in np.flatnonzero(~is_valid)[:1].tolist():
        wanted = f"{definition.weight!r} above 0" if weights[i] <= 0 else f"{definition.score!r} to be 0 or 1"
        raise EvidenceError(f"{where}: case {records[i].case_id!r}: expected {wanted}, got {records[i].scores!r}")
    return Scores(definition, values, weights, clusters)


def list_buckets(records: Sequence[CaseRecord]) -> list[str]:
    """Return the buckets that the cases carry, in natural order."""
    return sorted(CaseTable.of(records).buckets, key=natural_key)


def list_pair_buckets(pairs: PairedCases, definition: MetricDefinition) -> list[str]:
    """Return the buckets in which a metric can be compared: those of the cases, and those of what is on an image."""
    is_precision = definition.estimator == "average_precision"
    of_objects = list_object_buckets(pairs.tables[0], definition) if pairs.tables and is_precision else []
    return [*list_buckets(pairs.reference), *of_objects]


def estimate_metrics(
    records: Sequence[CaseRecord],
    definition: MetricDefinition,
    clusters: Ints,
    *,
    eval_name: str,
    table: MatchTable | None = None,
) -> list[Metric]:
    """Return one candidate's metric, overall and per bucket, each with its interval.

    Args:
        table: of a detector.

    Raises:
        EvidenceError: the metric can't be computed from these records.
    """
    if definition.estimator == "average_precision":
        if table is None:
            raise EvidenceError(
                f"{eval_name}/{definition.name}: expected matched detections beside the records, "
                "found none; run `dvc repro`"
            )
        return estimate_precision(
            records, table, definition, clusters, eval_name=eval_name, buckets=list_buckets(records)
        )
    name = f"{eval_name}/{definition.name}"
    scores = collect_scores(records, definition, clusters, where=name)
    metrics = []
    for bucket in [None, *list_buckets(records)]:
        positions = select_bucket(records, bucket)
        value, (low, high) = _checked(name, scores.at(positions))
        metrics.append(
            Metric(
                name=name,
                bucket=bucket,
                value=value,
                unit=definition.unit,
                better=definition.better,
                n=len(positions),
                low=low,
                high=high,
            )
        )
    return metrics


def _checked(name: str, scores: Scores) -> tuple[float, tuple[float | None, float | None]]:
    low = high = None
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            value = scores.value()
            low, high = scores.interval()
    except (ValueError, ZeroDivisionError):
        pass  # one cluster, or squares that are zero: a value without an interval
    except OverflowError:
        value = math.inf
    _check_finite(name, value, low or 0.0, high or 0.0)
    return value, (low, high)


def _check_finite(name: str, *numbers: float) -> None:
    if not all(map(math.isfinite, numbers)):
        raise EvidenceError(f"{name}: expected finite numbers, got scores too large to compute with")


def measure_metric(
    pairs: PairedCases,
    definition: MetricDefinition,
    bucket: str | None,
    *,
    eval_name: str,
    tolerance: float | None,
    alpha: float,
    tier: JudgedTier = "critical",
) -> Measurement:
    """Measure one metric of a candidate against the reference in one bucket.

    Raises:
        EvidenceError: no case in the bucket, a score is absent, the two sides did unequal work, there are too few
            clusters for an interval, or a graded score can't lose as much as is tolerated.
    """
    if definition.estimator == "average_precision":
        return measure_precision(
            pairs, definition, bucket, eval_name=eval_name, tolerance=tolerance, alpha=alpha, tier=tier
        )
    name = name_metric(f"{eval_name}/{definition.name}", bucket)
    positions = select_bucket(pairs.reference, bucket)
    if len(positions) == 0:
        raise EvidenceError(f"{name}: the bucket is empty; no case carries it")
    reference, candidate = (
        collect_scores(side, definition, pairs.clusters, where=name).at(positions)
        for side in (pairs.reference, pairs.candidate)
    )
    if not np.array_equal(reference.weights, candidate.weights):
        unequal = pairs.reference[int(positions[np.flatnonzero(reference.weights != candidate.weights)[0]])]
        raise EvidenceError(
            f"{name}: unequal work: {definition.weight!r} of case {unequal.case_id!r} differs between "
            "reference and candidate"
        )
    if isinstance(definition, GradedScore) and tolerance is not None:
        _check_room(reference, candidate, tolerance, where=name)
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            m = _compare_scores(
                reference,
                candidate,
                bucket,
                f"{eval_name}/{definition.name}",
                tolerance,
                alpha,
                tier,
                pairs.clusters[positions],
                int(pairs.clusters.max()) + 1,
            )
    except (ValueError, ArithmeticError) as error:
        raise EvidenceError(f"{name}: can't be compared: {error}") from None
    _check_finite(name, m.reference, m.candidate, m.harm, m.low, m.high, m.p)
    return m


def _check_room(reference: Scores, candidate: Scores, tolerance: float, *, where: str) -> None:
    with np.errstate(over="ignore"):
        scores = np.concatenate([side.values / side.weights for side in (reference, candidate)])
        room = find_room(scores, reference.value(), reference.definition.better)
    if room <= tolerance:
        raise EvidenceError(
            f"{where}: the reference has {reference.value():.4g} and both sides' scores lie between "
            f"{scores.min():.4g} and {scores.max():.4g}, so a loss above the tolerance of "
            f"{tolerance:g} can't show; it is in the unit of the scores: lower it, or look at the "
            "evalset"
        )


def _compare_scores(
    reference: Scores,
    candidate: Scores,
    bucket: str | None,
    name: str,
    tolerance: float | None,
    alpha: float,
    tier: JudgedTier,
    places: Ints,
    num_places: int,
) -> Measurement:
    """Measure two sides; `places` are their clusters as numbered among the `num_places` of the whole eval."""
    definition, clusters, n = reference.definition, reference.clusters, len(reference.values)
    is_proportion = definition.estimator == "proportion"
    # the few largest clusters hide most: a loss that sits in them must not pass for want of a rate
    count = hiding_clusters(clusters, confidence=1 - alpha, weights=reference.weights)
    d = (reference.values - candidate.values) * definition.sign
    b = c = bound = None
    if is_proportion:
        bounds = proportion_bounds(d, clusters, confidence=1 - alpha, count=count)
        b, c = int((d > 0).sum()), int((d < 0).sum())
    else:
        lost = _room_for_loss(reference, candidate, d)
        bound = partial(ratio_bounds, d, reference.weights, clusters, confidence=1 - alpha, lost=lost, count=count)
        bounds = bound()
    harm, low, high = (_harm_scale(definition, x) for x in (bounds.harm, bounds.low, bounds.high))
    sums, weights = (sum_by_cluster(values, places, num_places) for values in (d, reference.weights))
    tail = sign_flip_tail(sums)
    return Measurement(
        metric=name,
        bucket=bucket,
        reference=reference.value(),
        candidate=candidate.value(),
        unit=definition.unit,
        n=n,
        num_clusters=int(clusters.max()) + 1,
        effective_clusters=count,
        b=b,
        c=c,
        harm=harm,
        low=low,
        high=high,
        p=tail_at(tail, sums.sum()),
        p_gain=tail_at(tail, -sums.sum()),
        tolerance=tolerance,
        tier=tier,
        more_cases=(
            None
            if tolerance is None
            else _more_cases(definition, bounds, bound, b, c, d, clusters, count, tolerance, alpha)
        ),
        sums=sums,
        weights=weights,
        tail=tail,
        deff=bounds.design_effect,
    )


def _room_for_loss(reference: Scores, candidate: Scores, d: Floats) -> float:
    """Return the harm that a case of average weight might have had, though none showed it; 0: there is no saying."""
    if isinstance(reference.definition, GradedScore):
        return _span(np.concatenate([reference.values, candidate.values])) / float(reference.weights.mean())
    if reference.definition.estimator != "ratio":
        return 0.0
    return find_document_room((reference.values + candidate.values) / 2, d, reference.weights)


def _span(values: Floats) -> float:
    """Return how much one case can lose: 1 where all scores lie in [0, 1], else the largest less the least.

    Scores that are all the same number span that number.
    """
    low, high = float(values.min()), float(values.max())
    return 1.0 if low >= 0 and high <= 1 else (high - low or abs(high))


def _harm_scale(definition: MetricDefinition, difference: float) -> float:
    return math.expm1(difference) if definition.harm == "relative" else difference


def _more_cases(
    definition: MetricDefinition,
    bounds: Bounds,
    bound: Callable[..., Bounds] | None,
    b: int | None,
    c: int | None,
    d: Floats,
    clusters: Ints,
    count: float,
    tolerance: float,
    alpha: float,
) -> int | None:
    """Return how many more cases would prove the tolerance if flips, spread and clusters stay as seen."""
    n, limit = len(clusters), math.log1p(tolerance) if definition.harm == "relative" else tolerance
    if bounds.harm >= limit or bounds.high <= limit:
        return None
    if bound is not None:
        return cases_to_bound(lambda growth: bound(growth=growth).high, limit, n)
    if b is not None and c is not None:
        spread = measure_spread(d, clusters) if 1 < count < n else None
        return cases_to_prove(b, c, n, count, spread, limit, confidence=1 - alpha)
    return None
