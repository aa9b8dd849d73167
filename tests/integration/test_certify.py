"""The part of the kill table that needs no trained model: defects of records, verdicts and what git keeps.

What servers and their answers can do to it is in `test_faults.py`; `make certify` runs the whole table on the shipped
candidates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certify.fault_table import Table
from tests.certify.kill_rows import ROWS, UNTRAINED
from tests.certify.kill_table import Kill, ProjectError, observe
from tests.certify.kill_trial import Trial


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with Table(tmp_path_factory.mktemp("kill")) as table:
        yield table.folder / "undisturbed"


@pytest.mark.parametrize("kill", UNTRAINED, ids=lambda kill: re.sub(r"\W+", "-", kill.name))
def test_no_defect_passes_and_every_equivalent_change_does(kill: Kill, project: Path, tmp_path: Path) -> None:
    seen = observe(kill, project, tmp_path / "trial")
    assert seen.is_right(kill), seen


def test_evaluations_by_other_code_are_no_project_to_certify(project: Path, tmp_path: Path) -> None:
    def forget_code(trial: Trial) -> None:
        index = trial.evaluation / "evaluation.json"
        index.write_text(re.sub(r'"key": "\w+"', '"key": "other"', index.read_text()))

    with pytest.raises(ProjectError, match="run `make repro` first"):
        observe(Kill("other code", "", forget_code), project, tmp_path / "trial")


def test_every_row_has_a_name_and_every_defect_a_reason_to_be_stopped() -> None:
    assert len({kill.name for kill in ROWS}) == len(ROWS)
    assert [kill.name for kill in ROWS if bool(kill.because) == kill.must_pass] == []
