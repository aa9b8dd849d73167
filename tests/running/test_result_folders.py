"""Whether results can be written is asked before any work: each folder that stands in their way is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.errors import JournalError
from pipeline.running.result_folders import check_evaluation_folders, list_retired

NAME = "model"


def protect(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let nobody write to a folder: its rights would not bind root, who runs tests in containers."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)


@pytest.mark.parametrize(
    "place",
    [
        ".",
        "evaluations",
        "evaluations/model",
        "evaluations/model/traces",
        "evaluations/.model.old",
        "evaluations/.model.new",
        "evaluations/.model.tmp",
        "journal",
        "journal/model",
        "journal/model/finished",
    ],
)
def test_a_folder_that_can_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A last evaluation that could not be removed was found out after the next one, as "Directory not empty"."""
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    protect(monkeypatch, folder)
    with pytest.raises(JournalError) as caught:
        check_evaluation_folders(tmp_path, NAME)
    assert str(caught.value).startswith(f"{folder}: expected a folder that user {os.getuid()} may write to, got no ")
    assert "permission" in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_can_not_even_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, list_folder = tmp_path / "evaluations/model/config", os.scandir
    folder.mkdir(parents=True)
    protect(monkeypatch, folder)

    def scandir(path: str) -> os._ScandirIterator[str]:
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(JournalError, match=f"{folder}: expected a folder that user"):
        check_evaluation_folders(tmp_path, NAME)


def test_folders_of_others_may_be_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("evaluations/other", "evaluations/model-2", "candidates/model", "journal/other"):
        (tmp_path / name).mkdir(parents=True)
        protect(monkeypatch, tmp_path / name)
        check_evaluation_folders(tmp_path, NAME)


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "build").write_text("")
    with pytest.raises(JournalError, match="build: expected a folder for results, got a file; move it away"):
        check_evaluation_folders(tmp_path / "build", NAME)
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal/model").write_text("")
    with pytest.raises(JournalError, match="journal/model: expected a folder for results, got a file; move it away"):
        check_evaluation_folders(tmp_path, NAME)


def test_nothing_is_made(tmp_path: Path) -> None:
    check_evaluation_folders(tmp_path / "build" / "agent", NAME)
    assert not list(tmp_path.iterdir())


def test_results_of_a_candidate_that_is_gone_are_named_with_what_to_do(tmp_path: Path) -> None:
    """DVC counts them: the next clone's `.ci/gate` said that nobody could make the same, and advised in vain."""
    for name in ("candidates/kept", "evaluations/kept", "evaluations/.gone.new", "journal/gone"):
        (tmp_path / name).mkdir(parents=True)
    assert list_retired(tmp_path, ["kept"]) == [] == list_retired(tmp_path / "nowhere", [])
    gone = [tmp_path / "candidates/gone", tmp_path / "evaluations/gone"]
    for folder in gone:
        folder.mkdir()
    (line,) = list_retired(tmp_path, ["kept"])
    assert line.startswith(f"{gone[0]}: of no candidate") and line.endswith(f"or `rm -r {gone[0]} {gone[1]}`")
    assert all(folder.is_dir() for folder in gone), "they may be what was released"
