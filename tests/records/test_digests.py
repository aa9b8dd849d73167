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


def test_a_linked_folder_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    """Some pipelines link a component to another pipeline's: its weights would be in no digest."""
    whole, linked, shared = (tmp_path / name for name in ("whole", "linked", "shared"))
    for folder in (whole / "unet", shared):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"w")
    linked.mkdir()
    (linked / "unet").symlink_to(shared)
    assert digest_files(linked) == digest_files(whole) == {"unet/weights": digest_file(shared / "weights")}
    (shared / "weights").write_bytes(b"other")
    assert digest_files(linked) != digest_files(whole)


def test_a_link_to_a_folder_above_leads_to_nothing_new(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"f")
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert list(digest_files(tmp_path)) == ["a/file"]
    (tmp_path / "beside").write_bytes(b"b")
    assert list(digest_files(tmp_path / "a")) == ["file"], "what lies beside the folder is none of its content"


def test_a_link_from_a_linked_folder_back_to_a_folder_above_leads_to_nothing_new(tmp_path: Path) -> None:
    model, shared = tmp_path / "models" / "ours", tmp_path / "shared" / "unet"
    for folder in (model, shared):
        folder.mkdir(parents=True)
    (shared / "weights").write_bytes(b"w")
    (model / "unet").symlink_to(shared)
    for i, above in enumerate((tmp_path, shared.parent, model)):
        (above / "beside").write_bytes(b"b")
        (shared / f"back-{i}").symlink_to(above)
    (model / "beside").unlink()
    assert list(digest_files(model)) == ["unet/weights"]
