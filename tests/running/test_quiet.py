"""What libraries say that no user can act on stays away, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.running.quiet import drop_lines

_IN_A_THREAD = """
import os, sys, threading
from pathlib import Path
import torch
from torch.profiler import ProfilerActivity, profile
from pipeline.running.quiet import silence_profiler
from pipeline.running.tracing import record_trace

def trace():
    with record_trace(Path(sys.argv[1])):
        torch.ones(8, 8) @ torch.ones(8, 8)

def count():
    silence_profiler()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    Path(sys.argv[2]).write_text("\\n".join(event.key for event in profiler.key_averages()))

for work in (trace, count):
    if not os.fork():  # a process has a first start once
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        os._exit(0)
    os.wait()
"""


def test_a_profiler_that_starts_in_a_worker_thread_prints_no_error(tmp_path: Path) -> None:
    """Users took "ERROR: External init callback must run in same thread" for a failure of their candidate."""
    paths = [tmp_path / "trace.json", tmp_path / "counted.txt"]
    command = [sys.executable, "-c", _IN_A_THREAD, *map(str, paths)]
    env = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}  # other tests set it
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["USDT"] * 2, "start and end of the trace"
    assert all("aten::mm" in path.read_text(encoding="utf-8") for path in paths)


def test_only_lines_that_begin_so_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), drop_lines("noise: ", "more noise"):
        os.write(2, b"noise: a\nno device\nmore noise\nERROR: a noise: of others\n")
        os.write(1, b"noise: on stdout\n")
        raise ZeroDivisionError
    assert capfd.readouterr() == ("noise: on stdout\n", "no device\nERROR: a noise: of others\n")
