"""What a reader of other people's records hands on: the cases of one eval of one side, and what they can be judged by.

A reader yields a `Case` per case as it found it, and `build_outcomes` makes the gate's own records of them: a case
that is there twice, or that has no judgement, is refused here, for every format alike, and equal questions are made to
weigh alike (`questions.py`). A score that is not a finite number is left out of its record and remembered, so that it
stands in the way of its own metric and of no other.
Not covered: whether two sides belong together; `judging.py` asks that.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import EvidenceError
from pipeline.gate.case_rows import CaseRow, change_row
from pipeline.outcomes.questions import (
    Question,
    digest_part,
    drop_repeats,
    format_alike,
    identify_question,
    join_clusters,
    sort_by_id,
)
from pipeline.outcomes.reading import clean
from pipeline.records.digests import digest_json
from pipeline.records.evaluations import CaseRecord, format_failures
from pipeline.settings.metrics import MetricDefinition

Direction = Literal["higher", "lower"]
_MAX_SHOWN = 60  # characters of a value that is no score
_MAX_NAMES = 300  # characters of a list of names
_MAX_BUCKETS = 1_000  # a number a cluster is kept of each


@dataclass(frozen=True)
class Grouping:
    """Fields of other people's records that group cases: of lm-eval's `doc`, of inspect_ai's metadata, columns.

    Attributes:
        cluster: the field whose equal values are one cluster; None: as the format says.
        buckets: fields whose values are buckets, named "<field>/<value>".
    """

    cluster: str | None = None
    buckets: tuple[str, ...] = ()


@dataclass(slots=True)
class Case:
    """One case as its file has it; `condense_case` keeps of it what there is memory for.

    Attributes:
        where: file and line, for messages.
        asked: what makes it the same case on both sides, part by part; JSON data, condensed the digest of each.
        tells: parts of `asked`, alone or together, that tell the question: cases that are equal in one of these ask
            the same. The part `target`, where there is one, is what is expected.
        scores: by name; anything that the file may hold.
        num_choices: of how many choices the answer is one; 0: it is free, or nobody knows.
        fields: what a `Grouping` may name.
    """

    case_id: str
    where: str
    asked: dict[str, Any]
    scores: dict[str, Any]
    cluster: str
    tells: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[str, ...] = ()
    prompt: str = ""
    output: str = ""
    num_choices: int = 0
    failure: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    question: Question = Question((), "")  # known when it is condensed


@dataclass(frozen=True)
class Outcomes:
    """The outcomes of one eval of one side.

    Attributes:
        name: of the eval, without "/".
        format: key of `registry.READERS`.
        task: what both sides must share for their cases to be comparable, as far as the file tells.
        asked: per case id, a digest of each part of what it was asked.
        questions: of the records, in their order.
        problems: per score that is not a finite number everywhere, the first place where it is not.
        better: per score, the direction that the file tells.
        definitions: metrics whose arithmetic the format knows.
        weight: the score that every other one is divided by, where the file has one.
        model: digest of what a file beside it tells of the model, where it names none itself.
        note: what was done to its cases, in one line.
        left_out: records of questions that others ask already, each with the id of such another.
        parts: evals that are pooled in it.
    """

    name: str
    path: Path
    format: str
    records: list[CaseRecord]
    task: dict[str, Any]
    asked: dict[str, dict[str, str]]
    questions: list[Question]
    problems: dict[str, str]
    better: dict[str, Direction] = field(default_factory=dict)
    definitions: dict[str, MetricDefinition] = field(default_factory=dict)
    weight: str | None = None
    model: str | None = None
    note: str | None = None
    left_out: list[tuple[CaseRecord, str]] = field(default_factory=list)
    parts: tuple[Outcomes, ...] = ()

    @property
    def scores(self) -> list[str]:
        """The names of all scores, in the order in which they come."""
        return list(dict.fromkeys([*(name for r in self.records for name in r.scores), *self.problems]))


def condense_case(case: Case, grouping: Grouping) -> Case:
    """Return a case with what records are made of: digests of what it asks, its cluster and its buckets.

    Raises:
        EvidenceError: it lacks a field to group by.
    """
    cluster, buckets = _group(case, grouping)
    digests = digest_asked(case.asked)
    question = identify_question(case.asked, case.tells, target=digests.get("target", ""))
    return replace(
        case,
        asked=digests,
        cluster=cluster,
        buckets=buckets,
        fields={},
        question=question,
        scores=condense_scores(case.scores),
    )


def condense_scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return scores as numbers; of what is none, as much as a message shows."""
    return {sys.intern(clean(name)): _condense_value(value) for name, value in scores.items()}


