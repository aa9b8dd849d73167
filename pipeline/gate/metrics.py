"""The metrics that each kind of eval gives, and how a metric follows from case scores.

A metric is declared once, here: which score of a CaseRecord it averages, over what, which
direction is better and on which scale a tolerance is read. Torch-free, so the gate and the
settings can both read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
        area: of the objects that an average precision covers, a key of `detection_params.AREAS`.
        iou: threshold of an average precision; None is the mean over COCO's ten.
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

    @property
    def sign(self) -> float:
        """1 where a higher score is better, -1 where a lower one is: reference less candidate times this is harm."""
        return 1.0 if self.better == "higher" else -1.0

    @property
    def is_share(self) -> bool:
        """Whether a loss of 1 is a loss of everything, whoever made the scores."""
        return self.estimator in ("proportion", "average_precision") or self.harm == "relative"


_DIVERGENCE = (
    MetricDefinition(
        "kl_nats_per_token", "ratio", "kl_nats", "lower", "nat/token", weight="num_tokens", is_gated=False
    ),
    MetricDefinition("top1_change_rate", "ratio", "num_top1_changes", "lower", "", weight="num_tokens", is_gated=False),
)
_FIRST_DIVERGENCE = (MetricDefinition("output_divergence_rate", "proportion", "diverged", "lower", "", is_gated=False),)

_FINITE = MetricDefinition("finite_output_rate", "proportion", "finite", "higher", "")
_SEAMS = MetricDefinition("seam_step_levels", "mean", "seam_levels", "lower", "levels")
_PRECISION = tuple(
    MetricDefinition(name, "average_precision", score, "higher", "", weight=weight, area=area, iou=iou)
    for name, score, weight, area, iou in (
        ("ap", "found", "objects", "all", None),
        ("ap_50", "found_50", "objects", "all", 0.5),
        ("ap_75", "found_75", "objects", "all", 0.75),
        *((f"ap_{area}", f"found_{area}", f"objects_{area}", area, None) for area in ("small", "medium", "large")),
    )
)

METRICS_BY_EVAL_KIND: dict[str, tuple[MetricDefinition, ...]] = {
    "perplexity": (
        MetricDefinition(
            "perplexity_per_token", "ratio", "nll_nats", "lower", "", harm="relative", weight="num_tokens"
        ),
        MetricDefinition("bits_per_byte", "ratio", "nll_bits", "lower", "bit/byte", weight="num_bytes"),
        *_DIVERGENCE,
    ),
    "harness": (MetricDefinition("accuracy", "proportion", "accuracy", "higher", ""),),
    "tool_calls": (
        MetricDefinition("tool_call_exact_match", "proportion", "exact", "higher", ""),
        MetricDefinition("tool_call_accepted_rate", "proportion", "accepted", "higher", ""),
        *_FIRST_DIVERGENCE,
    ),
    "trajectories": (
        MetricDefinition("task_completion_rate", "proportion", "completed", "higher", ""),
        *_FIRST_DIVERGENCE,
    ),
    "images": (
        MetricDefinition("sound_image_rate", "proportion", "sound", "higher", ""),
        MetricDefinition("oversaturated_image_rate", "proportion", "oversaturated", "lower", ""),
        MetricDefinition("saturated_pixel_fraction", "mean", "saturated", "lower", ""),
        MetricDefinition("clipped_pixel_fraction", "mean", "clipped", "lower", ""),
        MetricDefinition("clip_similarity", "mean", "clip", "higher", ""),
        MetricDefinition("decode_ssim", "mean", "ssim", "higher", ""),
        MetricDefinition("decode_psnr_db", "mean", "psnr_db", "higher", "dB"),
        _SEAMS,
        MetricDefinition("guided_std_ratio", "mean", "std_ratio", "lower", ""),
    ),
    "detection": (*_PRECISION, _FINITE),
    "upscaling": (
        MetricDefinition("psnr_db", "mean", "psnr_db", "higher", "dB"),
        MetricDefinition("ssim", "mean", "ssim", "higher", ""),
        _SEAMS,
        _FINITE,
    ),
}

METRICS_BY_NAME: dict[str, MetricDefinition] = {
    metric.name: metric for metrics in METRICS_BY_EVAL_KIND.values() for metric in metrics
}
