"""Many graded scores: memory grows with the cases that are kept, not with what their files or the draws hold."""

from __future__ import annotations

import csv
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.gate import statistics
from pipeline.outcomes.cases import Grouping
from pipeline.outcomes.registry import read_side

CASES = 2_000


def write_jsonl(path: Path) -> Path:
    path.write_text(
        "".join(
            json.dumps(
                {
                    "case_id": f"q{i}",
                    "prompt": "p" * 20 + str(i),
                    "output": "o",
                    "f1": i / CASES,
                    "notes": ["x" * 50] * 20 + [i],
                }
            )
            + "\n"
            for i in range(CASES)
        )
    )
    return path


def write_csv(path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case_id", "prompt", "output", "f1", "notes"])
        writer.writerows([f"q{i}", "p" * 20 + str(i), "o", i / CASES, "x" * 2_000] for i in range(CASES))
    return path


def write_samples(path: Path) -> Path:
    path.write_text(
        "".join(
            json.dumps(
                {
                    "doc_id": i,
                    "doc": {"text": ["x" * 50] * 20 + [i]},
                    "target": "",
                    "filter": name,
                    "f1": i / CASES,
                    "arguments": {"gen_args_0": {"arg_0": "p" * 20, "arg_1": ["y" * 40] * 20 + [i]}},
                    "resps": [["o"]],
                    "doc_hash": f"d{i}",
                    "prompt_hash": f"p{i}",
                    "target_hash": f"t{i}",
                }
            )
            + "\n"
            for name in ("none", "strict")
            for i in range(CASES)
        )
    )
    return path


@pytest.mark.parametrize("write", [write_jsonl, write_csv, write_samples])
def test_of_a_case_only_what_its_record_needs_stays_in_memory(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path = write(tmp_path / ("samples.csv" if write is write_csv else "samples.jsonl"))
    tracemalloc.start()
    try:
        side = read_side(path, Grouping())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not side.problems and len(next(iter(side.outcomes.values())).records) == CASES
    assert peak / CASES < 3_000, f"{peak / CASES:.0f} bytes a case"


def test_sampled_sign_patterns_take_little_memory_and_their_draws_do_not_depend_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = np.random.default_rng(0).normal(size=10_001)
    tracemalloc.start()
    try:
        totals = statistics._sample_totals(sizes, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60e6, f"{peak / 1e6:.0f} MB"
    monkeypatch.setattr(statistics, "_MAX_SIGNS", 10**9)
    assert np.array_equal(totals, statistics._sample_totals(sizes, 0))