class _Shown(str):
    """A value that is no number, as a message shows it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _condense_value(value: Any) -> Any:
    number = read_number(value)
    if number is not None:
        return number if math.isfinite(number) else value
    return value if value in (None, "") else _Shown(clean(repr(value)[:_MAX_SHOWN]))


def build_outcomes(
    name: str, path: Path, cases: Iterable[Case], *, format: str, task: dict[str, Any], **known: Any
) -> Outcomes:
    """Make records of cases, in their order.

    Args:
        name: of the eval.
        cases: condensed.
        known: `better`, `definitions`, `weight` and `model` of the outcomes.

    Raises:
        EvidenceError: no case, one that is there twice, one without a judgement, or too many buckets.
    """
    found = list(cases)
    if not found:
        raise EvidenceError(f"{path}: expected at least one case, got none")
    _check_once(found)
    numeric = _find_numeric(found)
    problems: dict[str, str] = {}
    records = [_make_record(case, digest_json(case.asked), numeric, problems) for case in found]
    if failed := format_failures(records):
        raise EvidenceError(f"{path}: {failed}")
    asks = {record.case_id: case.question for record, case in zip(records, found, strict=True)}
    questions = list(asks.values())
    records, left_out, note = drop_repeats(join_clusters(_number_equal(records), questions), questions)
    note = "; ".join(filter(None, (note, format_alike(questions)))) or None
    if (num_buckets := len({bucket for record in records for bucket in record.buckets})) > _MAX_BUCKETS:
        raise EvidenceError(
            f"{path}: expected {_MAX_BUCKETS:,} buckets at most, as each is judged and shown, got "
            f"{num_buckets:,}; group by a field of fewer values"
        )
    asked = {clean(case.case_id): case.asked for case in found}
    return Outcomes(
        clean(name).replace("/", "."),
        path,
        format,
        records,
        task,
        asked,
        [asks[record.case_id] for record in records],
        problems,
        note=note,
        left_out=left_out,
        **known,
    )


def _number_equal(records: list[CaseRecord]) -> list[CaseRecord]:
    """Number the records whose digests are equal, as lm-eval's are: only their ids tell such questions apart."""
    counts: Counter[str] = Counter()
    for i in sort_by_id(records):
        digest = records[i].input_digest
        counts[digest] += 1
        if counts[digest] > 1:
            records[i] = change_row(records[i], input_digest=digest_json([digest, counts[digest] - 1]))
    return records


def digest_asked(asked: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each part of what a case asks."""
    return {part: digest_part(value) for part, value in asked.items()}


def _check_once(cases: Iterable[Case]) -> None:
    first: dict[str, str] = {}
    for case in cases:
        name = case.case_id.strip()  # a space more makes no other case
        if name in first:
            raise EvidenceError(
                f"{case.where}: case {name!r} is there twice, first in {first[name]}; every case may count once"
            )
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


def _make_record(case: Case, digest: str, numeric: set[str], problems: dict[str, str]) -> CaseRecord:
    scores = {}
    for name in sorted(numeric):
        number = read_number(case.scores.get(name))
        if number is not None and math.isfinite(number):
            scores[name] = number
        elif case.failure is None:
            came = repr(case.scores[name])[:_MAX_SHOWN] if case.scores.get(name) not in (None, "") else "none"
            problems.setdefault(
                name, f"{case.where}: case {case.case_id!r}: expected a finite number as {name!r}, got {came}"
            )
    return CaseRow(
        case_id=clean(case.case_id),
        input_digest=digest,
        cluster=case.cluster,
        buckets=case.buckets,
        prompt=clean(case.prompt),
        output=clean(case.output),
        num_choices=case.num_choices,
        scores={} if case.failure else scores,
        failure=clean(case.failure) if case.failure else case.failure,
        fingerprint="",
    )


def _group(case: Case, grouping: Grouping) -> tuple[str, tuple[str, ...]]:
    for name in (*((grouping.cluster,) if grouping.cluster else ()), *grouping.buckets):
        if case.fields.get(name) in (None, ""):
            raise EvidenceError(
                f"{case.where}: case {case.case_id!r}: expected a field {name!r} to group by, found "
                f"none; it has {show_names(sorted(map(str, case.fields)))}"
            )
    cluster = clean(str(case.fields[grouping.cluster]) if grouping.cluster else case.cluster)
    named = (clean(f"{name}/{case.fields[name]}") for name in grouping.buckets)
    return cluster, tuple(dict.fromkeys((*map(clean, case.buckets), *named)))


def show_names(names: Iterable[str]) -> str:
    """Write names for a message, as far as they fit."""
    return shorten(list(names), _MAX_NAMES)


def shorten(value: Any, most: int) -> str:
    """Write a value for a message, with so many characters at most."""
    said = repr(value)
    return said if len(said) <= most else f"{said[:most]}..."
