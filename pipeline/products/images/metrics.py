"""The metrics of each eval of drawn images.

Likeness is no candidate's own: it is measured between its picture and the reference's of the same prompt and seed, when
both are drawn (`likeness.py`). So records hold no score of it until both sides are paired.
"""

from __future__ import annotations

from pipeline.settings.metrics import SEAM_STEP_LEVELS, MetricDefinition

LIKENESS_SCORE = "reference_ssim"
LIKENESS = MetricDefinition("reference_ssim", "mean", LIKENESS_SCORE, "higher", "")

IMAGES = (
    MetricDefinition("sound_image_rate", "proportion", "sound", "higher", "", is_validity=True),
    MetricDefinition("oversaturated_image_rate", "proportion", "oversaturated", "lower", "", is_validity=True),
    MetricDefinition("saturated_pixel_fraction", "mean", "saturated", "lower", ""),
    MetricDefinition("clipped_pixel_fraction", "mean", "clipped", "lower", ""),
    MetricDefinition("clip_similarity", "mean", "clip", "higher", ""),
    MetricDefinition("decode_ssim", "mean", "ssim", "higher", ""),
    MetricDefinition("decode_psnr_db", "mean", "psnr_db", "higher", "dB"),
    SEAM_STEP_LEVELS,
    MetricDefinition("guided_std_ratio", "mean", "std_ratio", "lower", ""),
    LIKENESS,
)
