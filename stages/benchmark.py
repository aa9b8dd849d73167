"""Measure what needs a candidate and the reference side by side: `python -m stages.benchmark PRODUCT`. Judges nothing.

Speed of endpoints that stand side by side, or how alike the pictures of both are: a kind says what it measures here.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.products import KINDS
from pipeline.products.params import get_product, load_params
from pipeline.records.files import write_text
from pipeline.running.journal import drop_finished
from pipeline.settings.base import Product
from stages.cli import read_name, run_stage

OUTPUT, NOTE = "benchmarks", "nothing.txt"


def main(argv: list[str]) -> int:
    """Measure what the kind of the product named on the command line asks for; where that is nothing, say so in a file.

    DVC warns of an empty folder before every stage that depends on it.
    """
    product = get_product(load_params(), read_name(argv, "product"), kind=Product)
    folder = product.build / OUTPUT
    folder.mkdir(parents=True, exist_ok=True)
    drop_finished(product.build)  # DVC has recorded the evaluations that this stage depends on
    for line in KINDS[product.kind].benchmark(product, root=Path(), build=product.build):
        print(line)
    if any(folder.glob("*.json")):
        (folder / NOTE).unlink(missing_ok=True)
    else:
        write_text(folder / NOTE, f"Nothing of {product.name} is measured side by side.\n")
    return 0


if __name__ == "__main__":
    run_stage("benchmark", main)
