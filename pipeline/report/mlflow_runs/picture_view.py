"""The view of all pictures side by side in MLflow, whose image grid has a row a key and a column a run.

MLflow's own charts have one key each and little room, so a saved view comes along that has them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.report.pictures.shown import Shown

SECTION = "images"  # of the charts
VIEW = "images-side-by-side"  # key of the saved view
COLUMN = "quantgate.column"  # tag of a run that the view sorts by
_MAX_COLUMNS = 10  # that MLflow's image grid shows, those listed first
_ROW_HEIGHT, _MARGINS = 170, 120  # pixels


def order_columns(names: Sequence[str]) -> dict[str, str]:
    """Return what the list of runs has to be sorted by for the image grid to show these runs in this order.

    The grid takes the first ten runs of the list and shows them from the last to the first.
    """
    return {name: f"{_MAX_COLUMNS - 1 - i if i < _MAX_COLUMNS else i:04}" for i, name in enumerate(names)}


def build_view(runs: Sequence[Sequence[Shown]]) -> dict[str, Any]:
    """Return the saved view in the words of MLflow's page: one grid of all images, above the other charts.

    Args:
        runs: the images of each run.
    """
    keys = sorted({image.key for shown in runs for image in shown})
    grid = {
        "type": "IMAGE",
        "uuid": VIEW,
        "metricSectionId": VIEW,
        "runsCountToCompare": _MAX_COLUMNS,
        "deleted": False,
        "isGenerated": False,
        "imageKeys": keys,
        "step": 0,
        "showRunParams": False,
    }
    section = {
        "uuid": VIEW,
        "name": "images side by side",
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
        "columns": 1,
        "cardHeight": _ROW_HEIGHT * len(keys) + _MARGINS,
    }
    return {
        "compareRunCharts": [grid],
        "compareRunSections": [section],
        "isAccordionReordered": True,
        "runListHidden": True,
        "orderByKey": f"tags.`{COLUMN}`",
        "orderByAsc": True,
    }
