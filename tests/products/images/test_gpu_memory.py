"""What a GPU holds: parts of a batch that follow its pixels alone, and one line where it holds too little."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import EngineError
from pipeline.products.images.gpu_memory import GpuMemory, explain_out_of_memory, split_batch

GIB = 1 << 30
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("num_images", "side", "device", "sizes"),
    [
        pytest.param(4, 1024, GPU, [1, 1, 1, 1], id="sdxl"),
        pytest.param(2, 2048, GPU, [1, 1], id="larger-than-a-part"),
        pytest.param(5, 512, GPU, [4, 1], id="a-last-part"),
        pytest.param(16, 64, GPU, [16], id="small"),
        pytest.param(4, 1024, CPU, [4], id="cpu"),
    ],
)
def test_a_gpu_takes_a_batch_in_parts_and_a_cpu_takes_it_whole(
    num_images: int, side: int, device: torch.device, sizes: list[int]
) -> None:
    """On a CPU the last bits of a decode depend on who shares the batch."""
    images = torch.arange(num_images)
    parts = [images[part] for part in split_batch(num_images, side * side, device)]
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat(parts), images)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.\nGPU 0 has ..."),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "cudnn", "cublas"],
)
def test_out_of_memory_says_who_holds_it_and_what_helps(error: Exception) -> None:
    memory = GpuMemory(total=24 * GIB, free=GIB, held=15 * GIB)
    with pytest.raises(EngineError) as caught, explain_out_of_memory("a batch", "lower it", read_memory=lambda: memory):
        raise error
    assert str(caught.value) == (
        "a batch: expected to fit into the GPU's memory, got out of memory: of its 24.0 GiB this process holds 15.0 "
        "and others 8.0; lower it"
    )


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="^shapes differ$"), explain_out_of_memory("a batch", "lower it"):
        raise RuntimeError("shapes differ")
