"""Is an image blown out, clipped or black, and did guidance do it?

A guidance scale that is too high widens the prediction: colours run into the limit and highlights
burn. A decoder that overflowed gives NaN, which image writers turn into black without a word. Both
are read here from plain tensors. Which fraction is tolerable is not covered: that is for the gate.

Images are in [0, 1], or meant to be: `to_unit_range` maps a raw decode there without clamping. A
channel above 0.97 is above it with or without the clamp, so `saturated_pixel_fraction` is the same on
both; what the clamp hides is how much lay outside, which `clipped_pixel_fraction` shows of the raw one.
"""

from __future__ import annotations

import torch

from pipeline.errors import NumericsError
from pipeline.numerics.images import check_images, check_same_shape

SATURATION_THRESHOLD = 0.97  # of a channel in [0, 1]: 248 and above in 8 bits
BLACK_LEVEL = 2 / 255


def to_unit_range(decoded: torch.Tensor) -> torch.Tensor:
    """Map a raw decode, meant to lie in [-1, 1], to [0, 1] in float32 and leave what is beyond where it is."""
    return decoded.float() / 2 + 0.5


def saturated_pixel_fraction(images: torch.Tensor, *, threshold: float = SATURATION_THRESHOLD) -> torch.Tensor:
    """Return the fraction of each image's pixels with any channel above the threshold.

    Args:
        images: shape (n, channels, height, width), in [0, 1] or unclamped.
        threshold: a channel's limit, itself not saturated.

    Returns:
        float64 of shape (n,), each within [0, 1].

    Raises:
        NumericsError: not a batch of images, or NaN or infinity in it.
    """
    check_images(images, "saturated pixels")
    return (images > threshold).any(dim=1).double().mean(dim=(1, 2))


def clipped_pixel_fraction(unclamped: torch.Tensor) -> torch.Tensor:
    """Return the fraction of each image's pixels that a clamp to [0, 1] would change in any channel.

    Args:
        unclamped: shape (n, channels, height, width), from `to_unit_range`.

    Returns:
        float64 of shape (n,), each within [0, 1].

    Raises:
        NumericsError: not a batch of images, or NaN or infinity in it.
    """
    check_images(unclamped, "clipped pixels")
    return ((unclamped < 0) | (unclamped > 1)).any(dim=1).double().mean(dim=(1, 2))


def black_pixel_fraction(images: torch.Tensor, *, level: float = BLACK_LEVEL) -> torch.Tensor:
    """Return the fraction of each image's pixels that are shown black.

    NaN counts as black, because that is what it becomes in 8 bits; infinity is white or black by its sign.

    Args:
        images: shape (n, channels, height, width), in [0, 1] or unclamped, NaN allowed.
        level: a pixel is black when no channel is above it.

    Returns:
        float64 of shape (n,), each within [0, 1].

    Raises:
        NumericsError: not a batch of images.
    """
    check_images(images, "black pixels", is_finite=False)
    return (~(images > level)).all(dim=1).double().mean(dim=(1, 2))


def is_black(images: torch.Tensor, *, level: float = BLACK_LEVEL, min_fraction: float = 0.99) -> torch.Tensor:
    """Say of each image whether it is black: a bool tensor of shape (n,); see `black_pixel_fraction`."""
    return black_pixel_fraction(images, level=level) >= min_fraction


def guided_std_ratio(guided: torch.Tensor, conditional: torch.Tensor) -> torch.Tensor:
    """Return, per sample, the standard deviation of the guided prediction over that of the conditional one.

    It is 1 without guidance; well above 1 the images saturate. See eq. 15 in arXiv 2305.08891.

    Args:
        guided: shape (n, channels, height, width).
        conditional: the same shape, the prediction with the prompt alone.

    Returns:
        float64 of shape (n,).

    Raises:
        NumericsError: shapes differ, a value is not finite, or a conditional prediction is constant.
    """
    check_images(guided, "guided prediction")
    check_images(conditional, "conditional prediction")
    check_same_shape(guided, conditional, "ratio of deviations")
    deviation = conditional.double().std(dim=(1, 2, 3))
    if (deviation == 0).any():
        raise NumericsError("conditional prediction: expected values that vary, got a constant sample; check the model")
    return guided.double().std(dim=(1, 2, 3)) / deviation
