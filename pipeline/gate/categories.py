"""The categories of a detector that nobody set a tolerance for, and detections of categories that do not exist.

AP is the mean over categories, so one of eighty that is lost altogether takes an eightieth of it. A category without a
tolerance of its own is *watched*: judged by that of AP, in Holm's family; it blocks where it fails, and what is not
proven of it blocks nothing, as forty objects prove no two points.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.gate.pairing import Evidence, PairedCases
from pipeline.gate.verdicts import WATCHED_METRIC
from pipeline.gate.wording import format_num
from pipeline.records.detections import UNKNOWN
from pipeline.settings.base import Tolerance

# clusters that hold a category: ten that all lose are p = 0.001, no chance even beside 50 other comparisons
MIN_CATEGORY_CLUSTERS = 10
_MAX_NAMED = 10


def list_watched(pairs: PairedCases, eval_name: str, tolerances: Mapping[str, Tolerance]) -> list[str]:
    """Return the categories that are judged by the tolerance of AP: without one that can stop a release, and in number.

    Args:
        pairs: of an eval.
        eval_name: its name.
        tolerances: by metric.
    """
    whole = tolerances.get(f"{eval_name}/{WATCHED_METRIC}")
    if whole is None or whole.overall is None:
        return []
    return [
        name for name, count in _count_clusters(pairs, eval_name, tolerances).items() if count >= MIN_CATEGORY_CLUSTERS
    ]


def name_unwatched(pairs: PairedCases, eval_name: str, tolerances: Mapping[str, Tolerance]) -> str | None:
    """Name the categories without a tolerance that too few clusters hold; None where there are none."""
    few = [
        name for name, count in _count_clusters(pairs, eval_name, tolerances).items() if count < MIN_CATEGORY_CLUSTERS
    ]
    if not few:
        return None
    listed = ", ".join(few[:_MAX_NAMED]) + (" ..." if len(few) > _MAX_NAMED else "")
    hold = f"not judged, as fewer than {MIN_CATEGORY_CLUSTERS} clusters hold"
    return f"{eval_name}: {format_num(len(few), f'category is {hold} it', f'categories are {hold} them')}: {listed}"


def _count_clusters(pairs: PairedCases, eval_name: str, tolerances: Mapping[str, Tolerance]) -> dict[str, int]:
    """Return how many clusters hold each category that has no tolerance of its own."""
    if pairs.tables is None:
        return {}
    gated = {
        bucket
        for metric, t in tolerances.items()
        if metric.startswith(f"{eval_name}/") and t.tier != "advisory"
        for bucket in t.buckets
    }
    table = pairs.tables[0]
    area = list(table.areas).index("all")
    return {
        name: len(np.unique(pairs.clusters[table.num_objects[:, number, area] > 0]))
        for name, number in table.categories.items()
        if name not in gated
    }


def check_categories(evidence: Evidence) -> list[str]:
    """Return the evals with detections of categories that their evalset does not have, one sentence each."""
    problems = []
    for eval_name, records in evidence.records.items():
        counts = [(int(r.scores.get(UNKNOWN, 0.0)), r.case_id) for r in records] if eval_name in evidence.tables else []
        if unknown := [(count, case_id) for count, case_id in counts if count]:
            problems.append(
                f"{eval_name}: {sum(count for count, _ in unknown):,} detections of {evidence.candidate.name} on "
                f"{len(unknown)} of {len(counts)} pictures, first {unknown[0][1]!r}, have a category_id that the "
                "evalset does not have; look for ids that are shifted (COCO's own have holes), or name the category in "
                "its card"
            )
    return problems
