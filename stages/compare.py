"""Stage compare: judge every candidate of a product against its reference: `python -m stages.compare PRODUCT`.

Exits 0 on a regression too, so that DVC records it; stopping a release is the next stages' matter.
"""

from __future__ import annotations

from pipeline.gate.compare import compare_release
from pipeline.gate.verdicts import VERDICT_FILE
from pipeline.gate.wording import use_metrics
from pipeline.products import KINDS
from pipeline.products.params import get_product, load_params
from pipeline.records.benchmarks import read_machine
from pipeline.records.files import write_text
from pipeline.records.record_files import format_json
from pipeline.report.publish import write_metrics, write_report
from pipeline.settings.base import ENV, METRICS, Product
from stages.cli import read_name, run_stage


def main(argv: list[str]) -> int:
    """Write judgement, report, its other forms, plots and metrics of the product named on the command line."""
    product = get_product(load_params(), read_name(argv, "product"), kind=Product)
    kind = KINDS[product.kind]
    compared = compare_release(product, kind.get_auditor(), product.build)
    judgement = compared.judgement
    # megabytes that git keeps twice
    write_text(product.reports / VERDICT_FILE, format_json(judgement.model_dump(mode="json"), levels=4) + "\n")
    with use_metrics(product.metrics):
        write_report(compared, product, kind.get_presenter(), read_machine(ENV / "machine.json"))
        write_metrics(compared, METRICS / product.name)
    for verdict in judgement.verdicts:
        print(f"{verdict.candidate}: {verdict.outcome}")
    return 0


if __name__ == "__main__":
    run_stage("compare", main, is_short=True)
