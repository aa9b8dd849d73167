"""Traces of a process: all of its threads are in them, their size is bounded, and one that fails costs nothing."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import pytest
import torch

from pipeline.errors import EngineError
from pipeline.running import tracing
from pipeline.running.tracing import list_traces, record_trace, start_profiler, stop_profiler, tolerate_failure


def read_names(path: Path) -> set[str]:
    with gzip.open(path) as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if "name" in event}


def test_what_another_thread_computes_is_in_the_trace(tmp_path: Path) -> None:
    """A server generates in a thread of its own, which was there before the profiler."""
    go, values = threading.Event(), torch.ones(8, 8)

    def work() -> None:
        go.wait()
        torch.mm(values, values)

    thread = threading.Thread(target=work)
    thread.start()
    with record_trace(tmp_path / "traces" / "process-0.json.gz"):
        go.set()
        thread.join()
    (path,) = list_traces(tmp_path)
    assert path.name == "process-0.json.gz" and "aten::mm" in read_names(path)


def test_a_trace_that_no_viewer_opens_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_TRACE_MIB", -1)
    profiler = start_profiler()
    with pytest.raises(EngineError, match=r"a\.json\.gz: expected a trace of -1 MiB at most, got 0"):
        stop_profiler(profiler, tmp_path / "traces" / "a.json.gz")
    assert list_traces(tmp_path) == []


def test_a_trace_that_fails_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def trace() -> None:
        raise RuntimeError("CUPTI is\nbusy")

    with tolerate_failure("a"):
        trace()
    assert capsys.readouterr().err == "  a: no trace: CUPTI is busy\n"


def test_an_evaluation_without_traces_has_none(tmp_path: Path) -> None:
    assert list_traces(tmp_path) == []
