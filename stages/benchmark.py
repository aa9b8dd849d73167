"""Measure what needs a candidate and the reference side by side: `python -m stages.benchmark PRODUCT`. Judges nothing.

Speed of endpoints that stand side by side, or how alike the pictures of both are: a kind says what it measures here.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.products import KINDS
from pipeline.products.params import get_product, load_params
from pipeline.settings.base import Product
from stages.cli import read_name, run_stage

OUTPUT = "benchmarks"


def main(argv: list[str]) -> int:
    """Measure what the kind of the product named on the command line asks for; its folder is there whatever that is."""
    product = get_product(load_params(), read_name(argv, "product"), kind=Product)
    (product.build / OUTPUT).mkdir(parents=True, exist_ok=True)
    for line in KINDS[product.kind].benchmark(product, root=Path(), build=product.build):
        print(line)
    return 0


if __name__ == "__main__":
    run_stage("benchmark", main)
