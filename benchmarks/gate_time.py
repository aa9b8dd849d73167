"""How long compare and gate take: `python -m benchmarks.gate_time [candidates] [cases]`.

Writes synthetic records of four evals per candidate, then runs the two stages as DVC does, each in
a process of its own, and prints wall and CPU seconds and the peak memory of each. The default is
5 candidates with 2,000 cases an eval, and a document per ten cases for perplexity.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.synthetic_records import Behaviour, make_params, write_tree

ROOT = Path(__file__).resolve().parent.parent


def run_stage_timed(stage: str, folder: Path) -> str:
    """Run one stage in `folder` and describe what it cost."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", f"stages.{stage}"], cwd=folder, stdout=subprocess.DEVNULL,
                               env=os.environ | {"PYTHONPATH": str(ROOT)})
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    return (f"{stage:<8} exit {os.waitstatus_to_exitcode(status)}  wall {wall:5.2f} s  "
            f"cpu {usage.ru_utime + usage.ru_stime:5.2f} s  peak {usage.ru_maxrss / 1024:4.0f} MiB")


def main(num_candidates: int, num_cases: int) -> None:
    """Write the records, run both stages, print a line for each."""
    names = [f"candidate-{i}" for i in range(num_candidates)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tree(folder / "build", {name: Behaviour({"workflows": 0.01 * i}) for i, name in enumerate(names)},
                   num_cases=num_cases)
        params = make_params(names, names[:2]).model_dump(exclude_none=True)
        (folder / "params.yaml").write_text(json.dumps(params))  # JSON is YAML
        print(f"{num_candidates} candidates x 4 evals x {num_cases:,} cases")
        for stage in ("compare", "gate"):
            print(run_stage_timed(stage, folder))


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    main(*(arguments + [5, 2000][len(arguments):]))
