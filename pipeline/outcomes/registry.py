"""Which reader reads which file; the first that recognises a file reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.outcomes import case_records, folders, inspect_ai, lm_eval, table
from pipeline.outcomes.cases import Grouping, Outcomes
from pipeline.outcomes.reading import clean
from pipeline.records.files import check_link


@dataclass(frozen=True)
class Reader:
    """How one format is known and read."""

    title: str  # for people
    recognizes: Callable[[Path], bool]
    read: Callable[[Path, Grouping], Outcomes]


READERS: dict[str, Reader] = {
    "case_records": Reader("quantgate records", case_records.recognizes, case_records.read),
    "lm_eval": Reader("lm-eval samples", lm_eval.recognizes, lm_eval.read),
    "inspect_ai": Reader("inspect_ai log", inspect_ai.recognizes, inspect_ai.read),
    "table": Reader("table", table.recognizes, table.read),
}
_EXPECTED = (
    "lm-eval's samples_*.jsonl, an .eval or .json log of inspect_ai, or a .csv, .tsv or .jsonl table with a "
    "column case_id"
)


_TABLES = "outcomes"  # the eval of two tables whose files bear different names


@dataclass(frozen=True)
class Side:
    """What one side brings: outcomes by eval, and why some of them are unfit."""

    name: str
    outcomes: dict[str, Outcomes]
    problems: tuple[str, ...]
    is_half: bool = False  # of one table that holds both sides


def read_side(path: Path, grouping: Grouping) -> Side:
    """Read a file, or the files of a folder; what is unfit is remembered, to be refused with the verdict."""
    outcomes: dict[str, Outcomes] = {}
    problems: list[str] = []
    try:
        files = list_files(path)
    except (EvidenceError, OSError) as error:
        return Side(clean(str(path)), {}, (clean(str(error)),))
    for file in files:
        try:
            if path.is_dir():
                check_link(file, path)
            found = _read(file, grouping)
            if found.name in outcomes:
                raise EvidenceError(
                    f"{file}: a second file of {found.name}, beside {outcomes[found.name].path}; "
                    "name one of them, or remove one"
                )
            outcomes[found.name] = found
        except (EvidenceError, OSError) as error:
            problems.append(clean(str(error)))
    return Side(clean(str(path)), outcomes, tuple(problems))


def read_paired_table(path: Path, grouping: Grouping) -> tuple[Side, Side]:
    """Read one table that holds both sides."""
    try:
        if path.is_dir():
            raise EvidenceError(
                f"{path}: expected a table with the columns `reference` and `candidate`, or two folders, got one folder"
            )
        pair = table.read_paired(path, grouping)
    except (EvidenceError, OSError) as error:
        return Side(table.SIDES[0], {}, (clean(str(error)),)), Side(table.SIDES[1], {}, ())
    ours, theirs = (
        Side(side, {outcomes.name: outcomes}, (), is_half=True)
        for side, outcomes in zip(table.SIDES, pair, strict=True)
    )
    return ours, theirs


def match_names(reference: Side, candidate: Side) -> tuple[Side, Side]:
    """Give two tables that were named one name: theirs are those of files, "before.csv" and "after.csv".

    In folders a name is that of an eval: "help.csv" on one side and "safety.csv" on the other are two.
    """
    sides = (reference, candidate)
    found = [outcomes for side in sides for outcomes in side.outcomes.values()]
    if len(found) != 2 or any(len(side.outcomes) != 1 or side.problems for side in sides):
        return sides
    if any(outcomes.format != table.FORMAT for outcomes in found) or found[0].name == found[1].name:
        return sides
    if any(Path(side.name).is_dir() for side in sides):
        return sides
    ours, theirs = (
        replace(side, outcomes={_TABLES: replace(outcomes, name=_TABLES)})
        for side, outcomes in zip(sides, found, strict=True)
    )
    return ours, theirs


def list_files(path: Path) -> list[Path]:
    """Return the files that `read_side` reads: of a folder all but what is no data.

    Raises:
        EvidenceError: a folder without any.
    """
    if not path.is_dir():
        return [path]
    if files := folders.list_files(path):
        return files
    raise EvidenceError(f"{path}: expected {_EXPECTED} in this folder, found none")


def _read(path: Path, grouping: Grouping) -> Outcomes:
    if not path.is_file():
        came = "a folder behind a link, which was not judged: name it alone" if path.is_dir() else "no file"
        raise EvidenceError(f"{path}: expected {_EXPECTED}, found {came}")
    for reader in READERS.values():
        if reader.recognizes(path):
            return reader.read(path, grouping)
    raise EvidenceError(
        f"{path}: expected {_EXPECTED}, got something else, which was not judged; unpack it, turn it "
        "into one of these, or move it out of the folder"
    )
