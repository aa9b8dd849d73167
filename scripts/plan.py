"""What the gate's suites can prove and what a run will cost, before any model runs.

`python scripts/plan.py [PRODUCT ...]`, or `make plan`. A row for each tolerance in params.yaml: cases, the share of
them expected to flip (as in the last judgement of these cases, assumed before there is one), the tolerance that so many
cases prove for a candidate without a loss four times in five, the cases that the tolerance asked for would need, and
the minutes that the eval takes for one candidate (`pipeline/gate/plan.py`). Then a row for each candidate of a kind
that can say its cost: minutes, memory and disk, from the headers of its weights alone
(`pipeline/products/text/costs.py`). Stage `env`'s checks come first, and a mistake is one line. So is a suite
or a machine that is too small, behind the tables: they say what would do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.errors import QuantgateError, SizeError  # noqa: E402
from pipeline.gate.plan import render_plan  # noqa: E402
from pipeline.gate.suite_sizes import load_evalsets, plan_product  # noqa: E402
from pipeline.gate.wording import use_metrics  # noqa: E402
from pipeline.products import KINDS  # noqa: E402
from pipeline.products.checking import check_products  # noqa: E402
from pipeline.products.params import get_product, load_params  # noqa: E402
from pipeline.running.environment import read_machine  # noqa: E402
from pipeline.settings.base import Product  # noqa: E402
from stages.cli import run_stage  # noqa: E402


def main(argv: list[str]) -> int:
    """Check each product named, or all, as stage `env` does, and print its plan.

    Raises:
        QuantgateError: the first mistake, before any plan; a SizeError comes behind them.
    """
    parser = argparse.ArgumentParser(prog="plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("products", nargs="*", metavar="PRODUCT", help="of params.yaml; else all")
    named = parser.parse_args(argv).products
    params = load_params()
    # a wrong name is told before any plan
    products = {name: get_product(params, name, kind=Product) for name in named or params.products}
    machine, too_small = read_machine(), None
    try:
        check_products(params, products.values(), machine, caller="plan")
    except SizeError as error:
        too_small = error  # the tables say what would do
    for name, product in products.items():
        with use_metrics(product.metrics):
            rows = plan_product(product, load_evalsets(product, Path(), with_tasks=True), Path())
            print(f"{name}: {', '.join(product.release)} against {product.reference}\n{render_plan(rows)}\n")
        try:
            if costs := KINDS[product.kind].render_costs(product, Path(), machine, build=product.build):
                print(f"{costs}\n")
        except QuantgateError as error:  # of records of the last run, which a plan of suites can do without
            print(f"cost: not known: {error}\n")
    if too_small:
        raise too_small
    return 0


if __name__ == "__main__":
    run_stage("plan", main)
