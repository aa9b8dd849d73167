"""Outcomes as tables and as samples of lm-eval, and a call of the command on them: what tests of the command share."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import pipeline.__main__ as command
from tests.paths import ROOT

REAL = ROOT / "tests/golden/records"  # of other tools' own
DATE = "2026-11-22T05-25-09.325403"


def write_outcomes(path: Path, scores: list[float], *, name: str = "score", **columns: list[str]) -> Path:
    """Write a table of cases "c0", "c1", ... with one score and other columns.

    A column `run` says whose it is: two tables without it that score alike would be one file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["case_id", name, "run", *columns])
        writer.writerows(
            [f"c{i}", score, f"run {path}", *(column[i] for column in columns.values())]
            for i, score in enumerate(scores)
        )
    return path


def write_samples(folder: Path, *, num: int = 200, task: str = "gen", wrong: int = 0) -> Path:
    """Write lm-eval's samples of one task, with the documents of a real file numbered anew."""
    first = json.loads((REAL / f"samples_gen_{DATE}.jsonl").read_text().splitlines()[0])
    path = folder / f"samples_{task}_{DATE}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        first
        | {
            "doc_id": i,
            "doc_hash": f"{task} {i}",
            "prompt_hash": str(i),
            "filter": "none",
            "resps": [[f"{folder.name} {i}"]],
            "exact_match": float(i >= wrong),
            "arguments": {"gen_args_0": {"arg_0": f"{task} {i}", "arg_1": {}}},
        }
        for i in range(num)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_documents(folder: Path, nats_per_word: Sequence[float], *, num_words: int = 256) -> Path:
    """Write lm-eval's samples of texts of equal length, with the documents of a real file numbered anew."""
    (real,) = REAL.glob("samples_ppl_*.jsonl")
    first = json.loads(real.read_text().splitlines()[0])
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        first
        | {
            "doc_id": i,
            "doc_hash": str(i),
            "prompt_hash": str(i),
            "resps": [[str(-nats * num_words)]],
            "arguments": {"gen_args_0": {"arg_0": f"text {i}"}},
            "metrics": ["word_perplexity"],
            "word_perplexity": [-nats * num_words, num_words],
        }
        for i, nats in enumerate(nats_per_word)
    ]
    path = folder / f"samples_texts_{DATE}.jsonl"
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "bits_per_byte"}) + "\n" for row in rows))
    return path


def run(*argv: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the command, and return its exit code and all that it wrote."""
    code = command.main([str(argument) for argument in argv])
    said = capsys.readouterr()
    return code, said.out + said.err
