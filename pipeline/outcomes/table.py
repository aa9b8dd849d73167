"""Outcomes as a plain table: CSV with a header, or JSONL with an object a line.

    case_id    names the case; the same on both sides
    prompt     optional: what was asked; the same on both sides
    output     optional: what was answered
    cluster    optional: cases of one cluster share a document or a template; without it cases of one prompt are a
               cluster, and without a prompt each case is its own
    buckets    optional: separated by ";" in CSV, a list in JSONL
    weight     optional: the units (tokens, objects) that every score is divided by; a score is then a total
    scores     optional, in JSONL: an object of scores
    ...        every other column that holds numbers, or true and false, is a score

With the columns `reference` and `candidate`, each a score of one metric, one file holds both sides; their outputs are
then `reference_output` and `candidate_output`.

Not covered: other separators than a comma; what is no number in a column is refused when that column is judged.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.digests import digest_text
from pipeline.errors import EvidenceError
from pipeline.outcomes.cases import Case, Grouping, Outcomes, build_outcomes, iterate_objects, read_text

FORMAT = "table"
SCORE = "score"  # the name of the one metric of a paired table
SIDES = ("reference", "candidate")
_TRUTH = {"true": 1.0, "false": 0.0}  # in CSV, where pandas writes True and a spreadsheet TRUE
_RESERVED = ("case_id", "prompt", "output", "cluster", "buckets", *(f"{side}_output" for side in SIDES))


def recognizes(path: Path) -> bool:
    """Say whether a file may be a table."""
    return path.suffix in (".csv", ".jsonl")


def list_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that are of this format."""
    yield from (path for path in sorted(folder.rglob("*")) if recognizes(path))


def read(path: Path, grouping: Grouping) -> Outcomes:
    """Read one side's table.

    Raises:
        EvidenceError: a row is malformed, or the table holds both sides.
    """
    rows = list(_iterate_rows(path))
    if rows and set(SIDES) <= rows[0][1].keys():
        raise EvidenceError(f"{path}: holds both sides, in its columns `reference` and `candidate`; give it alone")
    return _build(path, rows, grouping)


def read_paired(path: Path, grouping: Grouping) -> tuple[Outcomes, Outcomes]:
    """Read a table that holds both sides.

    Raises:
        EvidenceError: a row is malformed, or a side is missing.
    """
    rows = list(_iterate_rows(path))
    if missing := [side for side in SIDES if rows and side not in rows[0][1]]:
        raise EvidenceError(f"{path}: expected the columns `reference` and `candidate`, found no {missing[0]!r} among "
                            f"{list(rows[0][1])}; or give a second file")
    ours, theirs = (_build(path, [(where, _take_side(row, side)) for where, row in rows], grouping) for side in SIDES)
    return ours, theirs


def _take_side(row: dict[str, Any], side: str) -> dict[str, Any]:
    kept = {key: value for key, value in row.items() if key not in SIDES and not key.endswith("_output")}
    return kept | {SCORE: row.get(side), "output": row.get(f"{side}_output", "")}


def _build(path: Path, rows: list[tuple[str, dict[str, Any]]], grouping: Grouping) -> Outcomes:
    cases = [_read_case(row, where, grouping) for where, row in rows]
    has_weight = any("weight" in case.scores for case in cases)
    return build_outcomes(path.stem, path, cases, format=FORMAT, grouping=grouping, task={},
                          weight="weight" if has_weight else None)


def _read_case(row: dict[str, Any], where: str, grouping: Grouping) -> Case:
    case_id = row.get("case_id")
    if case_id in (None, ""):
        raise EvidenceError(f"{where}: expected a `case_id`, found none; it has {list(row)}")
    buckets = row.get("buckets") or ()
    if isinstance(buckets, str):
        buckets = [name.strip() for name in buckets.split(";") if name.strip()]
    if not isinstance(buckets, (list, tuple)):
        raise EvidenceError(f"{where}: case {case_id!r}: expected buckets as a list, got {buckets!r}")
    no_scores = {*_RESERVED, "scores", grouping.cluster, *grouping.buckets}
    scores = {key: _TRUTH.get(value.lower(), value) if isinstance(value, str) else value
              for key, value in row.items() if key not in no_scores}  # fmt: skip
    nested = row.get("scores") or {}
    if not isinstance(nested, dict) or nested.keys() & scores.keys():
        raise EvidenceError(f"{where}: case {case_id!r}: expected `scores` as an object of scores that are no column "
                            f"of their own, got {str(nested)[:120]!r}; name each score once")
    # one question under many ids is no more evidence than under one
    cluster = row.get("cluster") or (digest_text(str(row["prompt"])) if row.get("prompt") else case_id)
    asked = {"case_id": str(case_id)} | ({"prompt": row["prompt"]} if row.get("prompt") else {})
    return Case(str(case_id), where, asked, scores | nested,
                cluster=str(cluster), buckets=tuple(map(str, buckets)),
                prompt=str(row.get("prompt") or ""), output=str(row.get("output") or ""), fields=row)


def _iterate_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix == ".jsonl":
        yield from iterate_objects(path)
        return
    try:
        yield from _iterate_cells(path, read_text(path))
    except csv.Error as error:
        raise EvidenceError(f"{path}: not CSV: {error}; was the file cut off?") from None


def _iterate_cells(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = [name.strip() for name in next(reader, [])]
    if "case_id" not in header or len(set(header)) != len(header):
        raise EvidenceError(f"{path}:1: expected column names, each once and separated by commas, `case_id` among "
                            f"them, got {header!r}")
    for cells in reader:
        if not cells:
            continue
        where = f"{path}:{reader.line_num}"
        if len(cells) != len(header):
            raise EvidenceError(f"{where}: expected {len(header)} cells, as the header has, got {len(cells)}; was the "
                                "file cut off?")
        yield where, dict(zip(header, cells, strict=True))
