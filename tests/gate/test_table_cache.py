"""How much of what is made of tables is kept."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.gate.table_cache import keep_by_table
from pipeline.records.detections import MatchTable


def make_table(num_categories: int = 0) -> MatchTable:
    numbers, bits = np.zeros(0, dtype=np.int64), np.zeros((0, 1), dtype=np.uint16)
    counts = np.zeros((1, max(num_categories, 1), 1), dtype=np.int64)
    categories = {f"thing {number}": number for number in range(num_categories)}
    return MatchTable(
        {"all": (0, 1)}, np.zeros(2, dtype=np.int64), numbers, np.zeros(0), bits, bits, counts, categories
    )


@pytest.mark.parametrize("num_categories", [80, 600, 1_203])
def test_two_detectors_are_kept_whole(num_categories: int) -> None:
    """From 512 categories on each metric resampled all categories of both anew: 1,024 were kept."""
    sides, made = [make_table(num_categories), make_table(num_categories)], []

    @keep_by_table
    def pick(table: MatchTable, number: int) -> int:
        made.append(number)
        return number

    for _ in range(3):
        for table in sides:
            assert [pick(table, number) for number in range(num_categories)] == list(range(num_categories))
    assert len(made) == 2 * num_categories


def test_what_was_not_used_lately_is_let_go() -> None:
    made = []

    @keep_by_table
    def pick(table: MatchTable, number: int) -> int:
        made.append(number)
        return number

    table = make_table(3)
    for number in range(5_000):
        pick(table, number)
        pick(table, 0)
    assert len(made) == 5_000
    pick(table, 1)
    assert len(made) == 5_001
