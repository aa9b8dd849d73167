"""PSNR and SSIM against plain float64 loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeline.errors import NumericsError
from pipeline.numerics.similarity import peak_signal_to_noise_db, structural_similarity


def make_pair(n: int = 2, size: int = 15, noise: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = torch.rand(n, 3, size, size + 2, generator=generator)
    return (reference + noise * torch.randn(reference.shape, generator=generator)).clamp(0, 1), reference


def loop_similarity(x: np.ndarray, y: np.ndarray) -> float:
    """SSIM of one grey image, window by window, with two-dimensional weights and centred moments."""
    grid = np.arange(11) - 5.0
    weights = np.exp(-(grid[:, None] ** 2 + grid[None, :] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    values = []
    for i in range(x.shape[0] - 10):
        for j in range(x.shape[1] - 10):
            a, b = x[i : i + 11, j : j + 11], y[i : i + 11, j : j + 11]
            ma, mb = (weights * a).sum(), (weights * b).sum()
            va, vb = (weights * (a - ma) ** 2).sum(), (weights * (b - mb) ** 2).sum()
            cov = (weights * (a - ma) * (b - mb)).sum()
            values.append((2 * ma * mb + 1e-4) * (2 * cov + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4)))
    return float(np.mean(values))


def test_ssim_is_that_of_a_loop() -> None:
    images, reference = make_pair()
    expected = [
        np.mean([loop_similarity(x, y) for x, y in zip(i.double().numpy(), r.double().numpy(), strict=True)])
        for i, r in zip(images, reference, strict=True)
    ]
    assert structural_similarity(images, reference).tolist() == pytest.approx(expected, abs=1e-12)


def test_psnr_is_that_of_a_loop() -> None:
    images, reference = make_pair()
    for value, x, y in zip(peak_signal_to_noise_db(images, reference), images, reference, strict=True):
        pairs = zip(x.double().flatten().tolist(), y.double().flatten().tolist(), strict=True)
        errors = [(a - b) ** 2 for a, b in pairs]
        assert value.item() == pytest.approx(-10 * math.log10(sum(errors) / len(errors)))


def test_psnr_of_a_constant_difference_is_the_closed_form() -> None:
    reference = torch.full((1, 3, 4, 4), 0.5)
    assert peak_signal_to_noise_db(reference + 0.125, reference).item() == pytest.approx(20 * math.log10(8))
    grey = reference * 255
    assert peak_signal_to_noise_db(grey + 1, grey, data_range=255).item() == pytest.approx(48.1308)


def test_an_image_is_equal_to_itself() -> None:
    images, _ = make_pair()
    assert structural_similarity(images, images).tolist() == pytest.approx([1, 1], abs=1e-12)
    assert peak_signal_to_noise_db(images, images).tolist() == [math.inf, math.inf]


def test_one_bad_image_does_not_touch_the_others() -> None:
    images, reference = make_pair(n=3)
    alone = structural_similarity(images[:1], reference[:1])
    images[2] = 0
    together = structural_similarity(images, reference)
    assert together[0] == pytest.approx(alone.item(), abs=1e-12)
    assert together[2] < 0.1 < together[0]


@pytest.mark.parametrize("function", [peak_signal_to_noise_db, structural_similarity])
def test_nan_and_other_shapes_are_refused(function: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    images, reference = make_pair()
    with pytest.raises(NumericsError, match="one shape"):
        function(images[:1], reference)
    images[1, 0, 0, 0] = math.nan
    with pytest.raises(NumericsError, match="1 of 2 images, the first is number 1"):
        function(images, reference)


def test_an_image_smaller_than_the_window_is_refused() -> None:
    with pytest.raises(NumericsError, match="at least 11 pixels"):
        structural_similarity(torch.rand(1, 3, 10, 20), torch.rand(1, 3, 10, 20))
