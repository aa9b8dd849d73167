"""What the benchmarks of GPUs share: waiting for the GPU, replaying a CUDA graph, and writing times down."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.records.medians import bound_median

Run = Callable[[], torch.Tensor]


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def capture(run: Run, device: str) -> Run:
    """Return what replays a run as a CUDA graph, without Python and launches; on a CPU the run itself."""
    if device != "cuda":
        return run
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


def bound_milliseconds(seconds: Sequence[float], *, digits: int) -> str:
    """Write the median of times with its interval."""
    found = bound_median([1e3 * s for s in seconds])
    return f"{found.median:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def ratio(seconds: Sequence[float], base: Sequence[float]) -> str:
    """Write the median of the ratios of times that were taken in turn, with its interval."""
    found = bound_median([s / b for s, b in zip(seconds, base, strict=True)])
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"


def write_times(path: Path | None, times: Mapping[str, Any]) -> None:
    """Write every time so far: a run that is cut short keeps what it has."""
    if path is not None:
        path.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
