"""What a suite can prove, before any model runs: cases, flips to expect, the tolerance they can prove, and the cost.

How many cases flip is taken from the last judgement where it is of the same cases, and assumed otherwise. A tolerance
counts as provable when a candidate that loses nothing would pass with a probability of 80 %: half of its flips are
losses, give or take chance. Where not even a candidate without a single flip could pass, the tolerance is impossible,
and that is said now, and ends stage `env`. What rests on the last run, as its reference's average precision does, is a
warning: a model that was trained since may have another.
Not covered: what a candidate really loses, and metrics that no run has measured yet and that are no rates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import ndtr, ndtri

from pipeline.errors import EvidenceError, SizeError
from pipeline.gate.clusters import Spread
from pipeline.gate.resampling import bootstrap_bounds
from pipeline.gate.statistics import bound_unseen, count_bounds
from pipeline.gate.verdicts import MIN_CLUSTERS, VERDICT_FILE, Judgement
from pipeline.gate.wording import format_harm, format_tolerance, name_metric
from pipeline.records.record_files import read_record
from pipeline.records.verdicts import Comparison, Verdict
from pipeline.settings.base import REPORTS, Product
from pipeline.settings.metrics import MetricDefinition

ASSUMED_FLIPS = 0.05  # of the cases: what INT4 changes in a rate that a model is good at, as a first guess
POWER = 0.8  # that a candidate without a loss passes
_ALIKE = 1.05  # times: a perplexity's room follows both sides', which differ little
_MOST = 1_000  # times as many cases: more is no plan
_LEGEND = "can prove, cases in all: for a candidate without a loss, which then passes four times in five"  # POWER

_GUESS = "assumed"
_ASSUMED = (
    "assumed flips are a guess: a first run (`dvc repro gate@PRODUCT`) counts them, before a tolerance is widened"
)


@dataclass(frozen=True)
class SuiteSize:
    """How many cases a bucket has, and as how many clusters of equal size they count."""

    n: int
    effective_clusters: float


Sizes = dict[str | None, SuiteSize]  # of an eval by bucket; None is overall


@dataclass(frozen=True)
class PlanRow:
    """One gated metric in one bucket.

    Attributes:
        n: cases; None where only a run can tell, and no run has.
        flips: share of the cases expected to flip; None for what is no rate.
        source: where the expectation comes from.
        least: smallest tolerance that could ever be proven, without any flip or change; None where nobody knows.
        provable: smallest tolerance that this n proves; None where no run has measured it.
        needed: cases that would prove the tolerance; None where no affordable number would, or nobody knows.
        minutes: that the eval takes for one candidate; None where no run has told.
        problem: why the tolerance can't be proven, or "".
        power: chance that a candidate without a loss is proven here; None where no run has measured it.
        is_needed: whether a release is stopped where it is not proven.
        is_sure: whether a problem is one of the cases alone, and not of what the last run showed of its models.
    """

    metric: str
    bucket: str | None
    tolerance: float
    n: int | None
    flips: float | None
    source: str
    least: float | None
    provable: float | None
    needed: int | None
    minutes: float | None
    problem: str
    power: float | None = None
    is_needed: bool = True
    is_sure: bool = True


def read_last(product: str, root: Path) -> Judgement | None:
    """Return the last judgement of a product, None where there is none or an older version wrote it."""
    try:
        return read_record(root / REPORTS / product / VERDICT_FILE, Judgement)
    except EvidenceError:
        return None


def plan_gate(
    product: Product, suites: Mapping[str, Sizes], last: Judgement | None, others: Collection[str] = ()
) -> list[PlanRow]:
    """Return what each gated metric's cases can prove.

    Args:
        product: settings.
        suites: sizes by eval and bucket. Those of an eval that is not there are taken from the last judgement, and
            never called too small.
        last: the last judgement, from which flips and times are taken.
        others: evals whose cases are others than it judged: they are planned as before a first run.
    """
    rows = []
    for metric, tolerance in product.gate.tolerances.items():
        eval_name, definition = metric.partition("/")[0], product.metrics[metric]
        known, why = (None, " (the last run had other cases)") if eval_name in others else (last, "")
        for bucket, limit in [(None, tolerance.overall), *tolerance.buckets.items()]:
            if limit is not None:
                seen, verdict = _find_last(known, metric, bucket)
                sizes = suites.get(eval_name, {})
                size = sizes.get(bucket)
                if size is None and seen is not None:  # of a bucket by objects, or of cases that nobody has counted
                    whole, _ = _find_last(known, metric, None)
                    grown = sizes[None].n / whole.n if sizes and whole is not None else 1.0
                    size = SuiteSize(round(seen.n * grown), seen.effective_clusters * grown)
                row = _plan_row(metric, bucket, limit, definition, size, seen, verdict, product.gate.alpha)
                must = product.gate.on_inconclusive == "block" and tolerance.tier == "critical"
                # cases that nobody has counted may be more by now
                problem, is_sure = row.problem if sizes else "", row.is_sure and bucket in sizes
                source = row.source + why
                rows.append(replace(row, is_needed=must, problem=problem, is_sure=is_sure, source=source))
    return rows


def _find_last(last: Judgement | None, metric: str, bucket: str | None) -> tuple[Comparison | None, Verdict | None]:
    """Return the comparison of the released candidate that moved most in the last judgement, and its verdict."""
    released = [
        (c, v)
        for v in (last.verdicts if last else ())
        for c in v.comparisons
        if v.is_release and (c.metric, c.bucket) == (metric, bucket)
    ]
    return max(released, key=lambda pair: pair[0].high - pair[0].harm, default=(None, None))


def _plan_row(
    metric: str,
    bucket: str | None,
    tolerance: float,
    definition: MetricDefinition,
    size: SuiteSize | None,
    seen: Comparison | None,
    verdict: Verdict | None,
    alpha: float,
) -> PlanRow:
    source = f"last run of {verdict.candidate}" if verdict else _GUESS
    seconds = verdict.seconds.get(metric.partition("/")[0]) if verdict else None
    minutes = None if seconds is None else seconds / 60
    if size is None:
        return PlanRow(metric, bucket, tolerance, None, None, "needs a run", None, None, None, minutes, "")
    if size.effective_clusters < MIN_CLUSTERS:
        problem = (
            f"its {size.n:,} cases weigh as much as {size.effective_clusters:.0f} clusters of equal size, and a "
            f"loss is bounded from {MIN_CLUSTERS} on; add cases in clusters of their own"
        )
        return PlanRow(metric, bucket, tolerance, size.n, None, source, None, None, None, minutes, problem)
    if definition.estimator != "proportion":
        return _plan_spread(metric, bucket, tolerance, definition, size, seen, minutes, source, alpha)
    has_flips = seen is not None and seen.b is not None and seen.c is not None
    flips = ((seen.b or 0) + (seen.c or 0)) / seen.n if seen is not None and has_flips else ASSUMED_FLIPS
    alike = size.n / size.effective_clusters
    deff = seen.design_effect if seen else alike  # without a run, cases of a cluster are taken to flip together
    least = _bound(0.0, alike, size, 1.0, alpha)  # without a flip nothing shows how cases hang together
    needed = _count_needed(flips, deff, size, tolerance, alpha)
    problem = (
        ""
        if least <= tolerance
        else (
            f"{size.n:,} cases in {size.effective_clusters:,.0f} effective clusters can't prove it whatever the "
            f"candidate: without a single flip the loss may be {format_harm(metric, least)}"
            + (f"; {needed:,} cases would at {100 * flips:.1f} % of flips, or" if needed else ";")
            + " widen the tolerance"
        )
    )
    provable, power = _bound(flips, deff, size, 1.0, alpha), _find_power(flips, deff, size, tolerance, alpha)
    return PlanRow(
        metric, bucket, tolerance, size.n, flips, source, least, provable, needed, minutes, problem, power=power
    )


def _plan_spread(
    metric: str,
    bucket: str | None,
    tolerance: float,
    definition: MetricDefinition,
    size: SuiteSize,
    seen: Comparison | None,
    minutes: float | None,
    source: str,
    alpha: float,
) -> PlanRow:
    """Plan a metric that is no rate: its bound is as far from what is seen as in the last run."""
    if seen is None:
        return PlanRow(metric, bucket, tolerance, size.n, None, "needs a run", None, None, None, minutes, "")
    least = _bound_unchanged(definition, size, seen, alpha)
    high, harm, limit, room = (
        math.log1p(x) if definition.harm == "relative" else x for x in (seen.high, seen.harm, tolerance, least or 0.0)
    )
    reach = high - harm
    if least is not None and reach <= room * _ALIKE:  # it is all room for what no case showed
        provable, power, growth = least, float(least <= tolerance), least / tolerance
    else:
        error = reach / _normal(1 - alpha)
        proven = reach + _normal(POWER) * error
        provable = math.expm1(proven) if definition.harm == "relative" else proven
        power, growth = float(ndtr((limit - reach) / error)) if error else 1.0, (proven / limit) ** 2
    needed = math.ceil(size.n * max(MIN_CLUSTERS / size.effective_clusters, growth, (least or 0.0) / tolerance))
    of = "images" if definition.estimator == "average_precision" else "documents"
    problem = (
        ""
        if least is None or least <= tolerance
        else (
            f"{size.n:,} {of} don't prove it, by the {source}: without any change the loss may be "
            f"{format_harm(metric, least)}; {needed:,} {of} like these would, or widen the tolerance"
        )
    )
    return PlanRow(
        metric,
        bucket,
        tolerance,
        size.n,
        None,
        source,
        least,
        provable,
        needed,
        minutes,
        problem,
        power=power,
        is_sure=False,
    )


def _bound_unchanged(definition: MetricDefinition, size: SuiteSize, seen: Comparison, alpha: float) -> float | None:
    """Return the upper bound of the loss where nothing changes; None for means, which leave no room for the unseen.

    Images count by their objects, as they did in the last run. Of a perplexity any document might lose its whole loss
    once more (`scales.find_document_room`).
    """
    count = seen.effective_clusters * size.n / seen.n
    if definition.estimator == "average_precision":
        return bootstrap_bounds(np.zeros(3), count, lost=seen.reference, gained=0.0, confidence=1 - alpha).high
    if definition.estimator != "ratio":
        return None
    unseen = bound_unseen(size.n, count, confidence=1 - alpha)
    if definition.harm == "relative":
        return math.expm1(unseen * abs(math.log(seen.reference)))
    return unseen * abs(seen.reference)


def _bound(flips: float, deff: float, size: SuiteSize, factor: float, alpha: float, *, normal: float = 0.0) -> float:
    """Return the tolerance that `factor` times as many cases prove for a candidate that loses nothing.

    Args:
        flips: share of the cases.
        deff: design effect.
        size: of the suite.
        factor: that it grows by.
        alpha: of the bound.
        normal: how many standard deviations more losses than gains chance gives; 0: what it exceeds one time in five.
    """
    n, count = size.n * factor, size.effective_clusters * factor
    spread = _guess_spread(flips * n, deff, n, count)
    error = math.sqrt(spread.variance if spread else flips * n)
    by_chance = (normal or _normal(POWER)) * error
    by_chance = max(-flips * n, min(by_chance, flips * n))
    b, c = (flips * n + by_chance) / 2, (flips * n - by_chance) / 2
    return count_bounds(b, c, n, count, spread, confidence=1 - alpha).high


def _guess_spread(flips: float, deff: float, n: float, count: float) -> Spread | None:
    """Return the spread of b - c by cluster that so many flips have at a design effect, as `design_effect` has it."""
    if count >= n:
        return None
    size = n / count
    return Spread(max(deff * (flips + size / 2) - size**2 / 2, flips))


def _find_power(flips: float, deff: float, size: SuiteSize, tolerance: float, alpha: float) -> float:
    """Return the chance that a candidate without a loss is proven: the more chance adds to its harm, the less."""
    low, high = -8.0, 8.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        is_proven = _bound(flips, deff, size, 1.0, alpha, normal=middle) <= tolerance
        low, high = (middle, high) if is_proven else (low, middle)
    return float(ndtr(low))


def _count_needed(flips: float, deff: float, size: SuiteSize, tolerance: float, alpha: float) -> int | None:
    low, high = 1.0 / size.n, float(_MOST)
    if _bound(flips, deff, size, high, alpha) > tolerance:
        return None
    low = max(low, MIN_CLUSTERS / size.effective_clusters)
    while (high - low) * size.n > 0.5:
        middle = (low + high) / 2
        low, high = (low, middle) if _bound(flips, deff, size, middle, alpha) <= tolerance else (middle, high)
    return math.ceil(size.n * high)


def _normal(probability: float) -> float:
    return float(ndtri(probability))


def check_plan(product: Product, rows: Sequence[PlanRow]) -> list[str]:
    """Return a warning for each tolerance that can't be proven and need not be, or could be by another reference.

    Raises:
        SizeError: one must be proven, so that no candidate could ever pass.
    """
    if needed := list_impossible([row for row in rows if row.is_needed and row.is_sure]):
        raise SizeError(product.locate(needed[0]))
    return list_impossible(rows)


def list_impossible(rows: Sequence[PlanRow]) -> list[str]:
    """Return a line for each tolerance that can't be proven, as far as is known."""
    return [
        f"gate.tolerances.{row.metric}{'.overall' if row.bucket is None else f'.buckets.{row.bucket}'}: "
        f"{format_tolerance(row.metric, row.tolerance)}: {row.problem}"
        for row in rows
        if row.problem
    ]


