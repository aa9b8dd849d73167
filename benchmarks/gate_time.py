"""How long compare and gate take: `python -m benchmarks.gate_time [candidates] [cases] [copies]`.

Writes synthetic records of a reference and candidates, then runs the two stages as DVC does, each in a process of its
own, and prints wall and CPU seconds and the peak memory of each. There are `copies` evals each of workflows, tool calls
and choices, of `cases` cases, and one of perplexity, with a document per ten cases. The default, 5 candidates with
2,000 cases and one eval of a kind, takes seconds; 100 candidates, 2,000 cases and 3 copies are two million records.

A candidate's records are the reference's with another fingerprint, and with some answers lost: that is what records
look like, and it is quick to write. Not covered: pictures and detections, whose gate spends its time on what lies
beside the records.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline.records.digests import digest_file
from pipeline.records.evaluations import EvalFile, Evaluation
from pipeline.records.record_files import read_record, write_record
from tests.fakes.synthetic_records import (
    PRODUCT,
    describe_project,
    make_candidate,
    make_params,
    write_candidate,
    write_tree,
)

ROOT = Path(__file__).resolve().parent.parent
REPEATED = ("workflows", "calls", "choices")  # evals of which there are copies
LOST_EVERY = 50  # cases, of which a candidate loses one: a fiftieth


def run_stage_timed(stage: str, folder: Path) -> str:
    """Run one stage in `folder` and describe what it cost."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", f"stages.{stage}", PRODUCT],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    return (
        f"{stage:<8} exit {os.waitstatus_to_exitcode(status)}  wall {wall:5.2f} s  "
        f"cpu {usage.ru_utime + usage.ru_stime:5.2f} s  peak {usage.ru_maxrss / 1024:4.0f} MiB"
    )


def name_copies(eval_name: str, copies: int) -> list[str]:
    """Return the names of an eval and its copies."""
    return [eval_name, *(f"{eval_name}-{i}" for i in range(2, copies + 1))] if eval_name in REPEATED else [eval_name]


def widen_product(product: dict[str, Any], copies: int) -> None:
    """Ask for every copy what is asked for the eval."""
    product["evals"] = {
        name: settings for first, settings in product["evals"].items() for name in name_copies(first, copies)
    }
    gate = product["gate"]
    gate["tolerances"] = {
        f"{name}/{metric}": tolerance
        for key, tolerance in gate["tolerances"].items()
        for first, metric in [key.split("/")]
        for name in name_copies(first, copies)
    }


def write_candidate_records(build: Path, name: str, number: int, copies: int) -> None:
    """Write a candidate's evaluation from the reference's: its fingerprint, and every so often a loss.

    Args:
        build: holds the evaluation of the reference.
        name: of the candidate.
        number: of the candidate, which says which cases it loses.
        copies: evals of each kind that is repeated.
    """
    reference, candidate = build / "evaluations" / "reference", make_candidate(name)
    evaluation = read_record(reference / "evaluation.json", Evaluation)
    folder = build / "evaluations" / name
    folder.mkdir(parents=True, exist_ok=True)
    evals: dict[str, EvalFile] = {}
    for first in [*evaluation.evals]:
        source = reference / evaluation.evals[first].records
        lines = source.read_text().replace(evaluation.fingerprint, candidate.fingerprint).splitlines(keepends=True)
        if number and first in REPEATED:
            for i in range(number % LOST_EVERY, len(lines), LOST_EVERY):
                lines[i] = lines[i].replace('"output":"', '"output":"no: ').replace(":1.0", ":0.0")
        for copied in name_copies(first, copies):
            path = folder / f"{copied}.jsonl"
            path.write_text("".join(lines))
            evals[copied] = evaluation.evals[first].model_copy(
                update={"records": path.name, "sha256": digest_file(path)}
            )
    for beside in ("prose.npz", "canary.jsonl"):
        (folder / beside).write_bytes((reference / beside).read_bytes())
    write_candidate(build, candidate)
    write_record(
        folder / "evaluation.json",
        evaluation.model_copy(
            update={
                "candidate": name,
                "fingerprint": candidate.fingerprint,
                "served_by": candidate.facts,
                "evals": evals,
                "checkpoint_digest": candidate.checkpoint.digest,
            }
        ),
    )


def main(num_candidates: int, num_cases: int, copies: int) -> None:
    """Write the records, run both stages, print a line for each."""
    names = [f"candidate-{i}" for i in range(1, num_candidates + 1)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        build = folder / "build" / PRODUCT
        write_tree(build, {}, num_cases=num_cases)
        for i, name in enumerate([*names, "reference"], start=1):
            write_candidate_records(build, name, 0 if name == "reference" else i, copies)
        params = describe_project(make_params(names, names[:2]))
        widen_product(params["products"][PRODUCT], copies)
        (folder / "params.yaml").write_text(json.dumps(params))  # JSON is YAML
        num_records = sum(path.read_bytes().count(b"\n") for path in build.glob("evaluations/*/*.jsonl"))
        print(
            f"{num_candidates} candidates and a reference x {3 * copies} evals x {num_cases:,} cases, and "
            f"perplexity on {max(num_cases // 10, 40)} documents: {num_records:,} records"
        )
        for stage in ("compare", "gate"):
            print(run_stage_timed(stage, folder))


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    main(*(arguments + [5, 2000, 1][len(arguments) :]))
