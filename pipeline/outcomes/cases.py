"""What a reader of other people's records hands on: the cases of one eval of one side, and what they can be judged by.

A reader yields a `Case` per case as it found it, and `build_outcomes` makes the gate's own records of them: a case
that is there twice, or that has no judgement, is refused here, for every format alike. A score that is not a finite
number is left out of its record and remembered, so that it stands in the way of its own metric and of no other.
Not covered: whether two sides belong together; `judging.py` asks that.
"""

from __future__ import annotations

import codecs
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.digests import digest_json, digest_text
from pipeline.errors import EvidenceError
from pipeline.files import line_of
from pipeline.gate.metrics import MetricDefinition
from pipeline.records import CaseRecord, describe_failures

Direction = Literal["higher", "lower"]
_MAX_SHOWN = 60  # characters of a value that is no score


@dataclass(frozen=True)
class Grouping:
    """Fields of other people's records that group cases: of lm-eval's `doc`, of inspect_ai's metadata, columns.

    Attributes:
        cluster: the field whose equal values are one cluster; None: as the format says.
        buckets: fields whose values are buckets, named "<field>/<value>".
    """

    cluster: str | None = None
    buckets: tuple[str, ...] = ()


@dataclass
class Case:
    """One case as its file has it.

    Attributes:
        where: file and line, for messages.
        asked: what makes it the same case on both sides, part by part; JSON data.
        scores: by name; anything that the file may hold.
        fields: what a `Grouping` may name.
    """

    case_id: str
    where: str
    asked: dict[str, Any]
    scores: dict[str, Any]
    cluster: str
    buckets: tuple[str, ...] = ()
    prompt: str = ""
    output: str = ""
    failure: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of one eval of one side.

    Attributes:
        name: of the eval, without "/".
        format: key of `registry.READERS`.
        task: what both sides must share for their cases to be comparable, as far as the file tells.
        asked: per case id, a digest of each part of what it was asked.
        problems: per score that is not a finite number everywhere, the first place where it is not.
        better: per score, the direction that the file tells.
        definitions: metrics whose arithmetic the format knows.
        weight: the score that every other one is divided by, where the file has one.
    """

    name: str
    path: Path
    format: str
    records: list[CaseRecord]
    task: dict[str, Any]
    asked: dict[str, dict[str, str]]
    problems: dict[str, str]
    better: dict[str, Direction] = field(default_factory=dict)
    definitions: dict[str, MetricDefinition] = field(default_factory=dict)
    weight: str | None = None

    @property
    def scores(self) -> list[str]:
        """The names of all scores, in the order in which they come."""
        return list(dict.fromkeys([*(name for r in self.records for name in r.scores), *self.problems]))


def build_outcomes(name: str, path: Path, cases: Iterable[Case], *, format: str, grouping: Grouping,
                   task: dict[str, Any], **known: Any) -> Outcomes:
    """Make records of cases, in their order.

    Args:
        name: of the eval.
        known: `better`, `definitions` and `weight` of the outcomes.

    Raises:
        EvidenceError: no case, one that is there twice, or one without a judgement.
    """
    found = list(cases)
    if not found:
        raise EvidenceError(f"{path}: expected at least one case, got none")
    _check_once(found)
    numeric = _find_numeric(found)
    problems: dict[str, str] = {}
    records = []
    repeats: dict[str, int] = {}
    for case in found:
        digest = digest_json(digest_asked(case.asked))
        repeats[digest] = repeats.get(digest, -1) + 1  # only their place tells equal questions of a task apart
        records.append(_make_record(case, digest if not repeats[digest] else digest_json([digest, repeats[digest]]),
                                    numeric, problems, grouping))
    if failed := describe_failures(records):
        raise EvidenceError(f"{path}: {failed}")
    asked = {case.case_id: digest_asked(case.asked) for case in found}
    return Outcomes(name.replace("/", "."), path, format, records, task, asked, problems, **known)


def digest_asked(asked: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each part of what a case asks."""
    return {part: digest_text(json.dumps(value, sort_keys=True, default=str)) for part, value in asked.items()}


def _check_once(cases: Iterable[Case]) -> None:
    first: dict[str, str] = {}
    for case in cases:
        name = case.case_id.strip()  # a space more makes no other case
        if name in first:
            raise EvidenceError(f"{case.where}: case {name!r} is there twice, first in {first[name]}; every case may "
                                "count once")
        first[name] = case.where


