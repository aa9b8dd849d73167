"""What `quantgate compare` costs on two tables of graded scores: `python -m benchmarks.outcomes_cost [cases ...]`.

Writes a table a side, JSONL with a prompt, an output and a score that differs in every case, and prints wall and CPU
seconds and the peak memory of the command, in a process of its own. 100,000 cases take half a minute.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_tables(folder: Path, num_cases: int) -> list[Path]:
    """Write both sides; the candidate loses 0.0005 on average."""
    rng, paths = random.Random(7), [folder / "reference.jsonl", folder / "candidate.jsonl"]
    with paths[0].open("w") as ours, paths[1].open("w") as theirs:
        for i in range(num_cases):
            score = rng.betavariate(4, 2)
            other = min(1.0, max(0.0, score + rng.gauss(-0.0005, 0.05)))
            for file, value in ((ours, score), (theirs, other)):
                case = {
                    "case_id": f"q{i}",
                    "prompt": f"Question number {i}: what is asked here, in some words?",
                    "output": f"an answer that is worth {value:.3f}",
                    "rouge": value,
                }
                file.write(json.dumps(case) + "\n")
    return paths


def measure(num_cases: int) -> str:
    """Compare the two tables and describe what it cost."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pipeline",
            "compare",
            *map(str, write_tables(Path(folder), num_cases)),
            "--better",
            "rouge=higher",
            "--tolerance",
            "0.01",
        ]
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
    return (
        f"{num_cases:>9,} cases  exit {os.waitstatus_to_exitcode(status)}  wall {wall:6.1f} s  "
        f"cpu {usage.ru_utime + usage.ru_stime:6.1f} s  peak {usage.ru_maxrss / 1024:5.0f} MiB"
    )


if __name__ == "__main__":
    for argument in sys.argv[1:] or ["2000", "20000", "100000"]:
        print(measure(int(argument)))
