"""Saturated, clipped and black pixels against counts by hand."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.errors import NumericsError
from pipeline.numerics.saturation import (
    black_pixel_fraction,
    clipped_pixel_fraction,
    guided_std_ratio,
    is_black,
    saturated_pixel_fraction,
    to_unit_range,
)


def test_a_pixel_is_saturated_by_any_one_channel() -> None:
    images = torch.full((2, 3, 4, 5), 0.5)
    images[0, 1, 0, 0] = 0.98
    images[0, 2, 0, 0] = 1.0  # the same pixel counts once
    images[0, 0, 3, 4] = 0.971
    images[1, 0, 0, 0] = 0.96
    assert saturated_pixel_fraction(images).tolist() == [2 / 20, 0]


def test_the_threshold_itself_is_not_saturated() -> None:
    assert saturated_pixel_fraction(torch.full((1, 3, 2, 2), 0.75), threshold=0.75).item() == 0


def test_the_clamp_changes_what_is_clipped_but_not_what_is_saturated() -> None:
    decoded = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    raw = to_unit_range(decoded)
    assert saturated_pixel_fraction(raw).equal(saturated_pixel_fraction(raw.clamp(0, 1)))
    expected = (raw != raw.clamp(0, 1)).any(dim=1).double().mean(dim=(1, 2))
    assert clipped_pixel_fraction(raw).equal(expected)
    assert expected.min() > 0.3
    assert clipped_pixel_fraction(raw.clamp(0, 1)).tolist() == [0, 0, 0]


def test_nan_is_black_and_never_unsaturated() -> None:
    images = torch.full((4, 3, 10, 10), 0.5)
    images[1] = math.nan
    images[2] = 0.004
    images[3, :, :5] = 0
    assert black_pixel_fraction(images).tolist() == [0, 1, 1, 0.5]
    assert is_black(images).tolist() == [False, True, True, False]
    with pytest.raises(NumericsError, match="the first is number 1"):
        saturated_pixel_fraction(images)


def test_a_dark_colour_is_not_black() -> None:
    images = torch.zeros(1, 3, 4, 4)
    images[:, 2] = 0.1
    assert not is_black(images).item()


def test_the_ratio_is_that_of_the_deviations_of_each_sample() -> None:
    conditional = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    factors = torch.tensor([1.4, 0.5]).view(-1, 1, 1, 1)
    assert guided_std_ratio(conditional * factors + 3, conditional).tolist() == pytest.approx([1.4, 0.5], rel=1e-6)
    assert guided_std_ratio(conditional, conditional).tolist() == [1, 1]


def test_a_constant_prediction_has_no_ratio() -> None:
    with pytest.raises(NumericsError, match="constant sample"):
        guided_std_ratio(torch.rand(1, 4, 2, 2), torch.ones(1, 4, 2, 2))


@pytest.mark.parametrize("images", [torch.zeros(3, 4, 4), torch.zeros(1, 3, 4, 4, dtype=torch.uint8)])
def test_what_is_no_batch_of_floats_is_refused(images: torch.Tensor) -> None:
    with pytest.raises(NumericsError, match="expected floats of shape"):
        saturated_pixel_fraction(images)
