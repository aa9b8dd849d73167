"""The fault table as a test: whatever a server does, nothing is lost, and nothing passes falsely.

The faults and what has to come of each are in `tests/fault_rows.py`; here is what holds for all of them.
`python -m benchmarks.check_faults` prints the same as a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.fault_project import NUM_CASES
from tests.fault_rows import ROWS
from tests.fault_table import Row, Table


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    with Table(tmp_path_factory.mktemp("faults")) as table:
        yield table


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row.name).strip("-"))
def test_a_fault_is_told_in_one_line_loses_nothing_and_passes_nothing(table: Table, row: Row) -> None:
    found = table.observe(row)
    assert "Traceback" not in found.printed
    assert (found.code, found.said.count("\n")) == (int(row.said is not None), 0)
    assert re.fullmatch(f"quantgate evaluate: {row.said}" if row.said else "", found.said), found.said
    assert found.num_kept >= row.num_kept
    assert found.verdict.outcome == row.verdict, found.verdict.reasons
    assert any(re.fullmatch(f"refused: {row.because}" if row.because else ".*", r) for r in found.verdict.reasons)
    # what is attached is asked anew after a run that finished: it may serve another model by then
    assert found.num_again == (NUM_CASES if row.said is None and row.verdict != "pass" else 0)
    assert (found.num_lost, found.num_differing) == (0, row.num_differing)
    assert found.recovered.outcome == "pass", found.recovered.reasons
