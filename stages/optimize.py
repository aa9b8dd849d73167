"""Turn one candidate's settings into what would ship, and a record of it: `python -m stages.optimize CANDIDATE`."""

from __future__ import annotations

from pathlib import Path

from pipeline.products import KINDS
from pipeline.products.params import find_owner, load_params
from pipeline.running.journal import lock_candidate
from pipeline.settings.base import Product
from stages.cli import read_name, run_stage


def main(argv: list[str]) -> int:
    """Build the candidate named on the command line and say what it became."""
    name = read_name(argv, "candidate")
    product = find_owner(load_params(), name, kind=Product)
    with lock_candidate(product.build, name):
        print(f"{name}: {KINDS[product.kind].optimize(name, product, root=Path(), build=product.build)}")
    return 0


if __name__ == "__main__":
    run_stage("optimize", main)
