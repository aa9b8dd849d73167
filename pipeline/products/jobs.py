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

_PROCESS_MIB = 1 << 10  # of a step without a GPU: Python, torch and its friends, and cases
# What a candidate takes at most, of a GPU and of the host: so much for itself, and so many times its checkpoint. A
# pipeline of 7 GB that draws 1,024 pixels takes 20 GiB of the GPU, and quantising by samples twice a model of the host.
_OWN_MIB, _GPU_COPIES, _HOST_COPIES = 4 << 10, 8, 4


def count_jobs(params: Params, products: Collection[Product]) -> int:
    """Return how many candidates to work on at once: as many as the product with the fewest has workers.

    Unless `execution.num_workers` names a number, not more than fit into memory: several that quantise a large model at
    once would be killed. Small models share GPUs then, where memory and cores allow it. Where an engine takes GPUs
    whole, there are enough of them for each. 0 where nothing is gained: a cluster works for one candidate, or one
    candidate for the only GPU.
    """
    if isinstance(params.execution, RayExecution):
        return 0
    num_jobs = min(product.num_workers for product in products)
    is_auto = params.execution.num_workers == "auto"
    if not (gpus := list_own_gpus()):
        return min(num_jobs, max(1, _count_on_host(products, _PROCESS_MIB))) if is_auto else num_jobs
    if num_whole := max(product.count_whole_gpus(name) for product in products for name in product.candidates):
        num_jobs = min(num_jobs, len(gpus) // num_whole)
    elif is_auto:
        num_jobs = max(num_jobs, _count_sharing(products))
    if is_auto:
        num_jobs = min(num_jobs, _count_on_host(products, _OWN_MIB))
    return 0 if num_jobs == 1 else num_jobs


def _count_sharing(products: Collection[Product]) -> int:
    """Return how many candidates surely fit on the GPUs, by the largest checkpoint, each with a core."""
    on_gpus = sum(free // (_OWN_MIB + _GPU_COPIES * _find_largest_mib(products)) for free in read_gpu_free_mib())
    return min(on_gpus, count_cores())


def _count_on_host(products: Collection[Product], own_mib: int) -> int:
    """Return how many candidates fit into the host's memory, where each takes so much beside its checkpoint."""
    return read_available_mib(count_memory_mib()) // (own_mib + _HOST_COPIES * _find_largest_mib(products))


def _find_largest_mib(products: Collection[Product]) -> int:
    folders = {own.checkpoint for product in products for own in product.candidates.values()}
    return max(_measure_mib(locate_checkpoint(folder, Path())) for folder in folders)


def _measure_mib(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) >> 20
