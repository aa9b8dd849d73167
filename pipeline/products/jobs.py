"""How many candidates are worked on at once, by the machine and the products: for `prefetch.py`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pipeline.products.params import Params
from pipeline.running.environment import (
    count_cores,
    count_memory_mib,
    list_own_gpus,
    read_available_mib,
    read_gpu_free_mib,
)
from pipeline.running.hub import locate_checkpoint
from pipeline.settings.base import Product
from pipeline.settings.execution import RayExecution

# What a candidate takes at most, of a GPU and of the host: so much for itself, and so many times its checkpoint. A
# pipeline of 7 GB that draws 1,024 pixels takes 20 GiB of the GPU, and quantising by samples twice a model of the host.
_OWN_MIB, _GPU_COPIES, _HOST_COPIES = 4 << 10, 8, 4


def count_jobs(params: Params, products: Collection[Product]) -> int:
    """Return how many candidates to work on at once: as many as the product with the fewest has workers.

    Small models share GPUs, so more of them are worked on at once, where memory and cores allow it and
    `execution.num_workers` names no number. 0 where nothing is gained: a cluster works for one candidate, or one
    candidate for the only GPU.
    """
    if isinstance(params.execution, RayExecution):
        return 0
    num_jobs = min(product.num_workers for product in products)
    if not list_own_gpus():
        return num_jobs
    if params.execution.num_workers == "auto":
        num_jobs = max(num_jobs, _count_sharing(products))
    return 0 if num_jobs == 1 else num_jobs


def _count_sharing(products: Collection[Product]) -> int:
    """Return how many candidates surely fit on the GPUs and the host together, by the largest checkpoint."""
    folders = {own.checkpoint for product in products for own in product.candidates.values()}
    largest = max(_measure_mib(locate_checkpoint(folder, Path())) for folder in folders)
    on_gpus = sum(free // (_OWN_MIB + _GPU_COPIES * largest) for free in read_gpu_free_mib())
    on_host = read_available_mib(count_memory_mib()) // (_OWN_MIB + _HOST_COPIES * largest)
    return min(on_gpus, on_host, count_cores())


def _measure_mib(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) >> 20
