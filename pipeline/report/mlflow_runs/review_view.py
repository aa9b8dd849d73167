"""The view that a review opens: verdict, worst loss, headline and size as columns of the list, and as first charts.

MLflow's own list shows none of them, and its charts are in the order of the alphabet. The names are MLflow's.
"""

from __future__ import annotations

from typing import Any

REVIEW = "review"  # key of the saved view
WORST = "gate/worst_loss_over_tolerance"
GATE, SIZE = "gate", "mib"  # parameters of a run
_MAX_BARS = 20  # runs of a chart


def build_review(headline: str) -> dict[str, Any]:
    """Return the saved view in the words of MLflow's page.

    Args:
        headline: the metric that is logged first.
    """
    section = {
        "uuid": REVIEW,
        "name": "verdict",
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
        "columns": 2,
    }
    return {
        "selectedColumns": [
            f"params.`{GATE}`",
            f"metrics.`{WORST}`",
            f"metrics.`{headline}`",
            f"params.`{SIZE}`",
            "attributes.`Description`",
        ],
        "compareRunCharts": [_build_bars(metric) for metric in (WORST, headline)],
        "compareRunSections": [section],
        "isAccordionReordered": True,
    }


def _build_bars(metric: str) -> dict[str, Any]:
    return {
        "type": "BAR",
        "uuid": f"{REVIEW} {metric}",
        "metricSectionId": REVIEW,
        "runsCountToCompare": _MAX_BARS,
        "deleted": False,
        "isGenerated": False,
        "metricKey": metric,
    }
