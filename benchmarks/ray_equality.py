"""Is the verdict of candidates that a Ray cluster evaluated the one of a single process, and so is every record?

    python -m benchmarks.ray_equality PRODUCT [--candidates NAME ...] [--nodes 3]

Needs [Ray](../docs/scale.md#ray), and a finished project (`make repro`). In a copy of it the candidates (all of the
product, unless some are named) are evaluated anew, on a cluster of one machine with nodes of one core each, and the
product is judged. Records are compared without latencies, and verdict.json without the seconds that evaluations took.
Prints a row of Markdown a candidate, and a line on the verdict; exits 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ray_faults import NOT_COPIED, ROOT, Trial, describe, read_records
from pipeline.gate.verdicts import VERDICT_FILE
from pipeline.products.params import get_product, load_params
from pipeline.settings.base import Product


def main() -> None:
    """Evaluate, judge, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("product")
    parser.add_argument("--candidates", nargs="*")
    parser.add_argument("--nodes", type=int, default=3)
    options = parser.parse_args()
    product = get_product(load_params(), options.product, kind=Product)
    is_equal = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "project"
        shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
        print("| candidate | s | against one process |\n|---|---:|---|", flush=True)
        for name in options.candidates or list(product.candidates):
            trial = Trial(folder, product.name, name, options.nodes)
            is_equal &= _evaluate(trial)
        subprocess.run([sys.executable, "-m", "stages.compare", product.name], cwd=folder, check=True)
        ours, theirs = (_read_verdict(place / product.reports) for place in (folder, ROOT))
    print(f"\nverdict.json of {len(ours['verdicts'])} candidates: {'equal' if ours == theirs else 'DIFFERENT'}")
    sys.exit(not (is_equal and ours == theirs))


def _evaluate(trial: Trial) -> bool:
    """Evaluate a candidate on a cluster; say whether its records are those of the finished project."""
    own = Path("build") / trial.product / "evaluations" / trial.candidate
    serial = read_records(ROOT / own)
    shutil.rmtree(trial.folder / own)
    start = time.monotonic()
    with trial.start_cluster():
        trial.start()
        code = trial.finish()
    print(f"| {trial.candidate} | {time.monotonic() - start:.0f} | {describe(trial, code, serial)} |", flush=True)
    return code == 0 and read_records(trial.folder / own) == serial


def _read_verdict(reports: Path) -> dict[str, Any]:
    """Return a product's verdict.json without the seconds that evaluations took."""
    verdict: dict[str, Any] = json.loads((reports / VERDICT_FILE).read_text(encoding="utf-8"))
    for one in verdict["verdicts"]:
        one.pop("seconds")
    return verdict


if __name__ == "__main__":
    main()
