"""Channels-last is measured on what the shipped pipeline feeds its parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.products.images.layout import Part, measure_layout
from pipeline.products.images.rendering import Prompt, load_pipeline
from pipeline.records.serving import PipelineServing

FOLDER = Path(__file__).resolve().parents[2] / "models/product-shots"


@pytest.mark.parametrize("part", ["unet", "vae"])
def test_both_formats_give_the_same_output_and_the_pipeline_keeps_its_own(part: Part) -> None:
    serving = PipelineServing(num_inference_steps=2, guidance_scale=5.0)
    pipe = load_pipeline(FOLDER, serving)
    found = measure_layout(pipe, part, [Prompt("a red mug on a white table", 0)], serving, rounds=6)
    assert 0 <= found.difference <= found.tolerance
    assert found.ratio.low > 0 and found.decision in ("keep", "leave off")
    weights = [weight for weight in getattr(pipe, part).parameters() if weight.ndim == 4]
    assert all(weight.is_contiguous() for weight in weights)
    assert torch.get_num_threads() == serving.num_threads
