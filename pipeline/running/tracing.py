"""Traces: what a profiler saw of a few steps, as a file for chrome://tracing or https://ui.perfetto.dev.

A candidate with `trace: true` is traced when its evaluation is done, on a few requests that nothing judges or times:
one file a process, under `traces/` of the evaluation folder. Neither the gate nor a release knows of them. A trace
that can't be made is a line on stderr and costs no result.

Whoever traces asks for a few steps. A file of ours above MAX_TRACE_MIB is not kept: no viewer opens it. Those that vLLM
writes are not measured.

Source: torch.profiler, https://docs.pytorch.org/docs/stable/profiler.html
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import EngineError
from pipeline.running.quiet import prepare_profiler

TRACES = "traces"  # folder inside an evaluation's
SUFFIX = ".json.gz"
MAX_TRACE_MIB = 64  # packed; unpacked about 15 times as much


def start_profiler() -> Any:
    """Start to record what all threads of this process do, and what they have a GPU do; return the profiler."""
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    prepare_profiler(*activities)
    # a server generates in another thread than the one that starts the profiler
    profiler = profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
    profiler.start()
    return profiler


def stop_profiler(profiler: Any, path: Path) -> None:
    """End a recording and write it to a file, packed.

    Raises:
        EngineError: the file is too large, and removed.
    """
    profiler.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    if (size_mib := path.stat().st_size >> 20) > MAX_TRACE_MIB:
        path.unlink()
        raise EngineError(f"{path.name}: expected a trace of {MAX_TRACE_MIB} MiB at most, got {size_mib}")


@contextlib.contextmanager
def record_trace(path: Path) -> Iterator[None]:
    """Record what this process does meanwhile, and write it to a file whose name ends with SUFFIX."""
    profiler = start_profiler()
    try:
        yield
    finally:
        stop_profiler(profiler, path)


@contextlib.contextmanager
def tolerate_failure(candidate: str) -> Iterator[None]:
    """Say on stderr why a candidate has no trace, and go on: its evaluation is done."""
    try:
        yield
    except Exception as error:  # of whatever library: no trace is worth an evaluation
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        print(f"  {candidate}: no trace: {reason}", file=sys.stderr, flush=True)


def list_traces(evaluation: Path) -> list[Path]:
    """Return the traces beside an evaluation, of whichever engine: embedded or vLLM."""
    return sorted((evaluation / TRACES).glob("*.gz"))
