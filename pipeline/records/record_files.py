"""What every record is, and how one, or a file of many, is written and read.

Records are frozen, refuse unknown keys and refuse NaN and infinity, so that a broken number stops at the file where it
was written. Files are written under a temporary name and moved into place: a killed stage leaves no half file behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.errors import EvidenceError, describe_problem, find_near
from pipeline.records.digests import canonical_json
from pipeline.records.files import line_of, read_bounded, read_lines, write_text


class Record(BaseModel):
    """Base of everything on disk: frozen, strict about keys and finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


R = TypeVar("R", bound=Record)


def write_record(path: Path, record: Record) -> None:
    """Write one record as indented JSON."""
    write_text(path, record.model_dump_json(indent=2) + "\n")


def format_json(value: Any, *, levels: int) -> str:
    """Write JSON data with a line for each entry of its outer levels, and what is deeper in one line.

    A large record is a fifth smaller so than with indentation, and a difference still shows which entry it is in.
    """
    if levels and isinstance(value, Mapping) and value:
        entries = [f"{json.dumps(key)}: {format_json(entry, levels=levels - 1)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + "\n}"
    if levels and isinstance(value, list) and value:
        return "[\n" + ",\n".join(format_json(entry, levels=levels - 1) for entry in value) + "\n]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_record(path: Path, kind: type[R]) -> R:
    """Read one record back.

    Raises:
        EvidenceError: the file is missing, not JSON, or not a record of this kind.
    """
    try:
        return kind.model_validate_json(read_bounded(path))
    except FileNotFoundError:
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise EvidenceError(f"{path}: expected {article} {kind.__name__}, found no file; run `dvc repro`") from None
    except ValidationError as error:
        raise EvidenceError(f"{path}: not a valid {kind.__name__}: {first_problem(error)}") from None


def write_cases(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines in canonical form, in the order given."""
    write_text(path, "".join(canonical_json(r.model_dump()) + "\n" for r in records))


def iterate_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Read records from JSON lines.

    Raises:
        EvidenceError: the file is missing or not UTF-8, or with its number a line that is not a record of this kind.
    """
    try:
        lines = read_lines(path)
    except FileNotFoundError:
        raise EvidenceError(f"{path}: expected case records, found no file; run `dvc repro`") from None
    except UnicodeDecodeError as error:
        raise EvidenceError(f"{path}:{line_of(error)}: not UTF-8 ({error.reason})") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield kind.model_validate_json(line)
        except ValidationError as error:
            raise EvidenceError(f"{path}:{number}: not a case record: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """Say the first problem of a validation error in one line: where, what, what came."""
    problem, *others = error.errors(include_url=False)
    where = ".".join(str(part) for part in problem["loc"]) or "(whole)"
    loc = problem["loc"]
    unknown = [str(o["loc"][-1]) for o in others if o["type"] == "extra_forbidden" and o["loc"][:-1] == loc[:-1]]
    meant = find_near(loc[-1], unknown) if problem["type"] == "missing" else ""
    hint = f"; {meant!r} is there: correct its spelling" if meant else ""
    more = len(others) - bool(meant)
    return f"{where}: {describe_problem(problem)}{hint}" + (f" (and {more} more)" if more else "")
