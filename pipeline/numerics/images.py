"""What every function on a batch of images checks first.

Images are floating tensors of shape (n, channels, height, width). Loading, resizing and colour spaces
are not covered.
"""

from __future__ import annotations

import torch

from pipeline.errors import NumericsError


def check_images(images: torch.Tensor, what: str, *, is_finite: bool = True) -> None:
    """Refuse what is not a batch of floating images.

    Args:
        images: shape (n, channels, height, width), any floating dtype.
        what: how the caller names the batch, for the message.
        is_finite: also refuse NaN and infinity, which compare false with every threshold.

    Raises:
        NumericsError: another shape or dtype, an empty batch, or values that are not finite.
    """
    if images.ndim != 4 or not images.is_floating_point() or images.numel() == 0:
        raise NumericsError(
            f"{what}: expected floats of shape (n, channels, height, width), "
            f"got {images.dtype} of shape {tuple(images.shape)}; convert and batch them"
        )
    if is_finite and not images.isfinite().all():
        bad = [i for i, image in enumerate(images) if not image.isfinite().all()]
        raise NumericsError(
            f"{what}: expected finite values, found NaN or infinity in {len(bad)} of {len(images)} "
            f"images, the first is number {bad[0]}; count those, then leave them out"
        )


def check_same_shape(images: torch.Tensor, reference: torch.Tensor, what: str) -> None:
    """Refuse two batches that can't be compared element by element.

    Raises:
        NumericsError: the shapes differ.
    """
    if images.shape != reference.shape:
        raise NumericsError(
            f"{what}: expected two batches of one shape, got {tuple(images.shape)} and "
            f"{tuple(reference.shape)}; decode both from the same latents"
        )
