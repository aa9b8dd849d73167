"""Which reader reads which file; the first that recognises a file reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.outcomes import case_records, inspect_ai, lm_eval, table
from pipeline.outcomes.cases import Grouping, Outcomes


@dataclass(frozen=True)
class Reader:
    """How one format is known, read, and found in a folder."""

    title: str  # for people
    recognizes: Callable[[Path], bool]
    read: Callable[[Path, Grouping], Outcomes]
    list_files: Callable[[Path], Iterator[Path]]


READERS: dict[str, Reader] = {
    "case_records": Reader("quantgate records", case_records.recognizes, case_records.read, case_records.list_files),
    "lm_eval": Reader("lm-eval samples", lm_eval.recognizes, lm_eval.read, lm_eval.list_files),
    "inspect_ai": Reader("inspect_ai log", inspect_ai.recognizes, inspect_ai.read, inspect_ai.list_files),
    "table": Reader("table", table.recognizes, table.read, table.list_files),
}
_EXPECTED = ("lm-eval's samples_*.jsonl, an .eval or .json log of inspect_ai, or a .csv or .jsonl table with a column "
             "case_id")  # fmt: skip


_TABLES = "outcomes"  # the eval of two tables whose files bear different names


@dataclass(frozen=True)
class Side:
    """What one side brings: outcomes by eval, and why some of them are unfit."""

    name: str
    outcomes: dict[str, Outcomes]
    problems: tuple[str, ...]


def read_side(path: Path, grouping: Grouping) -> Side:
    """Read a file, or the files of a folder; what is unfit is remembered, to be refused with the verdict."""
    outcomes: dict[str, Outcomes] = {}
    problems: list[str] = []
    try:
        files = list_files(path)
    except (EvidenceError, OSError) as error:
        return Side(str(path), {}, (str(error),))
    for file in files:
        try:
            found = _read(file, grouping)
            if found.name in outcomes:
                raise EvidenceError(f"{file}: a second file of {found.name}, beside {outcomes[found.name].path}; "
                                    "name one of them, or remove one")
            outcomes[found.name] = found
        except (EvidenceError, OSError) as error:
            problems.append(str(error))
    return Side(str(path), outcomes, tuple(problems))


def read_paired_table(path: Path, grouping: Grouping) -> tuple[Side, Side]:
    """Read one table that holds both sides."""
    try:
        if path.is_dir():
            raise EvidenceError(f"{path}: expected a table with the columns `reference` and `candidate`, or two "
                                "folders, got one folder")
        pair = table.read_paired(path, grouping)
    except (EvidenceError, OSError) as error:
        return Side(table.SIDES[0], {}, (str(error),)), Side(table.SIDES[1], {}, ())
    ours, theirs = (Side(side, {outcomes.name: outcomes}, ())
                    for side, outcomes in zip(table.SIDES, pair, strict=True))
    return ours, theirs


def match_names(reference: Side, candidate: Side) -> tuple[Side, Side]:
    """Give the only table of each side one name: theirs are those of files, "before.csv" and "after.csv"."""
    sides = (reference, candidate)
    found = [outcomes for side in sides for outcomes in side.outcomes.values()]
    if len(found) != 2 or any(len(side.outcomes) != 1 or side.problems for side in sides):
        return sides
    if any(outcomes.format != table.FORMAT for outcomes in found) or found[0].name == found[1].name:
        return sides
    ours, theirs = (replace(side, outcomes={_TABLES: replace(outcomes, name=_TABLES)})
                    for side, outcomes in zip(sides, found, strict=True))
    return ours, theirs


def list_files(path: Path) -> list[Path]:
    """Return the files that `read_side` reads.

    Raises:
        EvidenceError: a folder without any.
    """
    if not path.is_dir():
        return [path]
    for reader in READERS.values():
        if files := list(reader.list_files(path)):
            return files
    raise EvidenceError(f"{path}: expected {_EXPECTED} in this folder, found none")


def _read(path: Path, grouping: Grouping) -> Outcomes:
    if not path.is_file():
        raise EvidenceError(f"{path}: expected {_EXPECTED}, found no file")
    for reader in READERS.values():
        if reader.recognizes(path):
            return reader.read(path, grouping)
    raise EvidenceError(f"{path}: expected {_EXPECTED}, got something else")
