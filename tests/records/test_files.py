"""Files that others may read."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.records.files import share_files


def test_files_get_the_mode_of_new_ones_and_links_keep_theirs(tmp_path: Path) -> None:
    """safetensors leaves its files to their owner alone, so that no server of another user could read weights."""
    folder, other = tmp_path / "made", tmp_path / "other"
    (folder / "deep").mkdir(parents=True)
    for path in (folder / "a", folder / "deep/b", other):
        path.write_text("x")
        path.chmod(0o600)
    (folder / "symbolic").symlink_to(other)
    os.link(other, folder / "hard")
    before = os.umask(0o027)
    try:
        share_files(folder)
    finally:
        os.umask(before)
    assert {path.name: path.lstat().st_mode & 0o777 for path in (folder / "a", folder / "deep/b", other)} == {
        "a": 0o640,
        "b": 0o640,
        "other": 0o600,
    }
    assert sorted(path.name for path in folder.iterdir()) == ["a", "deep", "hard", "symbolic"]
