"""The models that the GPU benchmark builds from numbers are SDXL's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.sdxl_models import UNET_CONFIG, VAE_CONFIG


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("UNet2DConditionModel", UNET_CONFIG, 2_567_463_684),  # of stabilityai/stable-diffusion-xl-base-1.0
        ("AutoencoderKL", VAE_CONFIG, 83_653_863),
    ],
)
def test_the_shapes_have_as_many_parameters_as_the_release(name: str, config: dict[str, Any], expected: int) -> None:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        model = getattr(diffusers, name)(**config)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
