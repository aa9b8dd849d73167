"""The fault table as a test: whatever a server does, nothing is lost, and nothing passes falsely.

The faults and what has to come of each are in `tests/certify/fault_rows.py`, what holds for all in `fault_table.py`.
`python -m benchmarks.check_faults` prints the same as a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.certify.fault_rows import ROWS
from tests.certify.fault_table import Row, Table, find_problems


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    with Table(tmp_path_factory.mktemp("faults")) as table:
        yield table


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row.name).strip("-"))
def test_a_fault_is_told_in_one_line_loses_nothing_and_passes_nothing(table: Table, row: Row) -> None:
    assert find_problems(row, table.observe(row)) == []
