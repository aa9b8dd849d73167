"""Measure average precision of paired detectors, overall, by area and by bucket of images.

Buckets are of two kinds. Those of the case records hold images ("night"), and AP is that of these images alone.
Those of the match table hold objects, by area or by category; small, medium and large are metrics of their own, and an
area or category that the product names is a bucket of ap, ap_50 and ap_75. One without any object is refused by name.

The harm is AP(reference) - AP(candidate). Its bounds come from the paired bootstrap over clusters of images
(`resampling.py`), with half an image added that loses everything; its p-value comes from the sign-flip test of what
each image adds to the loss (`influence.py`). The evidence is weighed by effective clusters: images count
by the share of AP that their objects carry, so 300 images of which 12 hold a small object are 12 for `ap_small`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EvidenceError
from pipeline.gate.clusters import effective_clusters, sum_by_cluster
from pipeline.gate.decision import Measurement
from pipeline.gate.influence import harm_by_image, share_of_objects
from pipeline.gate.outlook import cases_to_bound
from pipeline.gate.pairing import PairedCases, select_bucket
from pipeline.gate.resampling import bootstrap_bounds, draw_weights, number_by_first
from pipeline.gate.statistics import sign_flip_tail, tail_at
from pipeline.gate.table_cache import keep_by_table
from pipeline.gate.wording import format_value, name_metric
from pipeline.numerics.average_precision import average_precision, mean_over_classes
from pipeline.records.detections import IOU_THRESHOLDS, MatchTable
from pipeline.records.evaluations import CaseRecord
from pipeline.records.verdicts import JudgedTier, Metric
from pipeline.settings.metrics import AREAS, MetricDefinition

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def list_object_buckets(table: MatchTable, definition: MetricDefinition) -> list[str]:
    """Return the buckets of objects that a metric has: areas and categories of the product, where it covers all."""
    areas = [name for name in table.areas if name not in AREAS]
    return [*areas, *table.categories] if definition.area == "all" else []


def estimate_precision(
    records: Sequence[CaseRecord],
    table: MatchTable,
    definition: MetricDefinition,
    clusters: Ints,
    *,
    eval_name: str,
    buckets: Sequence[str],
) -> list[Metric]:
    """Return one detector's AP, overall and per bucket, each with its 95 % interval; an empty bucket has none.

    Args:
        buckets: of images, that the records carry.
    """
    metrics, name = [], f"{eval_name}/{definition.name}"
    for bucket in [None, *buckets, *list_object_buckets(table, definition)]:
        area, positions = _locate(records, table, definition, bucket)
        part = _select(table, tuple(positions), bucket)
        if part.num_objects[:, :, area].any():
            value, low, high = _interval(part, definition, area, number_by_first(clusters[positions]))
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


def _interval(
    table: MatchTable, definition: MetricDefinition, area: int, clusters: Ints
) -> tuple[float, float | None, float | None]:
    draws = _pick(_resample(table, tuple(clusters)), definition, area)
    count, value = effective_clusters(share_of_objects(table)[:, area], clusters), float(draws[0])
    if count < 2:
        return value, None, None
    bounds = bootstrap_bounds(draws, count, lost=1 - value, gained=value, confidence=0.975)
    return value, max(0.0, bounds.low), min(1.0, bounds.high)


def measure_precision(
    pairs: PairedCases,
    definition: MetricDefinition,
    bucket: str | None,
    *,
    eval_name: str,
    tolerance: float | None,
    alpha: float,
    tier: JudgedTier = "critical",
) -> Measurement:
    """Measure one AP of a candidate against the reference in one bucket.

    Raises:
        EvidenceError: the bucket holds no image or no object, the two sides did unequal work, there are too few
            clusters, or the reference finds so little that a loss above the tolerance can't show.
    """
    metric = f"{eval_name}/{definition.name}"
    name = name_metric(metric, bucket)
    whole = _check_sides(pairs, name)
    area, positions = _locate(pairs.reference, whole[0], definition, bucket)
    reference, candidate = (_select(table, tuple(positions), bucket) for table in whole)
    _check_filled(reference, area, name)
    clusters, shares = number_by_first(pairs.clusters[positions]), share_of_objects(reference)[:, area]
    count = effective_clusters(shares, clusters)
    ours, theirs = (_pick(_resample(table, tuple(clusters)), definition, area) for table in (reference, candidate))
    value, other = float(ours[0]), float(theirs[0])
    _check_loss_can_show(name, metric, value, tolerance)
    try:
        bound = partial(bootstrap_bounds, ours - theirs, count, lost=value, gained=other, confidence=1 - alpha)
        bounds = bound()
    except ValueError as error:
        raise EvidenceError(f"{name}: can't be compared: {error}") from None
    parts = _pick(_influence(reference, candidate), definition, area)
    sums, weights = (
        sum_by_cluster(values, pairs.clusters[positions], int(pairs.clusters.max()) + 1) for values in (parts, shares)
    )
    tail = sign_flip_tail(sums)
    return Measurement(
        metric=metric,
        bucket=bucket,
        reference=value,
        candidate=other,
        unit=definition.unit,
        n=len(positions),
        num_clusters=len(np.unique(clusters[shares > 0])),
        effective_clusters=count,
        b=None,
        c=None,
        harm=bounds.harm,
        low=bounds.low,
        high=bounds.high,
        p=tail_at(tail, sums.sum()),
        p_gain=tail_at(tail, -sums.sum()),
        tolerance=tolerance,
        tier=tier,
        more_cases=(
            cases_to_bound(lambda growth: bound(growth=growth).high, tolerance, len(positions))
            if tolerance is not None and bounds.harm < tolerance < bounds.high
            else None
        ),
        sums=sums,
        weights=weights,
        tail=tail,
    )


def _check_loss_can_show(name: str, metric: str, reference: float, tolerance: float | None) -> None:
    if tolerance is not None and reference <= tolerance:
        seen = "" if reference else "no box of it fits an annotation: "
        raise EvidenceError(
            f"{name}: the reference has {format_value(metric, reference)}, so a loss above the "
            f"tolerance of {tolerance:g} can't show; {seen}look at what the adapter returns, and at the "
            "evalset; boxes are left, top, width and height in pixels, category_id is the annotations', and scores are "
            "finite"
        )


def _locate(
    records: Sequence[CaseRecord], table: MatchTable, definition: MetricDefinition, bucket: str | None
) -> tuple[int, Ints]:
    """Return the column of the metric's area in the table, and the images that it is computed on."""
    names = list(table.areas)
    if bucket not in list_object_buckets(table, definition):
        return names.index(definition.area), select_bucket(records, bucket)
    return names.index(definition.area if bucket in table.categories else bucket), np.arange(len(records))


