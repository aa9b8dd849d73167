"""What a GPU holds: parts of a batch that follow its pixels alone."""

from __future__ import annotations

import pytest
import torch

from pipeline.products.images.gpu_memory import split_batch

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
