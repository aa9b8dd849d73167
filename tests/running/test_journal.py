"""The journal: what was finished is found again, what is damaged is said, nothing stale is reused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.errors import JournalError
from pipeline.records.evaluations import CaseRecord
from pipeline.running.journal import Journal


def record(case_id: str, **changes: object) -> CaseRecord:
    fields = {"case_id": case_id, "input_digest": f"d-{case_id}", "cluster": "c", "prompt": "p", "output": "line\n√"}
    return CaseRecord.model_validate({**fields, "scores": {"exact": 1.0}, "fingerprint": "f", **changes})


def open_journal(path: Path, fingerprint: str = "f", settings: str = "s") -> Journal:
    return Journal(path, fingerprint=fingerprint, key=settings)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "build" / "journal.jsonl"
    with open_journal(path) as journal:
        journal.add("d-a", record("a"), "attachment")
        journal.add("d-b", record("b"))
    return path


def test_finished_cases_come_back_as_they_were(path: Path) -> None:
    with open_journal(path) as journal:
        assert journal.find("d-a") == (record("a"), "attachment")
        assert journal.find("d-b") == (record("b"), None)
        assert journal.find("d-c") is None


@pytest.mark.parametrize(("fingerprint", "settings"), [("other", "s"), ("f", "other")])
def test_entries_of_another_candidate_or_setting_are_not_found(path: Path, fingerprint: str, settings: str) -> None:
    with open_journal(path, fingerprint, settings) as journal:
        assert journal.find("d-a") is None


def test_an_entry_is_in_the_file_before_add_returns(path: Path) -> None:
    journal = open_journal(path)
    before = path.stat().st_size
    journal.add("d-c", record("c"))
    assert path.stat().st_size > before  # a SIGKILL now would lose nothing
    journal.close()


@pytest.mark.parametrize("num_bytes", [1, 10, 60])
def test_a_torn_last_line_is_dropped_and_the_file_goes_on(path: Path, num_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)
    with open_journal(path) as journal:
        assert journal.num_torn_bytes > 0
        assert journal.find("d-a") is not None and journal.find("d-b") is None
        journal.add("d-b", record("b"))
    with open_journal(path) as journal:
        assert journal.num_torn_bytes == 0
        assert journal.find("d-b") is not None


@pytest.mark.parametrize(
    "line",
    [
        b'{"key": 1}',
        b"\xff\x00",
        b"",
        b"[1]",
        b'"text"',
        b'{"key": [1], "text": ""}',
        b'{"key": "k", "record": {"case_id": 1}, "attachment": null}',
    ],
)
def test_damage_in_the_middle_loses_its_line_only(path: Path, line: bytes) -> None:
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(line + b"\n" + second)
    with open_journal(path) as journal:
        assert [problem.partition(": ")[0] for problem in journal.damaged] == [f"{path}:1"]
        assert journal.find("d-a") is None and journal.find("d-b") == (record("b"), None)
        journal.add("d-a", record("a"))
    with open_journal(path) as journal:
        assert journal.find("d-a") == (record("a"), None)


def test_not_a_number_does_not_come_back_as_a_score(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"exact":1.0', b'"exact":NaN'))
    with open_journal(path) as journal:
        assert len(journal.damaged) == 2
        assert journal.find("d-a") is None and journal.find("d-b") is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line_and_keeps_what_was_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(path)
    size = path.stat().st_size
    with Path("/dev/full").open("ab", buffering=0) as full:
        monkeypatch.setattr(journal, "_file", full)
        with pytest.raises(JournalError, match="No space left on device; 2 finished entries are kept") as caught:
            journal.add("d-c", record("c"))
    assert "\n" not in str(caught.value)
    assert path.stat().st_size == size
    with open_journal(path) as reopened:
        assert len(reopened) == 2


def test_a_folder_that_can_not_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="can't open the journal"):
        open_journal(tmp_path / "file" / "journal.jsonl")


def test_parts_of_cases_come_back_under_the_same_key_only(path: Path) -> None:
    with open_journal(path) as journal:
        journal.add_text("q", "[1.5, true]")
    with open_journal(path) as journal:
        assert journal.find_text("q") == "[1.5, true]"
        assert journal.find("q") is None
    with open_journal(path, fingerprint="other") as journal:
        assert journal.find_text("q") is None
