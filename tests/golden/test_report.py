"""The report and the terminal output, word for word, for one small release.

Regenerate with `python -m tests.golden.test_report` from the project root and read the diff.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from pipeline.gate.wording import use_metrics
from pipeline.products import list_known_metrics
from pipeline.records.files import write_text
from pipeline.report.terminal import render_gate
from tests.fakes.judging import compare_release, render_report
from tests.fakes.synthetic_records import Behaviour, make_params, rewrite_records, write_tree

FOLDER = Path(__file__).parent
BEHAVIOURS = {
    "gptq-short": Behaviour({"workflows/constraint_retention": 0.3, "calls": 0.01}, nll_shift=0.006),
    "awq-long": Behaviour({"calls": 0.003}, {"workflows": 0.02}, nll_shift=0.002),
    "half-done": Behaviour(),
}


def render(folder: Path) -> dict[str, str]:
    """Judge a synthetic release under `folder`, with relative paths, and return the golden texts."""
    os.chdir(folder)
    write_tree(Path("build"), BEHAVIOURS, num_cases=400)
    rewrite_records(
        Path("build"),
        "half-done",
        "choices",
        lambda records: [
            records[0].model_copy(update={"failure": "infrastructure: connection reset", "scores": {}}),
            *records[1:],
        ],
    )
    params = make_params(list(BEHAVIOURS), ["awq-long", "gptq-short"])
    compared = compare_release(params, Path("build"))
    return {"report.md": render_report(compared), "gate.txt": render_gate(compared.judgement) + "\n"}


def test_report_and_terminal_output_are_as_last_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in render(tmp_path).items():
        assert text == (FOLDER / name).read_text(encoding="utf-8"), f"{name} changed; see this file's docstring"


if __name__ == "__main__":
    # under pytest conftest.py says what metrics there are
    with tempfile.TemporaryDirectory() as temporary, use_metrics(list_known_metrics()):
        for file_name, content in render(Path(temporary)).items():
            write_text(FOLDER / file_name, content)
