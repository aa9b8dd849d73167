"""What is refused before any model runs: stages that would keep results whatever is asked."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from evalsets.seal import seal
from pipeline.errors import SettingsError
from pipeline.gate.preflight import check_gates, check_stages
from pipeline.products.params import load_params
from pipeline.records.record_files import read_record
from pipeline.release.manifest import Manifest
from pipeline.settings.base import Loosened
from tests.paths import ROOT

STAGES = "stages:\n  evaluate:\n    foreach: [a]\n    do:\n      cmd: 'true'\n{}  compare:\n    cmd: 'true'\n{}"


def test_a_stage_that_is_frozen_is_refused_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "dvc.yaml"
    for text in (STAGES.format("", ""), STAGES.format("      frozen: false\n", "")):
        path.write_text(text)
        check_stages(path)
    for text, name in (
        (STAGES.format("      frozen: true\n", ""), "evaluate"),
        (STAGES.format("", "    frozen: true\n"), "compare"),
    ):
        path.write_text(text)
        with pytest.raises(SettingsError, match=rf"dvc.yaml: stages.{name}.frozen: expected a stage that runs when"):
            check_stages(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages: [", r"dvc\.yaml: not YAML: "),
        ("", r"dvc\.yaml: expected `stages`, each with its settings, got something else"),
        ("vars: []", r"dvc\.yaml: expected `stages`"),
        ("stages:\n  env:\n", r"dvc\.yaml: expected `stages`"),
        ("stages:\n  evaluate:\n    do:\n", r"dvc\.yaml: expected `stages`"),
    ],
)
def test_stages_that_are_none_are_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    """`make plan` ended with a traceback of the parser."""
    path = tmp_path / "dvc.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=said) as refused:
        check_stages(path)
    assert "\n" not in str(refused.value)


def test_other_weights_of_the_reference_are_refused_before_any_work(tmp_path: Path) -> None:
    """The gate alone said so, hours later."""
    product = load_params(ROOT / "params.yaml").products["shots"]
    shutil.copytree(ROOT / "evalsets/shots", tmp_path / "evalsets/shots")
    shutil.copytree(ROOT / "release/shots", tmp_path / "release/shots")
    weights = read_record(ROOT / "release/shots/manifest.json", Manifest).reference.weights_digest
    assert check_gates([product], tmp_path, {"shots": weights}) == [] == check_gates([product], tmp_path)
    with pytest.raises(SettingsError, match=r"loosened: expected 'reference\.weights' with a reason, as it was"):
        check_gates([product], tmp_path, {"shots": "0" * 64})


def test_cases_sealed_anew_since_the_last_release_are_refused_before_any_work(tmp_path: Path) -> None:
    """The gate alone said so, hours later."""
    product, folder = load_params(ROOT / "params.yaml").products["shots"], tmp_path / "evalsets/shots"
    shutil.copytree(ROOT / "evalsets/shots", folder)
    shutil.copytree(ROOT / "release/shots", tmp_path / "release/shots")
    assert check_gates([product], tmp_path) == []
    cases = folder / "cases.jsonl"
    cases.write_text(cases.read_text().replace("glossy red", "shiny red"))
    seal(folder)
    with pytest.raises(SettingsError, match=r"loosened: expected 'evals\.shots\.cases' with a reason, as it was"):
        check_gates([product], tmp_path)
    reasons = dict(product.gate.loosened)
    with pytest.raises(SettingsError) as refused:
        check_gates([product], tmp_path)
    was, now = re.findall(r'(?:was|now): "(\w+)"', str(refused.value))
    reasons["evals.shots.cases"] = Loosened(was=was, now=now, why="a better word")
    reasons["reference.weights"] = Loosened(was="1", now="2", why="known after the evaluation alone")
    gate = product.gate.model_copy(update={"loosened": reasons})
    assert check_gates([product.model_copy(update={"gate": gate})], tmp_path) == []
