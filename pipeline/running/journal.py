"""The journal of finished cases: what lets a killed run go on where it stopped.

One JSON line per finished case, appended and handed to the operating system at once, so a SIGKILL
loses nothing that was finished; synced to disk in batches, so a power cut loses little. A line that can't
be read is passed over, and its case is asked again: a journal saves time, and is no evidence. An entry
is found again only under the same case, the same fingerprint of what answered and the same key (eval
settings, cases, code): entries of an older candidate are never reused, they are just not found.

Failures are not journaled: a case without a judgement is tried again by the next run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson
from filelock import FileLock, Timeout
from pydantic import ValidationError

from pipeline.errors import JournalError
from pipeline.records.digests import digest_json
from pipeline.records.evaluations import CaseRecord
from pipeline.records.files import replace_folder
from pipeline.records.record_files import first_problem
from pipeline.running.lock_holders import name_holder

SYNC_EVERY = 64  # cases between syncs to disk


_FINISHED = ".{}.done"  # beside a candidate's folder of journals: of an evaluation that is whole


def put_aside(journals: Path) -> None:
    """Keep a candidate's journals though its evaluation is whole: until that is recorded, DVC may remove it."""
    if journals.is_dir():
        replace_folder(journals, journals.with_name(_FINISHED.format(journals.name)))


def take_back(journals: Path) -> None:
    """Put journals that were put aside in their place again, unless a later run has left some there."""
    finished = journals.with_name(_FINISHED.format(journals.name))
    if finished.is_dir() and not journals.exists():
        finished.rename(journals)


def drop_finished(build: Path) -> None:
    """Remove the journals of a product's evaluations that are whole and recorded."""
    for finished in (build / "journal").glob(_FINISHED.format("*")):
        shutil.rmtree(finished, ignore_errors=True)


@contextlib.contextmanager
def lock_candidate(build: Path, candidate: str) -> Iterator[None]:
    """Keep a candidate's folders and journals for this process alone: two would write into the same ones.

    Raises:
        JournalError: another process builds or evaluates the candidate.
    """
    path = build / "journal" / f"{candidate}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise JournalError(
            f"{path}: expected one process to work on {candidate!r} at a time, another one does{name_holder(path)}; "
            "wait for it or end it"
        ) from None
    try:
        yield
    finally:
        lock.release()


