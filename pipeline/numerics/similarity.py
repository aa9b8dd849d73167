"""How close two images are: PSNR and SSIM, one number per image.

Both compare with a reference: the float32 decode of the same latents, or the picture of the same prompt and seed. So
they see what a change did to the image, not whether the image is good. Learned similarities (CLIP, LPIPS) are not
covered.
Everything is computed in float64: SSIM takes small differences of large squares.
"""

from __future__ import annotations

import torch

from pipeline.errors import NumericsError
from pipeline.numerics.images import check_images, check_same_shape

_WINDOW = 11  # pixels a side; with sigma, K1 and K2 as in the paper
_SIGMA = 1.5
_K1, _K2 = 0.01, 0.03


def peak_signal_to_noise_db(images: torch.Tensor, reference: torch.Tensor, *, data_range: float = 1.0) -> torch.Tensor:
    """Return the peak signal-to-noise ratio of each image in decibel; infinite where nothing differs.

    Args:
        images: shape (n, channels, height, width).
        reference: the same shape.
        data_range: largest less smallest possible value: 1 for [0, 1].

    Returns:
        float64 of shape (n,), over all channels and pixels of an image.

    Raises:
        NumericsError: shapes differ, or a value is not finite.
    """
    _check_pair(images, reference, "PSNR")
    error = (images.double() - reference.double()).square().mean(dim=(1, 2, 3))
    return 10 * torch.log10(data_range**2 / error)


def structural_similarity(images: torch.Tensor, reference: torch.Tensor, *, data_range: float = 1.0) -> torch.Tensor:
    """Return the mean structural similarity of each image, at most 1.

    Each channel is compared by itself under an 11x11 Gaussian window, only where the window lies wholly
    inside the image, and the map is averaged over pixels and channels.

    Args:
        images: shape (n, channels, height, width), at least 11 pixels a side.
        reference: the same shape.
        data_range: largest less smallest possible value: 1 for [0, 1].

    Returns:
        float64 of shape (n,).

    Raises:
        NumericsError: shapes differ, images are smaller than the window, or a value is not finite.

    Reference: Wang, Bovik, Sheikh and Simoncelli, IEEE TIP 13(4):600-612 (2004), eq. 13 to 17. The paper
    works on grey images; the mean over channels is ours.
    """
    _check_pair(images, reference, "SSIM")
    if min(images.shape[-2:]) < _WINDOW:
        raise NumericsError(
            f"SSIM: expected images of at least {_WINDOW} pixels a side, got "
            f"{tuple(images.shape[-2:])}; decode larger latents"
        )
    x, y = images.double(), reference.double()
    mean_x, mean_y = _blur(x), _blur(y)
    variance_x, variance_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
    covariance = _blur(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * data_range) ** 2, (_K2 * data_range) ** 2
    similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return (similarity / ((mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2))).mean(dim=(1, 2, 3))


def _blur(images: torch.Tensor) -> torch.Tensor:
    """Average under the Gaussian window, as two passes of one dimension each.

    Sums of shifted images: in float64 torch's convolution takes six times as long on a CPU.
    """
    offsets = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    weights = torch.exp(-(offsets**2) / (2 * _SIGMA**2))
    first, *others = (weights / weights.sum()).tolist()
    for dim in (2, 3):
        size = images.shape[dim] - _WINDOW + 1
        total = first * images.narrow(dim, 0, size)
        for i, weight in enumerate(others, start=1):
            total.add_(images.narrow(dim, i, size), alpha=weight)
        images = total
    return images


def _check_pair(images: torch.Tensor, reference: torch.Tensor, what: str) -> None:
    check_images(images, f"{what} of images")
    check_images(reference, f"{what} of the reference")
    check_same_shape(images, reference, what)
