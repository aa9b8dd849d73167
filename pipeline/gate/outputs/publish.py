"""Where the forms of a judgement lie: beside the report what git keeps, in the build folder the page with its pictures.

Not covered: MLflow and what the terminal shows.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.files import write_text
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.explain import explain_release
from pipeline.gate.outputs.html import render_html
from pipeline.gate.outputs.junit import render_junit
from pipeline.record_files import write_record

EXPLANATION, JUNIT, PAGE = "explanation.json", "junit.xml", "report.html"


def write_outputs(compared: ReleaseComparison, reports: Path, build: Path, *, pictures: tuple[str, ...]) -> None:
    """Write explanation and JUnit beside the report, and the page with its pictures into the build folder.

    Args:
        compared: what to write.
        reports: the folder of the track's report, in which its pictures lie.
        build: the track's build folder.
        pictures: names of the plots.
    """
    explanation = explain_release(compared)
    write_record(reports / EXPLANATION, explanation)
    write_text(reports / JUNIT, render_junit(compared.judgement))
    shown = {name: (reports / name).read_bytes() for name in pictures}
    write_text(build / PAGE, render_html(compared.judgement, explanation, shown))
