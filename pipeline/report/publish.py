"""Write a judgement in its other forms: beside the report what git keeps, in the build folder the page.

Not covered: the report itself, its plots, MLflow, and what the terminal shows.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.gate.compare import ReleaseComparison
from pipeline.records.files import write_text
from pipeline.records.record_files import write_record
from pipeline.report import EXPLANATION, JUNIT, PAGE
from pipeline.report.explain import explain_release
from pipeline.report.html import render_html
from pipeline.report.junit import render_junit
from pipeline.report.markdown_report import metrics_tree


def write_outputs(compared: ReleaseComparison, reports: Path, build: Path) -> None:
    """Write explanation and JUnit beside the report, and the page into the build folder.

    Args:
        compared: what to write.
        reports: the folder in which the product's report and its pictures lie already.
        build: the product's build folder.
    """
    explanation = explain_release(compared)
    write_record(reports / EXPLANATION, explanation)
    write_text(reports / JUNIT, render_junit(compared.judgement))
    write_text(build / PAGE, render_html(compared.judgement, explanation, _read_pictures(reports)))


def _read_pictures(reports: Path) -> dict[str, bytes]:
    """Read what the report shows; intervals of harm the page draws itself."""
    report = (reports / "report.md").read_text(encoding="utf-8")
    return {
        path.name: path.read_bytes()
        for path in sorted(reports.glob("*.png"))
        if f"]({path.name})" in report and path.name != "harm.png"
    }


def write_metrics(compared: ReleaseComparison, folder: Path) -> None:
    """Write a file of metrics a candidate, and remove those of candidates that are no more."""
    for candidate, measured in compared.measured.items():
        tree = json.dumps(metrics_tree(measured.metrics, compared.judgement.policy), indent=2) + "\n"
        write_text(folder / f"{candidate}.json", tree)
    for stale in folder.glob("*.json"):
        if stale.stem not in compared.measured:
            stale.unlink()