def _check_sides(pairs: PairedCases, name: str) -> tuple[MatchTable, MatchTable]:
    if pairs.tables is None:
        raise EvidenceError(f"{name}: expected matched detections beside the records, found none; run `dvc repro`")
    ours, theirs = pairs.tables
    sides = [(table.areas, table.categories, table.num_objects.shape) for table in (ours, theirs)]
    if sides[0] != sides[1]:
        raise EvidenceError(
            f"{name}: reference and candidate were matched in other areas or categories "
            f"({sides[0]!r} and {sides[1]!r}); run `dvc repro`"
        )
    differs = (ours.num_objects != theirs.num_objects).any(axis=(1, 2))
    for i in np.flatnonzero(differs)[:1].tolist():
        raise EvidenceError(
            f"{name}: unequal work: the objects of case {pairs.reference[i].case_id!r} differ between "
            "reference and candidate"
        )
    return ours, theirs


def _check_filled(table: MatchTable, area: int, name: str) -> None:
    if table.num_images == 0:
        raise EvidenceError(f"{name}: the bucket is empty; no case carries it")
    if not table.num_objects[:, :, area].any():
        low, high = list(table.areas.values())[area]
        raise EvidenceError(
            f"{name}: the bucket is empty; no such object on {table.num_images} images has an area of "
            f"{low:g} to {high:g} square pixels"
        )


def _pick(values: Floats, definition: MetricDefinition, area: int) -> Floats:
    """Return the metric [...] from values [..., num_areas, num_thresholds]."""
    chosen = values[..., area, :]
    if definition.iou is None:
        return np.asarray(chosen.mean(axis=-1))
    return np.asarray(chosen[..., int(np.abs(IOU_THRESHOLDS - definition.iou).argmin())])


@keep_by_table  # what is made of a table is found again by the very object
def _select(table: MatchTable, positions: tuple[int, ...], bucket: str | None) -> MatchTable:
    if bucket in table.categories:
        return _pick_class(table, table.categories[bucket])
    if positions == tuple(range(table.num_images)):
        return table
    return replace(table.at(np.array(positions, dtype=np.int64)), categories={})  # it is a bucket, and has none


@keep_by_table
def _pick_class(table: MatchTable, number: int) -> MatchTable:
    return table.of_class(number)


@keep_by_table
def _resample(table: MatchTable, clusters: tuple[int, ...]) -> Floats:
    """Return AP [resamples, areas, thresholds]; that of a table with buckets by class is made of theirs."""
    if not table.categories:
        return average_precision(table, _draw(clusters))
    numbers = range(table.num_objects.shape[1])
    return mean_over_classes(_resample(_pick_class(table, number), clusters) for number in numbers)


@lru_cache(maxsize=4)  # every category is resampled alike
def _draw(clusters: tuple[int, ...]) -> Floats:
    return draw_weights(np.array(clusters))


@lru_cache(maxsize=128)
def _influence(reference: MatchTable, candidate: MatchTable) -> Floats:
    return harm_by_image(reference, candidate)
