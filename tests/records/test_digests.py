"""Files are digested by as many threads as this process has cores."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.records import digests
from pipeline.records.digests import digest_file, digest_files


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_threads_are_as_many_as_the_cores_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container on a machine of 128 cores may have two of them."""
    asked: list[int] = []

    def start(num_threads: int) -> ThreadPoolExecutor:
        asked.append(num_threads)
        return ThreadPoolExecutor(num_threads)

    (tmp_path / "a.bin").write_bytes(b"a")
    monkeypatch.setattr(digests, "ThreadPoolExecutor", start)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {4, 5, 6})
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert digest_files(tmp_path) == {"a.bin": digest_file(tmp_path / "a.bin")}
    assert asked == [3]
