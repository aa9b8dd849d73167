"""What is refused before any model runs: stages that would keep results whatever is asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evalsets.seal import seal
from pipeline.errors import SettingsError
from pipeline.gate.preflight import check_gates
from pipeline.products.params import load_params
from tests.fakes.release_project import write_project
from tests.paths import ROOT

STAGES = "stages:\n  evaluate:\n    foreach: [a]\n    do:\n      cmd: 'true'\n{}  compare:\n    cmd: 'true'\n{}"


def test_a_stage_that_is_frozen_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.gate.preflight.check_plan", lambda *given: [])
    monkeypatch.setattr("pipeline.gate.preflight.plan_gate", lambda *given: [])
    monkeypatch.setattr("pipeline.gate.preflight.load_evalsets", lambda *given: {})
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


def test_cases_sealed_anew_since_the_last_release_are_refused_before_any_work(tmp_path: Path) -> None:
    """The gate alone said so, hours later. A reason for what it alone can tell is left to it."""
    product = load_params(ROOT / "params.yaml").products["shots"]
    folder, manifest = tmp_path / "evalsets/shots", tmp_path / "release/shots/manifest.json"
    shutil.copytree(ROOT / "evalsets/shots", folder)
    manifest.parent.mkdir(parents=True)
    shutil.copy(ROOT / "release/shots/manifest.json", manifest)
    warnings = check_gates([product], tmp_path)
    cases = folder / "cases.jsonl"
    cases.write_text(cases.read_text().replace('"a glossy red ball', '"a shiny red ball'))
    seal(folder)
    with pytest.raises(SettingsError, match=r"loosened: expected 'evals\.shots\.cases' with a reason") as caught:
        check_gates([product], tmp_path)
    was, now = (str(caught.value).split(word)[1][:12] for word in ('was: "', 'now: "'))
    reasons = {"evals.shots.cases": {"was": was, "now": now, "why": "clearer prompts"}}
    reasons |= {"reference.weights": reasons["evals.shots.cases"]}
    gate = product.gate.model_validate(product.gate.model_dump() | {"loosened": reasons})
    assert check_gates([product.model_copy(update={"gate": gate})], tmp_path) == warnings
