"""What to do where a GPU's memory is less than a batch takes: work in parts, or say what would help.

`serving.batch_size` is a setting that changes pixels, so it is kept or refused, never lowered in silence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from pipeline.errors import EngineError

PIXELS_AT_ONCE = 1 << 20  # an image of SDXL, or 256 of 64 pixels a side
_GIB = 1 << 30


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU, in bytes."""

    total: int
    free: int
    held: int  # by this process

    def __str__(self) -> str:
        """Say who has it."""
        others = max(0, self.total - self.free - self.held)
        total, held, others_gib = (size / _GIB for size in (self.total, self.held, others))
        return f"of its {total:.1f} GiB this process holds {held:.1f} and others {others_gib:.1f}"


def read_gpu_memory() -> GpuMemory | None:
    """Return the memory of the current GPU, None without one."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return GpuMemory(total=total, free=free, held=torch.cuda.memory_reserved())


def read_peak_mib() -> float | None:
    """Return the MiB that this process' tensors took at most on its GPU, None without one."""
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None


def is_out_of_memory(error: Exception) -> bool:
    """Say whether a GPU's memory was too small; cuDNN and cuBLAS have no exception of their own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "STATUS_ALLOC_FAILED" in str(error)


@contextlib.contextmanager
def explain_out_of_memory(
    what: str, remedy: str, *, read_memory: Callable[[], GpuMemory | None] = read_gpu_memory
) -> Iterator[None]:
    """Turn out-of-memory into one line.

    Args:
        what: was to fit, for the message.
        remedy: what helps.
        read_memory: of the GPU.

    Raises:
        EngineError: the GPU's memory was too small.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        memory = f": {size}" if (size := read_memory()) else ""
        raise EngineError(
            f"{what}: expected to fit into the GPU's memory, got out of memory{memory}; {remedy}"
        ) from None


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
