"""Outcomes as a plain table: CSV or TSV with a header, or JSONL with an object a line.

    case_id    names the case; the same on both sides
    prompt     optional: what was asked; the same on both sides
    output     optional: what was answered
    target     optional: what was expected; the same on both sides. Cases of one prompt and one target are one question
    cluster    optional: cases of one cluster share a document or a template; without it each case is its own. Cases of
               one prompt are of one cluster, whatever it says
    buckets    optional: separated by ";" in CSV, a list in JSONL
    weight     optional: the units (tokens, objects) that every score is divided by; a score is then a total
    scores     optional, in JSONL: an object of scores
    ...        every other column that holds numbers, or true and false, is a score

With the columns `reference` and `candidate`, each a score of one metric, one file holds both sides; their outputs are
then `reference_output` and `candidate_output`. Other columns are no scores there, as nobody can say whose they are.

Not covered: other separators than a comma (.csv) and a tab (.tsv); what is no number in a column is refused when that
column is judged.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.outcomes.cases import Case, Grouping, Outcomes, build_outcomes, condense_case, show_names
from pipeline.outcomes.reading import iterate_objects, open_text

FORMAT = "table"
SCORE = "score"  # the name of the one metric of a paired table
SIDES = ("reference", "candidate")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}  # by suffix
_TRUTH = {"true": 1.0, "false": 0.0}  # in CSV, where pandas writes True and a spreadsheet TRUE
_RESERVED = ("case_id", "prompt", "target", "output", "cluster", "buckets", *(f"{side}_output" for side in SIDES))


def recognizes(path: Path) -> bool:
    """Say whether a file may be a table."""
    return path.suffix.lower() in (*_SEPARATORS, ".jsonl")


def read(path: Path, grouping: Grouping) -> Outcomes:
    """Read one side's table.

    Raises:
        EvidenceError: a row is malformed, or the table holds both sides.
    """
    rows = _iterate_rows(path)
    first = next(rows, None)
    if first and set(SIDES) <= first[1].keys():
        raise EvidenceError(f"{path}: holds both sides, in its columns `reference` and `candidate`; give it alone")
    return _build(path, chain([first] if first else [], rows), grouping)


def read_paired(path: Path, grouping: Grouping) -> tuple[Outcomes, Outcomes]:
    """Read a table that holds both sides.

    Raises:
        EvidenceError: a row is malformed, or a side is missing.
    """
    first = next(_iterate_rows(path), None)
    if missing := [side for side in SIDES if first and side not in first[1]]:
        raise EvidenceError(
            f"{path}: expected the columns `reference` and `candidate`, found no {missing[0]!r} among "
            f"{show_names(first[1] if first else ())}; or give a second file"
        )
    ours, theirs = (
        _build(path, ((where, _take_side(row, side, grouping)) for where, row in _iterate_rows(path)), grouping)
        for side in SIDES
    )
    return ours, theirs


def _take_side(row: dict[str, Any], side: str, grouping: Grouping) -> dict[str, Any]:
    """Return one side's row; a number in another column belongs to no side, and would be compared with itself."""
    told = {*_RESERVED, "weight", grouping.cluster, *grouping.buckets} - {*SIDES, "output"}
    kept = {key: value for key, value in row.items() if key in told and not key.endswith("_output")}
    return kept | {SCORE: row.get(side), "output": row.get(f"{side}_output", "")}


def _build(path: Path, rows: Iterable[tuple[str, dict[str, Any]]], grouping: Grouping) -> Outcomes:
    cases = [condense_case(_read_case(row, where, grouping), grouping) for where, row in rows]
    has_weight = any("weight" in case.scores for case in cases)
    return build_outcomes(path.stem, path, cases, format=FORMAT, task={}, weight="weight" if has_weight else None)


def _read_case(row: dict[str, Any], where: str, grouping: Grouping) -> Case:
    case_id = row.get("case_id")
    if case_id in (None, ""):
        raise EvidenceError(f"{where}: expected a `case_id`, found none; it has {show_names(row)}")
    buckets = row.get("buckets") or ()
    if isinstance(buckets, str):
        buckets = [name.strip() for name in buckets.split(";") if name.strip()]
    if not isinstance(buckets, (list, tuple)):
        raise EvidenceError(f"{where}: case {case_id!r}: expected buckets as a list, got {str(buckets)[:120]!r}")
    no_scores = {
        *_RESERVED,
        "scores",
        "",  # without a name, as the index that pandas writes
        grouping.cluster,
        *grouping.buckets,
    }
    scores = {
        key: _TRUTH.get(value.lower(), value) if isinstance(value, str) else value
        for key, value in row.items()
        if key not in no_scores
    }
    nested = row.get("scores") or {}
    if not isinstance(nested, dict) or nested.keys() & scores.keys():
        raise EvidenceError(
            f"{where}: case {case_id!r}: expected `scores` as an object of scores that are no column "
            f"of their own, got {str(nested)[:120]!r}; name each score once"
        )
    told = {key: value for key, value in row.items() if value not in (None, "", [], {})}  # 0 is a cluster, and a target
    cluster = case_id if told.get("cluster") is None or told["cluster"] is False else told["cluster"]
    asked = {"case_id": str(case_id)} | {key: _as_text(told[key]) for key in ("prompt", "target") if key in told}
    scores |= {name: value for name, value in nested.items() if name}
    return Case(
        str(case_id),
        where,
        asked,
        scores,
        tells=(("prompt",),),
        cluster=str(cluster),
        buckets=tuple(map(str, buckets)),
        prompt=str(told.get("prompt", "")),
        output=str(told.get("output", "")),
        fields=row,
    )


def _as_text(value: Any) -> Any:
    """Return a number as Python writes it into CSV: the two sides may have other formats."""
    return str(value) if isinstance(value, (int, float)) else value


def _iterate_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix.lower() == ".jsonl":
        yield from iterate_objects(path)
        return
    try:
        with open_text(path, newline="") as lines:
            yield from _iterate_cells(path, lines)
    except csv.Error as error:
        raise EvidenceError(f"{path}: not CSV: {error}; was the file cut off?") from None


def _iterate_cells(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    separator = _SEPARATORS[path.suffix.lower()]
    csv.field_size_limit(sys.maxsize)  # a prompt may be long; what a file may have is bounded where it is opened
    reader = csv.reader(lines, strict=True, delimiter=separator)
    header = [name.strip() for name in next(reader, [])]
    if "case_id" not in header or len(set(header)) != len(header):
        # what a link leads to may be nobody's to read here
        came = "others in what it links to" if path.is_symlink() else show_names(header)
        hint = "; rename `id`" if "id" in header and not path.is_symlink() else ""
        raise EvidenceError(
            f"{path}:1: expected column names, each once and separated by "
            f"{'tabs' if separator != ',' else 'commas'}, `case_id` among them, got {came}{hint}"
        )
    for cells in reader:
        if not cells:
            continue
        where = f"{path}:{reader.line_num}"
        if len(cells) != len(header):
            raise EvidenceError(
                f"{where}: expected {len(header)} cells, as the header has, got {len(cells)}; was the file cut off?"
            )
        yield where, dict(zip(header, cells, strict=True))
