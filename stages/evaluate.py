"""Stage evaluate: run all evals of one candidate through its endpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.evals.evaluate import evaluate_candidate
from pipeline.params import load_params
from pipeline.serving_config import read_candidate
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Evaluate the candidate named on the command line."""
    params = load_params()
    if len(argv) != 1 or argv[0] not in params.candidates:
        raise SettingsError(f"expected one candidate of {', '.join(params.candidates)}, got {' '.join(argv)!r}")
    candidate = read_candidate(Path("build"), argv[0], params)
    asyncio.run(evaluate_candidate(candidate, params, root=Path(), build=Path("build")))
    return 0


if __name__ == "__main__":
    run_stage("evaluate", main)
