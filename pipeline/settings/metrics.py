"""What a metric is: which score of a case it averages, over what, which direction is better, and on which scale.

Each eval's settings declare theirs (`Eval.metrics`). Free of torch and numpy: settings and the gate both read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_LARGEST = 1e5**2
# COCO's, in square pixels, smallest and largest inclusive: an object of exactly 32^2 is both small and medium
AREAS = {"all": (0.0, _LARGEST), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, _LARGEST)}


@dataclass(frozen=True)
class MetricDefinition:
    """One metric.

    Attributes:
        name: the field's standard term, unit as suffix.
        estimator: "proportion" (0/1 scores), "mean" (real scores), "ratio" (sum of `score` over
            sum of `weight`, clustered by document) or "average_precision" (of the detections beside the records).
        score: key into CaseRecord.scores; of an average precision, what is shown of an image.
        weight: key of the denominator, for ratios and for what is shown.
        better: which direction is an improvement.
        harm: "absolute" (difference), or "relative" (exp of the ratio difference, minus 1).
        unit: printed beside the value.
        is_gated: False for tripwires, which are shown against a threshold and never decide.
        area: of the objects that an average precision covers, a key of `AREAS`.
        iou: threshold of an average precision; None is the mean over COCO's ten.
        is_validity: whether an output is one at all, as NaN or a black picture is not: a fact, whatever chance does.
        is_choice: whether it counts right choices among those that a case gives, so that guessing gets some.
    """

    name: str
    estimator: Literal["proportion", "mean", "ratio", "average_precision"]
    score: str
    better: Literal["higher", "lower"]
    unit: str
    harm: Literal["absolute", "relative"] = "absolute"
    weight: str | None = None
    is_gated: bool = True
    area: str = "all"
    iou: float | None = None
    is_validity: bool = False
    is_choice: bool = False

    @property
    def sign(self) -> float:
        """1 where a higher score is better, -1 where a lower one is: reference less candidate times this is harm."""
        return 1.0 if self.better == "higher" else -1.0

    @property
    def is_share(self) -> bool:
        """Whether a loss of 1 is a loss of everything, whoever made the scores."""
        return self.estimator in ("proportion", "average_precision") or self.harm == "relative"


SEAM_STEP_LEVELS = MetricDefinition("seam_step_levels", "mean", "seam_levels", "lower", "levels")
