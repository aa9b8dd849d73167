"""Run all evals of one candidate on the path that would serve it: `python -m stages.evaluate CANDIDATE`."""

from __future__ import annotations

from pathlib import Path

from pipeline.products import KINDS
from pipeline.products.params import find_owner, load_params
from pipeline.settings.base import Product
from stages.cli import read_name, run_stage


def main(argv: list[str]) -> int:
    """Evaluate the candidate named on the command line."""
    name = read_name(argv, "candidate")
    product = find_owner(load_params(), name, kind=Product)
    KINDS[product.kind].evaluate(name, product, root=Path(), build=product.build)
    return 0


if __name__ == "__main__":
    run_stage("evaluate", main)
