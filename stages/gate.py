"""Stage gate: let a release through or stop it. Reads the judgement and checks that it is about what would ship.

DVC does not record a stage that fails, so this one fires again on every run until the cause is
gone. Its only output is the marker of a pass, removed before anything is judged.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.gate.standing import read_judgement
from pipeline.gate.verdicts import VERDICT_FILE, blocking_verdicts, write_marker
from pipeline.gate.wording import use_metrics
from pipeline.products import KINDS
from pipeline.products.params import get_product, load_params
from pipeline.report.github import write_github
from pipeline.report.terminal import render_gate
from pipeline.settings.base import Product
from stages.cli import read_name, run_stage

MARKER = "gate.ok"


def main(argv: list[str]) -> int:
    """Print the verdicts of the release of the product named on the command line; return 1 when one of them blocks."""
    product = get_product(load_params(), read_name(argv, "product"), kind=Product)
    marker = product.build / MARKER
    marker.unlink(missing_ok=True)
    with use_metrics(product.metrics):
        judgement, are_here = read_judgement(product, KINDS[product.kind].get_auditor(), Path())
        print(render_gate(judgement, are_here=are_here))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            print(write_github(judgement, os.environ))
    if blocking_verdicts(judgement):
        return 1
    write_marker(marker, judgement, verdict_path=product.reports / VERDICT_FILE)
    return 0


if __name__ == "__main__":
    run_stage("gate", main)
