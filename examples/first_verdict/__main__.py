"""Write the records that `make demo` judges, from a finished run of the shipped agent.

    python -m examples.first_verdict

A table for each eval and side: a case's name, its score, and where they say something its cluster and those of its
buckets that the agent tolerates losses in. The reference, `agent`, is as it came, the candidate `gptq-short`: INT4 by
GPTQ, calibrated on short generic texts.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from pathlib import Path

from pipeline.products.params import load_params
from pipeline.records.evaluations import CaseRecord, read_cases

BUILD = Path("build/agent/evaluations")
HERE = Path(__file__).parent
SIDES = ("agent", "gptq-short")
SCORES = {"choices": "accuracy", "workflows": "completed"}  # of each eval: the score that is kept


def main() -> None:
    """Write a folder for each side."""
    tolerances = load_params().products["agent"].gate.tolerances.values()
    gated = {bucket for tolerance in tolerances for bucket in tolerance.buckets}
    for side in SIDES:
        (HERE / side).mkdir(exist_ok=True)
        for name, score in SCORES.items():
            write_table(HERE / side / f"{name}.csv", read_cases(BUILD / side / f"{name}.jsonl"), score, gated)


def write_table(path: Path, records: Sequence[CaseRecord], score: str, gated: Collection[str]) -> None:
    """Write a case a line; whole numbers without a point, as most are 0 or 1."""
    columns = {
        "case_id": [record.case_id for record in records],
        "cluster": [record.cluster for record in records],
        "buckets": [";".join(bucket for bucket in record.buckets if bucket in gated) for record in records],
        score: [f"{record.scores[score]:g}" for record in records],
    }
    if columns["cluster"] == columns["case_id"]:
        del columns["cluster"]
    if not any(columns["buckets"]):
        del columns["buckets"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


if __name__ == "__main__":
    main()
