"""Write a judgement in all its forms: beside the report what git keeps, in the build folder the page.

Not covered: MLflow, and what the terminal shows.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.gate.audits import P
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.verdicts import REPORT_FILE
from pipeline.records.benchmarks import Machine
from pipeline.records.files import write_text
from pipeline.records.record_files import write_record
from pipeline.report import EXPLANATION, JUNIT, PAGE
from pipeline.report.built_candidate import describe_built_candidate
from pipeline.report.explain import explain_release
from pipeline.report.html import render_html
from pipeline.report.junit import render_junit
from pipeline.report.markdown import is_embedded
from pipeline.report.markdown_report import HARM, metrics_tree, render_report
from pipeline.report.plots import plot_harm
from pipeline.report.presenting import Presenter


def write_report(compared: ReleaseComparison, product: P, presenter: Presenter[P], here: Machine | None) -> None:
    """Write report, pictures, explanation and JUnit into the product's reports, and the page into its build folder.

    Args:
        compared: what to write.
        product: whose candidates were compared.
        presenter: of its kind.
        here: the machine that this runs on, where known.
    """
    explanation = explain_release(compared, quotes_outputs=not presenter.words.given)
    report = render_report(compared, explanation, presenter, here)
    write_text(product.reports / REPORT_FILE, report)
    write_record(product.reports / EXPLANATION, explanation)
    write_text(product.reports / JUNIT, render_junit(compared.judgement))
    harm, pictures = product.reports / HARM, {}
    if is_embedded(HARM, report):
        plot_harm(compared.judgement, harm)  # the page draws intervals of harm itself
    else:
        harm.unlink(missing_ok=True)
    for figure in presenter.list_figures(product):
        path = product.reports / figure.name
        if is_embedded(figure.name, report):
            figure.draw(compared, path)
            pictures[figure] = path.read_bytes()
        else:
            path.unlink(missing_ok=True)  # it would be an empty frame
    built = {
        name: describe_built_candidate(findings.evidence.candidate, write=str, write_name=str)
        for name, findings in compared.findings.items()
        if findings.evidence is not None
    }
    write_text(product.build / PAGE, render_html(compared.judgement, explanation, pictures, built))


def write_metrics(compared: ReleaseComparison, folder: Path) -> None:
    """Write a file of metrics a candidate, and remove those of candidates that are no more."""
    for candidate, findings in compared.findings.items():
        tree = json.dumps(metrics_tree(findings.metrics, compared.judgement.policy), indent=2) + "\n"
        write_text(folder / f"{candidate}.json", tree)
    for stale in folder.glob("*.json"):
        if stale.stem not in compared.findings:
            stale.unlink()
