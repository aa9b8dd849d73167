"""What to do where a GPU's memory is less than a batch takes: work in parts, and measure what was taken.

`serving.batch_size` is a setting that changes pixels, so it is kept or refused, never lowered in silence.
"""

from __future__ import annotations

import torch

PIXELS_AT_ONCE = 1 << 20  # an image of SDXL, or 256 of 64 pixels a side


def read_peak_mib() -> float | None:
    """Return the MiB that this process' tensors took at most on its GPU, None without one."""
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None


def split_batch(num_images: int, num_pixels: int, device: torch.device) -> list[slice]:
    """Return the parts of a batch that are decoded in float32 and judged together.

    On a GPU a part holds `PIXELS_AT_ONCE`, whatever memory is free: the same numbers on every run. On a CPU a batch
    stays whole: there the rounding of a decode depends on who shares it.

    Args:
        num_images: of the batch.
        num_pixels: of an image.
        device: that holds them.
    """
    size = num_images if device.type == "cpu" else max(1, PIXELS_AT_ONCE // num_pixels)
    return [slice(start, start + size) for start in range(0, num_images, size)]
