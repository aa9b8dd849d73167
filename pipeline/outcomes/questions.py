"""Equal questions are one cluster and weigh alike, whatever their ids.

Twenty ids of one question are no more evidence than one, and questions that are there three times hide the loss of
others. So cases that ask the same stand in one cluster; what a file or an option says about clusters joins more and
splits none. And every question counts as often as the one that is there least often: where each is there five times,
as trials are, all count; where few are repeated, as in most benchmarks, each counts once. Repeats are left out in the
order of their ids, so that both sides leave out the same ones and no score has a say.

More spaces in a line or behind it and the way in which a letter is composed make no other question. Lines and how far
they are indented may: code asks something else then. So questions that differ in these alone are one cluster, and all
count. A case whose question is not told (a table without a `prompt`) is taken for a question of its own.
Not covered: questions that are nearly equal.
"""

from __future__ import annotations

import json
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pipeline.gate.case_rows import change_row
from pipeline.gate.wording import natural_key
from pipeline.outcomes.reading import map_texts
from pipeline.records.digests import digest_text
from pipeline.records.evaluations import CaseRecord
from pipeline.records.joining import join_by_keys

_NAME = ("id",)  # the part that tells a question within its eval alone


@dataclass(frozen=True, slots=True)
class Question:
    """What a case asks.

    Attributes:
        keys: digests of what tells it; two cases that share one ask the same.
        target: digest of what is expected: one answer may be judged by several, which are cases of their own.
        names: digests of ids that tell it within its eval.
        likes: digests of what tells it but for white space, where that is another one.
    """

    keys: tuple[str, ...]
    target: str
    names: tuple[str, ...] = ()
    likes: tuple[str, ...] = ()

    @property
    def own(self) -> tuple[str, ...]:
        """What cases of one eval share that ask the same."""
        return self.keys + self.names


def identify_question(asked: Mapping[str, Any], tells: Iterable[tuple[str, ...]], *, target: str = "") -> Question:
    """Return what a case asks; a part that is empty tells nothing.

    Args:
        asked: its parts, JSON data.
        tells: the parts, alone or together, that tell the question; the first of them must not be empty.
        target: digest of what is expected, as it stands.
    """
    parts = {name: map_texts(asked.get(name), _trim) for name in ("target", *chain.from_iterable(tells))}
    told = {
        names: [*names, *(parts[name] for name in names)]
        for names in tells
        if parts[names[0]] not in (None, "", [], {})
    }
    keys = {names: _digest(value) for names, value in told.items()}
    likes = {names: _digest(map_texts(value, _fold)) for names, value in told.items()}
    return Question(
        tuple(key for names, key in keys.items() if names != _NAME),
        target if parts["target"] == asked.get("target") else digest_part(parts["target"]),
        tuple(key for names, key in keys.items() if names == _NAME),
        tuple(like for names, like in likes.items() if names != _NAME and like != keys[names]),
    )


def identify_prompt(prompt: str) -> Question:
    """Return what a case asks of which there is a prompt alone."""
    return identify_question({"prompt": prompt}, (("prompt",),))


def digest_part(value: Any) -> str:
    """Return the digest of a part of what a case asks."""
    return digest_text(json.dumps(value, sort_keys=True, default=str))


def _digest(value: Any) -> str:
    """Return 128 bits: each case keeps some of these."""
    return digest_part(value)[:32]


def _trim(text: str) -> str:
    """Keep of white space the lines, and how far each is indented."""
    lines = (line.rstrip() for line in unicodedata.normalize("NFC", text).split("\n"))
    return "\n".join(line[: len(line) - len(line.lstrip())] + " ".join(line.split()) for line in lines).strip("\n")


def _fold(text: str) -> str:
    return " ".join(text.split())


def sort_by_id(records: Sequence[CaseRecord]) -> list[int]:
    """Return the positions of records in the order of their ids, which is that of both sides."""
    return sorted(range(len(records)), key=lambda i: (natural_key(records[i].case_id), records[i].case_id))


def join_clusters(records: Sequence[CaseRecord], questions: Sequence[Question]) -> list[CaseRecord]:
    """Give records that ask the same, but for white space, or are in one cluster already, one cluster."""
    groups = join_by_keys(
        len(records),
        (
            [("cluster", record.cluster), *question.own, *question.likes]
            for record, question in zip(records, questions, strict=True)
        ),
    )
    names: dict[int, str] = {}
    for record, group in zip(records, groups, strict=True):
        names[group] = min(names.get(group, record.cluster), record.cluster)
    return [
        record if record.cluster == names[group] else change_row(record, cluster=names[group])
        for record, group in zip(records, groups, strict=True)
    ]


def drop_repeats(
    records: Sequence[CaseRecord], questions: Sequence[Question]
) -> tuple[list[CaseRecord], list[tuple[CaseRecord, str]], str | None]:
    """Leave out repeats until every question is there equally often, and say in one line what is repeated.

    Returns:
        What is kept; what is left out, each with the id of a kept case that asks the same; and the line, if any.
    """
    repeats: dict[int, list[int]] = defaultdict(list)
    groups = join_by_keys(len(questions), ([(key, question.target) for key in question.own] for question in questions))
    for i in sort_by_id(records):
        repeats[groups[i]].append(i)
    least = min(map(len, repeats.values()))
    first = {i: places[0] for places in repeats.values() for i in places[least:]}
    if not first:
        note = (
            f"its {len(records):,} cases ask {len(repeats):,} questions, {least} times each: equal questions are one "
            "cluster; if they are not equal, let the prompt say what tells them apart"
        )
        return list(records), [], note if least > 1 else None
    example = min(first)
    often = "once" if least == 1 else f"{least} times"
    note = (
        f"{len(first):,} of {len(records):,} cases were left out, first {records[example].case_id!r}, which asks "
        f"what {records[first[example]].case_id!r} asks: every question counts {often}, as often as the one that "
        "is there least often"
    )
    left_out = [(records[i], records[kept].case_id) for i, kept in sorted(first.items())]
    return [record for i, record in enumerate(records) if i not in first], left_out, note


def format_alike(questions: Sequence[Question]) -> str | None:
    """Say how many questions are others by white space alone."""
    if not any(question.likes for question in questions):
        return None
    own, folded = (
        len(set(join_by_keys(len(questions), keys)))
        for keys in ((q.own for q in questions), (q.own + q.likes for q in questions))
    )
    return (
        None
        if own == folded
        else (
            f"its {own:,} questions are {folded:,} but for white space; all count, in one cluster each: if white space "
            "changes nothing, ask each once, as copies hide the loss of others"
        )
    )