def _find_numeric(cases: Iterable[Case]) -> set[str]:
    """Name the scores that are numbers in some case: a column of words is no score, one that lacks a number is."""
    return {name for case in cases for name, value in case.scores.items() if read_number(value) is not None}


def read_number(value: Any) -> float | None:
    """Return a value as a number, which may be infinite or NaN; None where it is none."""
    if isinstance(value, (bool, int, float, str)) and "_" not in str(value):  # Python alone reads 1_0 as 10
        try:
            return float(value)
        except (ValueError, OverflowError):
            return None
    return None


def _make_record(
    case: Case, digest: str, numeric: set[str], problems: dict[str, str], grouping: Grouping
) -> CaseRecord:
    scores = {}
    for name in sorted(numeric):
        number = read_number(case.scores.get(name))
        if number is not None and math.isfinite(number):
            scores[name] = number
        elif case.failure is None:
            came = repr(case.scores[name])[:_MAX_SHOWN] if case.scores.get(name) not in (None, "") else "none"
            problems.setdefault(name, f"{case.where}: case {case.case_id!r}: expected a finite number as {name!r}, "
                                      f"got {came}")
    cluster, buckets = _group(case, grouping)
    return CaseRecord(case_id=clean(case.case_id), input_digest=digest, cluster=clean(cluster), buckets=buckets,
                      prompt=clean(case.prompt), output=clean(case.output), scores={} if case.failure else scores,
                      failure=case.failure, fingerprint="")


def _group(case: Case, grouping: Grouping) -> tuple[str, tuple[str, ...]]:
    for name in (*((grouping.cluster,) if grouping.cluster else ()), *grouping.buckets):
        if case.fields.get(name) in (None, ""):
            raise EvidenceError(f"{case.where}: case {case.case_id!r}: expected a field {name!r} to group by, found "
                                f"none; it has {sorted(map(str, case.fields))}")
    cluster = str(case.fields[grouping.cluster]) if grouping.cluster else case.cluster
    named = (clean(f"{name}/{case.fields[name]}") for name in grouping.buckets)
    return cluster, tuple(dict.fromkeys((*map(clean, case.buckets), *named)))


def clean(text: str) -> str:
    """Replace what can't be written as UTF-8: half a surrogate pair, which JSON can spell."""
    return text.encode("utf-8", "replace").decode()


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON; NaN and infinity become what they say, for the reader to refuse by name.

    Raises:
        EvidenceError: it is none, or an object has a key twice.
    """

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise EvidenceError(f"{where}: key {twice!r} is there twice; name it once")
        return found

    try:
        return json.loads(text, object_pairs_hook=build)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{where}: expected JSON, got something else: {' '.join(str(error).split())}; "
                            "was the file cut off?") from None


def read_first_keys(path: Path) -> set[str]:
    """Return the keys of the first object of a JSONL file, without reading the rest; none where it is no object."""
    with path.open("rb") as file:
        line = next((line for line in file if line.strip()), b"{}")
    try:
        first = parse_json(line, str(path))
    except EvidenceError:
        return set()  # whoever reads it says so, with its line
    return set(first) if isinstance(first, dict) else set()


def read_text(path: Path) -> str:
    """Read a file in UTF-8, with a byte-order mark or without.

    Raises:
        EvidenceError: it is in another encoding.
    """
    data = path.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:2]:
        raise EvidenceError(f"{path}: expected UTF-8, got what looks like UTF-16; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvidenceError(f"{path}:{line_of(error)}: not UTF-8 ({error.reason})") from None


def iterate_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line of a JSONL file that is not empty, with its place.

    Raises:
        EvidenceError: no file, not UTF-8, or a line that is no JSON object.
    """
    # of all that `str.splitlines` cuts at, a JSON string may hold U+2028
    for number, line in enumerate(io.StringIO(read_text(path), newline=None), start=1):
        if line.strip():
            where = f"{path}:{number}"
            value = parse_json(line, where)
            if not isinstance(value, dict):
                raise EvidenceError(f"{where}: expected a JSON object, got {type(value).__name__}")
            yield where, value
