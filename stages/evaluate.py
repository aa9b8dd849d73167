"""Stage evaluate: run all evals of one candidate through its endpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pipeline.evals.evaluate import evaluate_candidate
from pipeline.params import check_candidate, load_params
from pipeline.serving_config import read_candidate
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Evaluate the candidate named on the command line."""
    params = load_params()
    candidate = read_candidate(Path("build"), check_candidate(params, argv), params)
    asyncio.run(evaluate_candidate(candidate, params, root=Path(), build=Path("build")))
    return 0


if __name__ == "__main__":
    run_stage("evaluate", main)
