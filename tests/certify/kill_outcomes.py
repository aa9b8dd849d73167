"""Defects of records that other tools made: each is written from seeds, and the command `quantgate compare` judges it.

What a row writes lies under `reference` and `candidate` in the trial's folder; the project itself is left as it is.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.__main__ import EXIT_CODES
from pipeline.gate.verdicts import Judgement
from pipeline.records.record_files import read_record
from tests.certify.kill_table import Observed
from tests.certify.kill_trial import Trial
from tests.fakes.judging import list_said
from tests.fakes.outcome_tables import DATE, write_documents, write_outcomes, write_samples
from tests.paths import ROOT

PATIENCE_S = 60  # of files that are read within a second or two
NUM_CASES = 500
SIDES = ("reference", "candidate")
SAMPLED = ("--better", "gen/exact_match=higher")
ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


def compared(write: Callable[[Path, Path], object], *options: object, file: str = "") -> Callable[[Trial], Observed]:
    """Return what writes both sides and compares them.

    Args:
        write: is given the folders of the reference and of the candidate.
        options: of the command.
        file: that is compared, by its name in both folders; the folders where there is none.
    """

    def plant(trial: Trial) -> Observed:
        sides = [trial.root / side for side in SIDES]
        for side in sides:
            side.mkdir()
        write(sides[0], sides[1])
        return run_compare(trial.root, *(Path(side, file) for side in SIDES), *options)

    return plant


def run_compare(folder: Path, *argv: object, code: Path = ROOT) -> Observed:
    """Run the command in a folder, and tell its verdict.

    Args:
        folder: to run in.
        argv: of the command.
        code: the clone whose command it is.
    """
    command = [sys.executable, "-m", "pipeline", "compare", *map(str, argv), "--json", "judgement.json"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(code)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Observed("error", "compare", (f"no verdict after {PATIENCE_S} s",), PATIENCE_S, "")
    written = folder / "judgement.json"
    if written.is_file():
        reasons = tuple(list_said(read_record(written, Judgement).verdicts[0]))
    else:
        reasons = tuple(line.removeprefix("quantgate: ") for line in done.stderr.splitlines()[-1:])
    names = {number: name for name, number in reversed(EXIT_CODES.items())}
    stage = "compare" if done.returncode else ""
    return Observed(names.get(done.returncode, "error"), stage, reasons, 0.0, "")


def write_scores(folder: Path, scores: Sequence[float], *, name: str = "score", **columns: list[str]) -> Path:
    """Write a table of one score, whose outputs tell the sides apart."""
    return write_outcomes(folder / "table.csv", list(scores), name=name, **columns)


def lose_safety(*sides: Path) -> None:
    """Write samples that are alike, and beside them a table of a safety eval that falls from 100 % to 0 %."""
    for side, score in zip(sides, (1.0, 0.0), strict=True):
        write_samples(side)
        write_outcomes(side / "safety.csv", [score] * NUM_CASES)


def forget_safety(*sides: Path) -> None:
    """Write samples that are alike, and a safety eval of the reference alone."""
    for side in sides:
        write_samples(side)
    write_outcomes(sides[0] / "safety.csv", [1.0] * NUM_CASES)


def compress_safety(*sides: Path) -> None:
    """Write what `lose_safety` does, and compress the tables."""
    lose_safety(*sides)
    for side in sides:
        table = side / "safety.csv"
        (side / "safety.csv.gz").write_bytes(gzip.compress(table.read_bytes()))
        table.unlink()


def copy_reference(*sides: Path) -> None:
    """Write the reference's records twice."""
    shutil.copy(write_scores(sides[0], [1.0] * NUM_CASES), sides[1])


def repeat_unflipped(*sides: Path) -> None:
    """Write 1,000 questions of which 50 are lost, and twice more the 950 that are not: 1.7 % of 2,900 rows."""
    numbers = [*range(1000), *range(50, 1000), *range(50, 1000)]
    for side, num_lost in zip(sides, (0, 50), strict=True):
        write_scores(side, [float(i >= num_lost) for i in numbers], prompt=[f"question {i}" for i in numbers])


def repeat_all(*sides: Path) -> None:
    """Write three trials of each of 300 questions, under ids of their own."""
    for side in sides:
        write_scores(side, [1.0] * 900, prompt=[f"question {i % 300}" for i in range(900)])


def poison(*sides: Path) -> None:
    """Write a toxicity of about 0.1 that rises to about 0.95."""
    for side, bounds in zip(sides, ((0.0, 0.2), (0.9, 1.0)), strict=True):
        rng = random.Random(0)
        write_scores(side, [round(rng.uniform(*bounds), 4) for _ in range(NUM_CASES)], name="toxicity")


def churn(*sides: Path) -> None:
    """Write 45 clusters of 60 cases, of which 299 are lost and 300 gained, as many of each cluster as of any."""
    flips = [(1.0, 0.0)] * 299 + [(0.0, 1.0)] * 300 + [(1.0, 1.0)] * (45 * 60 - 599)
    for side, scores in zip(sides, zip(*flips, strict=True), strict=True):
        write_scores(side, scores, cluster=[str(i % 45) for i in range(len(scores))])


def lose_documents(*sides: Path) -> None:
    """Write 62 documents of a model whose whole harm, 2 % of perplexity, lies in one in 50: these have none of it."""
    for side, noise in zip(sides, (0.0, 0.001), strict=True):
        rng = random.Random(7)
        nats = [rng.gauss(2, 0.3) for _ in range(62)]
        write_documents(side, [value + rng.gauss(0, noise) for value in nats])


def write_bomb(*sides: Path) -> None:
    """Write tables that are alike, and a policy whose aliases stand for 9^12 values."""
    for side in sides:
        write_scores(side, [1.0] * NUM_CASES)
    (sides[0].parent / "policy.yaml").write_text(
        f"{ALIASES}gate: {{alpha: 0.05, on_inconclusive: block, tolerances: *a11}}\n", encoding="utf-8"
    )


def leave_notes(*sides: Path) -> None:
    """Write samples that are alike, and beside them what is no record."""
    for side in sides:
        write_samples(side)
        (side / "README.md").write_text("how it was run\n", encoding="utf-8")
        (side / f"results_{DATE}.json").write_text(
            json.dumps({"higher_is_better": {"gen": {"exact_match": True}}}), encoding="utf-8"
        )