def render_plan(rows: Sequence[PlanRow]) -> str:
    """Write the plan as a table for a terminal."""
    head = ["metric", "n", "flips expected", "can prove", "tolerance", "cases in all", "min a candidate", "from"]
    table = [head] + [_render_row(row) for row in rows]
    problems = [
        f"{'impossible' if row.is_sure else 'unlikely'}{'' if row.is_needed else ', and stops no release'}: {problem}"
        for row in rows
        for problem in list_impossible([row])
    ]
    assumed = [_ASSUMED] if any(row.source.startswith(_GUESS) and row.flips is not None for row in rows) else []
    return "\n".join([*align_columns(table), *assumed, _LEGEND, *problems, *_describe_release(rows)])


def align_columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines: the first and last column aligned at the left, numbers between at the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            f"{cell:<{w}}" if i in (0, len(widths) - 1) else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in table
    ]


def _describe_release(rows: Sequence[PlanRow]) -> list[str]:
    """Say how often a release without a loss would pass: it must pass in every metric, so each takes its share."""
    needed = [row for row in rows if row.is_needed and row.power is not None]
    if not needed:
        return []
    unknown = sum(row.is_needed and row.power is None for row in rows)
    total = f"{len(needed)} of the {len(needed) + unknown}" if unknown else f"all {len(needed)}"
    others = ", and nobody knows of the others before a run" if unknown else ""
    weakest = min(needed, key=lambda row: row.power or 0.0)
    chance = math.prod(row.power or 0.0 for row in needed)
    said = (
        f"release: a candidate without a loss passes {total} that must be proven {100 * chance:.0f} % of the time, "
        f"if they were independent{others}; alone the weakest, {name_metric(weakest.metric, weakest.bucket)}, passes "
        f"{100 * (weakest.power or 0.0):.0f} %"
    )
    if chance >= POWER:
        return [said]
    return [
        f"{said}. What helps: more cases, a wider tolerance, evals that ask one thing as one pool, or tier: "
        "supporting for what need not be proven"
    ]


def _render_row(row: PlanRow) -> list[str]:
    return [
        name_metric(row.metric, row.bucket),
        "?" if row.n is None else f"{row.n:,}",
        "–" if row.flips is None else f"{100 * row.flips:.1f} %",
        "?" if row.provable is None else format_harm(row.metric, row.provable),
        format_tolerance(row.metric, row.tolerance),
        "?" if row.needed is None and row.flips is None else "never" if row.needed is None else f"{row.needed:,}",
        "?" if row.minutes is None else f"{row.minutes:.1f}",
        row.source,
    ]
