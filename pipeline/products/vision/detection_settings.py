"""The settings of an eval of detectors: which boxes, and by which areas and categories of the objects they are judged.

Free of numpy, as all settings are. What needs the evalset is checked where that is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pipeline.products.vision.metrics import DETECTION
from pipeline.settings.base import Eval
from pipeline.settings.metrics import AREAS

AT_ONE_IOU = ("50", "75")  # end the names of scores at one threshold: no bucket may be called so

_Area = Annotated[float, Field(ge=0)]


class DetectionEval(Eval):
    """Boxes found on images, matched as COCO does and judged by average precision."""

    metrics = DETECTION
    may_tile: ClassVar[bool] = False  # a box may lie in two tiles
    keeps_arrays = True
    hub_task = "object-detection"
    kind: Literal["detection"]
    evalset: str
    # bucket -> smallest and largest area, beside COCO's: a bucket of ap, ap_50 and ap_75
    areas: dict[str, Annotated[list[_Area], Field(min_length=2, max_length=2)]] = {}
    # bucket -> category_id: a bucket of ap, ap_50 and ap_75, which are the mean over all categories
    categories: dict[str, Annotated[int, Field(ge=0)]] = {}

    @property
    def all_areas(self) -> dict[str, tuple[float, float]]:
        """COCO's buckets, then the product's own."""
        return AREAS | {name: (low, high) for name, (low, high) in self.areas.items()}


def name_categories(settings: DetectionEval, names: Mapping[str, int], present: Collection[int]) -> dict[str, int]:
    """Return bucket -> category_id of those that are compared: the settings', and of several all that are there.

    Args:
        settings: of the eval, whose names come first.
        names: name -> category_id, of the evalset's card.
        present: those of its objects. A single one is no part of the whole.
    """
    if len(present) < 2:
        return dict(settings.categories)
    by_number = {number: name for name, number in names.items()}
    rest = sorted(set(present) - set(settings.categories.values()))
    return settings.categories | {by_number.get(number, f"category {number}"): number for number in rest}


def find_bucket_problems(settings: DetectionEval) -> list[str]:
    """Return what is wrong with the areas and categories of an eval, one line each, starting with the key's path."""
    problems = [
        f"areas.{name}: expected another name than COCO's own ({', '.join(AREAS)}); rename it"
        for name in settings.areas
        if name in AREAS
    ]
    problems += [
        f"{section}.{name}: expected another name than those of scores at one IoU (50, 75); rename it"
        for section in ("areas", "categories")
        for name in getattr(settings, section)
        if name in AT_ONE_IOU
    ]
    problems += [
        f"areas.{name}: expected the smaller area first, got {list(bounds)!r}; swap them"
        for name, bounds in settings.areas.items()
        if bounds[0] >= bounds[1]
    ]
    problems += [
        f"categories.{name}: expected another name than an area's ({', '.join(settings.all_areas)}); rename it"
        for name in settings.categories
        if name in settings.all_areas
    ]
    named: dict[int, str] = {}
    for name, number in settings.categories.items():
        if named.setdefault(number, name) != name:
            problems.append(f"categories.{name}: category {number} is bucket {named[number]!r} already; remove one")
    return problems
