"""Turn one candidate's settings into what would ship, and a record of it: `python -m stages.optimize CANDIDATE`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pipeline.products import KINDS
from pipeline.products.params import Params, find_owner, list_project_files, load_params
from pipeline.running.journal import lock_candidate
from pipeline.running.prefetched import take_over
from pipeline.settings.base import Product
from pipeline.settings.execution import RayExecution
from stages.cli import load_cluster, read_name, run_stage


def main(argv: list[str]) -> int:
    """Build the candidate named on the command line and say what it became."""
    name = read_name(argv, "candidate")
    params = load_params()
    product = find_owner(params, name, kind=Product)
    if take_over("optimize", name, product):
        return 0
    with lock_candidate(product.build, name):
        print(f"{name}: {build(name, product, params)}")
    return 0


def build(name: str, product: Product, params: Params) -> str:
    """Build a candidate here or on a cluster."""
    if isinstance(params.execution, RayExecution):
        needed = partial(list_project_files, params, product, name)
        return str(load_cluster().build_on_ray(params.execution, name, product, needed))
    return KINDS[product.kind].optimize(name, product, root=Path(), build=product.build)


if __name__ == "__main__":
    run_stage("optimize", main)
