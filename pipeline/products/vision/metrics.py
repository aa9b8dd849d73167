"""The metrics of each eval of networks: COCO's average precisions of boxes, the likeness of restored pictures."""

from __future__ import annotations

from pipeline.settings.metrics import SEAM_STEP_LEVELS, MetricDefinition

_FINITE = MetricDefinition("finite_output_rate", "proportion", "finite", "higher", "", is_validity=True)

DETECTION = (
    *(
        MetricDefinition(name, "average_precision", score, "higher", "", weight=weight, area=area, iou=iou)
        for name, score, weight, area, iou in (
            ("ap", "found", "objects", "all", None),
            ("ap_50", "found_50", "objects", "all", 0.5),
            ("ap_75", "found_75", "objects", "all", 0.75),
            *((f"ap_{area}", f"found_{area}", f"objects_{area}", area, None) for area in ("small", "medium", "large")),
        )
    ),
    _FINITE,
)
UPSCALING = (
    MetricDefinition("psnr_db", "mean", "psnr_db", "higher", "dB"),
    MetricDefinition("ssim", "mean", "ssim", "higher", ""),
    SEAM_STEP_LEVELS,
    _FINITE,
)
