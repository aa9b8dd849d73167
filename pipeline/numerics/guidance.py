"""Classifier-free guidance and two remedies for its oversaturation, as the papers write them.

These are the references that a pipeline's own implementation is tested against; pipelines keep using
theirs. All take batches with the sample as first dimension. Schedules of the scale over the steps are
not covered.
"""

from __future__ import annotations

import torch

from pipeline.errors import NumericsError


def guide(unconditional: torch.Tensor, conditional: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Extrapolate from the unconditional to the conditional prediction; scale 1 gives the conditional one.

    Args:
        unconditional: any shape.
        conditional: the same shape.
        scale: guidance scale; in the paper's eq. 6 this is 1 + w.

    Raises:
        NumericsError: shapes differ.

    Reference: Ho and Salimans, arXiv 2207.12598 (2022), eq. 6.
    """
    _check_shapes(unconditional, conditional)
    return unconditional + scale * (conditional - unconditional)


def rescale_guidance(guided: torch.Tensor, conditional: torch.Tensor, *, rescale: float) -> torch.Tensor:
    """Pull the guided prediction's standard deviation toward the conditional one's, per sample.

    Args:
        guided: shape (n, ...).
        conditional: the same shape.
        rescale: blend factor phi in [0, 1]; 0 changes nothing, 1 makes the deviations equal.

    Raises:
        NumericsError: shapes differ, the factor is out of range, or a guided sample is constant.

    Reference: Lin, Liu, Li and Yang, arXiv 2305.08891 (2023), eq. 14 to 16.
    """
    _check_shapes(guided, conditional)
    if not 0 <= rescale <= 1:
        raise NumericsError(f"guidance_rescale: expected a factor from 0 to 1, got {rescale!r}")
    if rescale == 0:
        return guided
    dims = tuple(range(1, guided.ndim))
    deviation = guided.std(dim=dims, keepdim=True)
    if (deviation == 0).any():
        raise NumericsError("guided prediction: expected values that vary, got a constant sample; check the model")
    rescaled = guided * (conditional.std(dim=dims, keepdim=True) / deviation)
    return rescale * rescaled + (1 - rescale) * guided


def threshold_dynamically(
    predicted: torch.Tensor, *, percentile: float = 0.995, max_value: float = float("inf")
) -> torch.Tensor:
    """Clip each predicted clean sample to a percentile of its own magnitudes and scale it back to [-1, 1].

    A sample whose percentile is within 1 is only clipped to [-1, 1].

    Args:
        predicted: x0 of shape (n, ...), meant to lie in [-1, 1]; latents need not, so there it is a heuristic.
        percentile: fraction of magnitudes below the threshold, in (0, 1]; interpolated linearly.
        max_value: the threshold is never above this. Infinite in the paper; schedulers have
            `sample_max_value`, whose default of 1 turns this into a plain clamp.

    Raises:
        NumericsError: a percentile or limit out of range.

    Reference: Saharia et al. (Imagen), arXiv 2205.11487 (2022), section 2.3.
    """
    if not 0 < percentile <= 1 or max_value < 1:
        raise NumericsError(
            f"dynamic threshold: expected a percentile in (0, 1] and a limit of 1 or more, "
            f"got {percentile!r} and {max_value!r}"
        )
    magnitudes = predicted.float().abs().flatten(1)
    threshold = _quantile(magnitudes, percentile).clamp(min=1.0, max=max_value)
    threshold = threshold.view(-1, *[1] * (predicted.ndim - 1))
    clipped = predicted.float().clamp(-threshold, threshold)
    return (clipped / threshold).to(predicted.dtype)


def _quantile(rows: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the interpolated quantile of each row; torch.quantile refuses inputs above 2**24 elements."""
    position = fraction * (rows.shape[1] - 1)
    low = min(int(position), rows.shape[1] - 1)
    ordered = rows.sort(dim=1).values
    high = min(low + 1, rows.shape[1] - 1)
    return torch.lerp(ordered[:, low], ordered[:, high], position - low)


def _check_shapes(first: torch.Tensor, second: torch.Tensor) -> None:
    if first.shape != second.shape or first.ndim < 2:
        raise NumericsError(
            f"guidance: expected two predictions of one shape (n, ...), got {tuple(first.shape)} and "
            f"{tuple(second.shape)}"
        )
