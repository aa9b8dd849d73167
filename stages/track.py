"""Stage track: log the judged candidates to MLflow, one flat run each. Decides nothing."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.gate.verdicts import VERDICT_FILE, Judgement
from pipeline.gate.wording import use_metrics
from pipeline.products import KINDS
from pipeline.products.params import get_product, load_params
from pipeline.records.files import write_text
from pipeline.records.record_files import read_record
from pipeline.report import PAGE
from pipeline.report.mlflow_runs.run_contents import build_runs
from pipeline.report.mlflow_runs.tracking import log_runs, write_pages
from pipeline.settings.base import Product
from stages.cli import read_name, run_stage

OUTPUT = "tracked.txt"


def main(argv: list[str]) -> int:
    """Log what MLflow does not hold yet of the product named on the command line and say where to look."""
    product = get_product(load_params(), read_name(argv, "product"), kind=Product)
    root = Path(os.environ.get("DVC_ROOT", "."))  # the real root, also for a queued experiment
    build, reports = product.build, product.reports
    presenter = KINDS[product.kind].get_presenter()
    with use_metrics(product.metrics):
        runs = build_runs(read_record(reports / VERDICT_FILE, Judgement), product.evals, build, presenter)
    logged = log_runs(
        runs,
        root,
        product=product.name,
        attachments=list_attachments(product),
        dvc_experiment=os.environ.get("DVC_EXP_NAME", ""),
    )
    write_pages(logged, root, product=product.name, has_pictures=any(run.images for run in runs))
    print(f"MLflow: {sum(run.is_new for run in logged)} of {len(logged)} runs are new; `make ui` opens it")
    write_text(build / OUTPUT, "".join(f"{run.candidate} {run.key}\n" for run in runs))
    return 0


def list_attachments(product: Product) -> list[Path]:
    """Return the page and the pictures; the report in Markdown is for GitHub, and MLflow would show its source."""
    return [product.build / PAGE, *sorted(product.reports.glob("*.png"))]


if __name__ == "__main__":
    run_stage("track", main, is_short=True)
