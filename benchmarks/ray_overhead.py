"""What does Ray cost against local workers on the same cores?

    python -m benchmarks.ray_overhead CANDIDATE [--workers 2] [--rounds 2] [--workflows N]

Needs [Ray](../docs/scale.md#ray), and a project in which the candidate is built (`python -m stages.optimize`). In
copies of it the candidate is evaluated anew by workers of this machine, and by as many replicas on a cluster of this
machine alone, as `ray start --head` makes it; in turns, so that a busy machine is busy for both. Prints a row of
Markdown a round: the seconds of the stage, and whether the records are equal without latencies. The cluster is started
before. `--workflows` draws so many for the copies, instead of those that ship: a longer run tells what Ray costs once
from what each shard costs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks.ray_faults import NOT_COPIED, ROOT, Trial, read_records
from evalsets.make.shipped import make_workflows
from evalsets.seal import seal
from pipeline.evalsets.cases import CASES_FILE
from pipeline.products.params import find_owner, load_params
from pipeline.records.files import write_text
from pipeline.settings.base import Product


def run_here(trial: Trial) -> float:
    """Evaluate by workers of this machine; return seconds."""
    trial.set_execution(f"{{kind: local, num_workers: {trial.num_nodes}}}")
    return time_stage(trial)


def run_on_ray(trial: Trial) -> float:
    """Evaluate by replicas; return seconds."""
    with trial.start_node():
        return time_stage(trial)


def draw_workflows(folder: Path, num: int) -> None:
    """Write workflows in place of an evalset's, drawn as those that ship: three of a depot, whole depots alone."""
    cases = make_workflows(Random("ray_overhead"), num_depots=num // 3)
    write_text(folder / CASES_FILE, "".join(json.dumps(case) + "\n" for case in cases))
    seal(folder)


def time_stage(trial: Trial) -> float:
    """Run the stage; return seconds.

    Raises:
        SystemExit: it failed.
    """
    start = time.monotonic()
    trial.start()
    if trial.finish():
        raise SystemExit("\n".join(trial.said))
    return time.monotonic() - start


def main() -> None:
    """Evaluate in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("candidate")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workflows", type=int, help="drawn for this run, three of a depot; else those that ship")
    options = parser.parse_args()
    owner = find_owner(load_params(), options.candidate, kind=Product)
    product = owner.name
    if options.workflows is not None and (options.workflows < 3 or "workflows" not in owner.evals):
        parser.error("--workflows: expected 3 or more, and a candidate with an eval of that name")
    ways: tuple[Callable[[Trial], float], ...] = (run_here, run_on_ray)
    print("| round | workers, s | Ray, s | ratio | records |\n|---:|---:|---:|---:|---|", flush=True)
    ratios = []
    for number in range(1, options.rounds + 1):
        times, records = [], []
        for way in ways:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "project"
                shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
                shutil.rmtree(folder / "build" / product / "evaluations", ignore_errors=True)
                if options.workflows:
                    draw_workflows(folder / "evalsets" / "workflows", options.workflows)
                times.append(way(Trial(folder, product, options.candidate, options.workers)))
                records.append(read_records(folder / "build" / product / "evaluations" / options.candidate))
        ratios.append(times[1] / times[0])
        is_equal = "equal" if records[0] == records[1] else "DIFFERENT"
        print(f"| {number} | {times[0]:.1f} | {times[1]:.1f} | {ratios[-1]:.2f} | {is_equal} |", flush=True)
    print(f"\nmedian ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
