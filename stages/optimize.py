"""Turn one candidate's settings into a checkpoint and a record: `python -m stages.optimize <candidate>`."""

from __future__ import annotations

from pathlib import Path

from pipeline.optimize.candidate import build_candidate
from pipeline.params import check_candidate, load_params
from stages.cli import run_stage


def main(argv: list[str]) -> int:
    """Build the candidate named on the command line and say what it became."""
    params = load_params()
    candidate = build_candidate(check_candidate(params, argv), params, root=Path())
    checkpoint = candidate.checkpoint
    num_quantised = sum(layer.asked for layer in candidate.coverage)
    print(
        f"{candidate.name}: {checkpoint.format} {checkpoint.dtype}, {checkpoint.num_parameters / 1e6:.2f} M "
        f"parameters in {checkpoint.num_bytes / 1e6:.2f} MB, {num_quantised} layers quantised, "
        f"{len(candidate.fallbacks)} fallbacks"
    )
    return 0


if __name__ == "__main__":
    run_stage("optimize", main)
