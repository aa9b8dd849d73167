"""A large file that did not change is not read again; one that may have is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.records.digests import NOT_CONTENT, digest_checkpoint, digest_folder
from pipeline.running import kept_digests, stage_code
from pipeline.running.kept_digests import KEPT, KEPT_CODE, digest_code_once, digest_once, digest_watched
from tests.fakes.fake_hub import REFERENCE

LARGE = 1 << 20


def later() -> int:
    """Return a time at which a file that was just written has settled."""
    return time.time_ns() + 10**10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models/tiny"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(LARGE))
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("notes")
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were known, in the order in which folders were digested."""
    names: list[str] = []
    digest_files = kept_digests.digest_files

    def spy(folder: Path, **options: object) -> dict[str, str]:
        known = options["known"]
        assert isinstance(known, dict)
        digests: dict[str, str] = digest_files(folder, **options)  # type: ignore[arg-type]
        names.extend(name for name in digests if name not in known)
        return digests

    monkeypatch.setattr(kept_digests, "digest_files", spy)
    return names


def test_a_large_file_is_read_once(folder: Path, tmp_path: Path, read: list[str]) -> None:
    """A small one always: that costs nothing."""
    for _ in range(2):
        assert digest_once(folder, root=tmp_path, ignore=NOT_CONTENT, clock_ns=later) == digest_checkpoint(folder)
    assert read == ["config.json", "model.safetensors", "config.json"]


def _overwrite(path: Path) -> None:
    """Change one byte in place: size, inode and time stay."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"\1")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _replace(path: Path) -> None:
    """Put another file of the same size and time in its place."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"\1" + bytes(LARGE - 1))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [_overwrite, _replace])
def test_a_change_that_keeps_size_and_time_is_seen(
    folder: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    before = digest_once(folder, root=tmp_path, clock_ns=later)
    change(folder / "model.safetensors")
    after = digest_once(folder, root=tmp_path, clock_ns=later)
    assert after != before and after == digest_folder(folder)


def test_a_file_that_was_just_written_is_not_kept(folder: Path, tmp_path: Path, read: list[str]) -> None:
    """It may change once more within one tick of the clock of its file system."""
    status = (folder / "model.safetensors").stat()
    for _ in range(2):
        digest_once(folder, root=tmp_path, ignore=NOT_CONTENT, clock_ns=lambda: status.st_ctime_ns + 10**9)
    assert read.count("model.safetensors") == 2 and not (tmp_path / KEPT).exists()


@pytest.mark.parametrize("damage", ["", "[]", '{"a": 1}', "{", '{"a": [1, 2]}'])
def test_a_damaged_list_is_none(folder: Path, tmp_path: Path, damage: str) -> None:
    (tmp_path / KEPT).parent.mkdir(parents=True)
    (tmp_path / KEPT).write_text(damage)
    assert digest_once(folder, root=tmp_path, clock_ns=later) == digest_folder(folder)


def test_files_that_are_gone_are_forgotten(folder: Path, tmp_path: Path) -> None:
    digest_once(folder, root=tmp_path, clock_ns=later)
    (folder / "model.safetensors").rename(folder / "moved.safetensors")
    digest_once(folder, root=tmp_path, clock_ns=later)
    kept = (tmp_path / KEPT).read_text()
    assert "moved.safetensors" in kept and "model.safetensors" not in kept


def test_a_pinned_model_is_its_commit(folder: Path, tmp_path: Path) -> None:
    """Nothing is downloaded and nothing read for it."""
    assert digest_watched(REFERENCE, tmp_path) == REFERENCE
    assert digest_watched("models/tiny", tmp_path) == digest_checkpoint(folder)


def test_code_is_read_once_until_a_file_of_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it stage `env` reads every file of the project for each stage of each kind."""
    code = tmp_path / "stages/judge.py"
    code.parent.mkdir()
    code.write_text("x = 1\n")
    monkeypatch.setattr(stage_code, "ROOT", tmp_path)
    asked: list[str] = []

    def read_code(_: str, kind: str) -> str:
        asked.append(kind)
        return f"{code.read_text()}{kind}"

    monkeypatch.setattr(stage_code, "digest_code", read_code)

    def digest(*kinds: str, clock_ns: Callable[[], int] = later) -> list[str]:
        asked.clear()
        wanted = [("judge", kind) for kind in kinds]
        return list(digest_code_once(wanted, root=tmp_path, clock_ns=clock_ns).values())

    assert digest("text", clock_ns=time.time_ns) == ["x = 1\ntext"] and digest("text") == ["x = 1\ntext"]
    assert asked == ["text"]  # a file that was just written may change within a tick of the clock
    assert digest("text", "vision") == ["x = 1\ntext", "x = 1\nvision"] and asked == ["vision"]
    assert digest("vision") == ["x = 1\nvision"] and not asked
    _overwrite_text(code, "x = 2\n")
    assert digest("text") == ["x = 2\ntext"] and asked == ["text"]
    (code.parent / "new.py").touch()
    assert digest("text") and asked == ["text"]
    (tmp_path / KEPT_CODE).write_text("[]")
    assert digest("text") and asked == ["text"]


def _overwrite_text(path: Path, text: str) -> None:
    """Write as many bytes into the same file, as of the same time."""
    status = path.stat()
    with path.open("r+") as file:
        file.write(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
