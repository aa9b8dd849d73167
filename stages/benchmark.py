"""Stage benchmark: time one candidate against the reference on matched work. Judges nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pipeline.benchmark.matched_work import run_benchmark
from pipeline.errors import SettingsError
from pipeline.params import load_params
from pipeline.record_files import write_record
from stages.cli import run_stage

OUTPUT = Path("build/benchmarks")


def main(argv: list[str]) -> int:
    """Benchmark the candidate named on the command line; what was not equal work is recorded as refused."""
    params = load_params()
    names = params.benchmark.candidates
    if len(argv) != 1 or argv[0] not in names:
        raise SettingsError(f"expected one candidate of benchmark.candidates ({', '.join(names) or 'none'}), "
                            f"got {' '.join(argv)!r}")
    benchmark = asyncio.run(run_benchmark(argv[0], params, root=Path(), build=Path("build")))
    write_record(OUTPUT / f"{argv[0]}.json", benchmark)
    print(f"{argv[0]}: refused: {benchmark.refusal}" if benchmark.refusal
          else f"{argv[0]}: {len(benchmark.cells)} cells timed in {benchmark.work.rounds} rounds")
    return 0


if __name__ == "__main__":
    run_stage("benchmark", main)