class Journal:
    """Finished cases of one eval of one candidate. Use as a context manager."""

    def __init__(self, path: Path, *, fingerprint: str, key: str) -> None:
        """Open a journal and read what is in it.

        Args:
            path: the file; created when missing, with its folder.
            fingerprint: of the endpoint that answers now.
            key: digest of the rest that a judgement comes from: settings, cases, code.

        Raises:
            JournalError: the file can't be opened.
        """
        self.path = path
        self.num_torn_bytes = 0  # size of the unfinished last line that was dropped
        self.damaged: list[str] = []  # what is wrong with each other line that could not be read
        self._key = (fingerprint, key)
        self._places: dict[str, tuple[int, int]] = {}  # of each entry in the file: pictures would not fit in memory
        self._unsynced = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._size = self._read()
            self._file: BinaryIO = path.open("a+b", buffering=0)
            if self.num_torn_bytes:
                self._file.truncate(self._size)
        except OSError as error:
            raise JournalError(f"{path}: can't open the journal: {error.strerror}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of entries, of whatever candidate."""
        return len(self._places)

    def holds(self, digest: str) -> bool:
        """Say whether a case or a part of one is finished."""
        return self._entry_key(digest) in self._places

    def find(self, case_digest: str) -> tuple[CaseRecord, str | None] | None:
        """Return the record of a finished case and its attachment, or None."""
        entry = self._find_entry(case_digest, "record")
        return None if entry is None else (CaseRecord.model_validate(entry["record"]), entry["attachment"])

    def add(self, case_digest: str, record: CaseRecord, attachment: str | None = None) -> None:
        """Append one finished case.

        Args:
            case_digest: digest of the case, as given to `find`.
            record: the judgement.
            attachment: text that the eval wants back with the record, such as encoded arrays.

        Raises:
            JournalError: the entry can't be written, for example because the disk is full. What was
                written before stays readable.
        """
        entry = {"key": self._entry_key(case_digest), "record": record.model_dump(), "attachment": attachment}
        self._append(entry)

    def find_text(self, question_digest: str) -> str | None:
        """Return what `add_text` stored, or None."""
        entry = self._find_entry(question_digest, "text")
        return None if entry is None else str(entry["text"])

    def add_text(self, question_digest: str, text: str, *, is_measured: bool = False) -> None:
        """Append one finished part of a case, for evals whose cases are judged elsewhere and all at once.

        Args:
            question_digest: digest of the part, as given to `find_text`.
            text: what is kept.
            is_measured: it holds times or memory, and another run of the same would write others.
        """
        entry = {"key": self._entry_key(question_digest), "text": text}
        self._append(entry | ({"is_measured": True} if is_measured else {}))

    def take_over(self, entry: Mapping[str, Any]) -> None:
        """Append an entry of another journal, where it is safe until this one is closed, unless its case is here."""
        if entry["key"] not in self._places:
            self._append(entry, may_wait=True)

    def _append(self, entry: Mapping[str, Any], *, may_wait: bool = False) -> None:
        line = orjson.dumps(entry) + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(0, f"{written} of {len(line)} bytes written; the disk is full")
            self._places[entry["key"]] = (self._size, len(line))
            self._size += len(line)
            self._unsynced += 1
            if self._unsynced >= SYNC_EVERY and not may_wait:
                self._sync()
        except OSError as error:
            self._drop_partial_line()
            raise JournalError(
                f"{self.path}: can't write: {error.strerror}; {len(self)} finished entries are kept, "
                "free some space and run `dvc repro` again"
            ) from error

    def close(self) -> None:
        """Sync and close."""
        if not self._file.closed:
            try:
                self._sync()
            except OSError as error:
                raise JournalError(f"{self.path}: can't sync: {error.strerror}") from error
            finally:
                self._file.close()

    def _entry_key(self, case_digest: str) -> str:
        return digest_json([case_digest, *self._key])

    def _sync(self) -> None:
        if self._unsynced:
            os.fsync(self._file.fileno())
            self._unsynced = 0

    def _drop_partial_line(self) -> None:
        try:
            self._file.truncate(self._size)
        except OSError:
            return  # the next reader drops the torn line

    def _read(self) -> int:
        """Read all entries; return the length of the intact part in bytes."""
        if not self.path.exists():
            return 0
        start = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self.num_torn_bytes = len(line)
                    break
                try:
                    self._places[_check_entry(orjson.loads(line))] = (start, len(line))
                except (json.JSONDecodeError, KeyError, TypeError):
                    self.damaged.append(f"{self.path}:{number}: not a journal entry")
                except ValidationError as error:
                    self.damaged.append(f"{self.path}:{number}: {first_problem(error)}")
                start += len(line)
        return start

    def _find_entry(self, digest: str, part: str) -> dict[str, Any] | None:
        if (place := self._places.get(self._entry_key(digest))) is None:
            return None
        start, length = place
        entry: dict[str, Any] = orjson.loads(os.pread(self._file.fileno(), length, start))
        return entry if part in entry else None


def _check_entry(entry: Mapping[str, Any]) -> str:
    """Return the key of an entry; raise what is wrong with it."""
    if "text" in entry:
        str(entry["text"])
    else:
        CaseRecord.model_validate(entry["record"])
        entry["attachment"]
    key = entry["key"]
    if not isinstance(key, str):
        raise TypeError(key)
    return key


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole entries of a journal that another process writes or has written, and pass over the others."""
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                entry = orjson.loads(line)
                if line.endswith(b"\n") and isinstance(entry["key"], str) and ("text" in entry or entry["record"]):
                    yield entry
