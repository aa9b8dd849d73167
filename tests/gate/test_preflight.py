"""What is refused before any model runs: stages that would keep results whatever is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import SettingsError
from pipeline.gate.preflight import check_gates
from pipeline.products.params import load_params
from tests.fakes.release_project import write_project

STAGES = "stages:\n  evaluate:\n    foreach: [a]\n    do:\n      cmd: 'true'\n{}  compare:\n    cmd: 'true'\n{}"


def test_a_stage_that_is_frozen_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.gate.preflight.check_plan", lambda *given: [])
    monkeypatch.setattr("pipeline.gate.preflight.plan_gate", lambda *given: [])
    monkeypatch.setattr("pipeline.gate.preflight.read_sizes", lambda *given: {})
    write_project(tmp_path)
    params, path = load_params(tmp_path / "params.yaml"), tmp_path / "dvc.yaml"
    for text in (STAGES.format("", ""), STAGES.format("      frozen: false\n", "")):
        path.write_text(text)
        assert check_gates(params.products.values(), tmp_path) == []
    for text, name in (
        (STAGES.format("      frozen: true\n", ""), "evaluate"),
        (STAGES.format("", "    frozen: true\n"), "compare"),
    ):
        path.write_text(text)
        with pytest.raises(SettingsError, match=rf"dvc.yaml: stages.{name}.frozen: expected a stage that runs when"):
            check_gates(params.products.values(), tmp_path)
