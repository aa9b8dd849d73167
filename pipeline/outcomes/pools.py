"""Several evals judged as one: a pool of cases that has one tolerance and one bound.

A release passes when every metric does, and of many that lost nothing some do not by chance. Evals that ask one thing
(57 subjects, 12 languages) tell more together: the bound of their pooled loss is that of all their cases, and its
error rate is that of one metric. It bounds the loss of the whole. Each eval becomes a bucket, so that one that falls
is named, and may have a tolerance of its own.
Not covered: a loss of one eval alone that the whole outweighs and no bucket gates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from pipeline.errors import EvidenceError, SettingsError
from pipeline.gate.case_rows import change_row
from pipeline.gate.wording import format_num
from pipeline.outcomes.cases import Outcomes, shorten
from pipeline.outcomes.questions import Question, identify_prompt, join_clusters
from pipeline.outcomes.registry import Side
from pipeline.records.digests import digest_json
from pipeline.records.evaluations import CaseRecord

Pools = Mapping[str, Sequence[str]]  # names of evals, or shell patterns, by the name of their pool


def pool_sides(reference: Side, candidate: Side, pools: Pools, *, have_own_clusters: bool = True) -> tuple[Side, Side]:
    """Put the evals of each pool into one, on both sides; they are no evals of their own any more.

    Args:
        reference: a side.
        candidate: the other one.
        pools: their evals.
        have_own_clusters: whether clusters of one name in two evals are two; not where an option names their field.

    Raises:
        SettingsError: a pool has an eval's name, fewer than two evals, or one of another pool.
    """
    names = list(dict.fromkeys([*reference.outcomes, *candidate.outcomes]))
    members = {pool: _list_members(pool, patterns, names) for pool, patterns in pools.items()}
    taken: dict[str, str] = {}
    for pool, evals in members.items():
        for name in evals:
            if name in taken:
                raise SettingsError(f"--pool {pool}: {name} is in pool {taken[name]} already; an eval is in one pool")
            taken[name] = pool
    ours, theirs = (_pool_side(side, members, have_own_clusters) for side in (reference, candidate))
    return ours, theirs


def _list_members(pool: str, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    there = ", ".join(names) or "none"
    if not pool or "/" in pool or pool in names:
        raise SettingsError(f"--pool {pool}: expected a name of its own without '/'; the evals are {there}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SettingsError(f"--pool {pool}: no eval is named {pattern!r}; there are {there}")
    members = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if len(members) < 2:
        raise SettingsError(
            f"--pool {pool}: expected two evals or more, got {', '.join(members) or 'none'}; there are {there}"
        )
    return members


def _pool_side(side: Side, members: Mapping[str, Sequence[str]], have_own_clusters: bool) -> Side:
    pooled = {name for evals in members.values() for name in evals}
    outcomes = {name: found for name, found in side.outcomes.items() if name not in pooled}
    problems = list(side.problems)
    for pool, evals in members.items():
        if absent := [name for name in evals if name not in side.outcomes]:
            problems.append(
                f"{side.name}: pool {pool}: expected {', '.join(evals)}, found no fit outcomes of {', '.join(absent)}"
            )
            continue
        try:
            outcomes[pool] = _pool_outcomes(pool, [side.outcomes[name] for name in evals], have_own_clusters)
        except EvidenceError as error:
            problems.append(str(error))
    return replace(side, outcomes=outcomes, problems=tuple(problems))


def _pool_outcomes(pool: str, parts: Sequence[Outcomes], have_own_clusters: bool) -> Outcomes:
    first = parts[0]
    for part in parts[1:]:
        for what in ("format", "weight", "scores", "better", "definitions"):
            ours, theirs = getattr(first, what), getattr(part, what)
            if ours != theirs:
                raise EvidenceError(
                    f"pool {pool}: {part.path}: expected the {what} of {first.path}, "
                    f"{shorten(ours, 80)}, got {shorten(theirs, 80)}; only evals that are scored alike "
                    "are one pool"
                )
    _check_buckets(pool, parts)
    records = [_move(record, part.name, have_own_clusters) for part in parts for record in part.records]
    shared = None if have_own_clusters else _format_shared(parts)
    vague = {prompt for part in parts for prompt in _list_vague(part.records)}
    questions = [
        _make_common(question, "" if record.prompt in vague else record.prompt)
        for part in parts
        for question, record in zip(part.questions, part.records, strict=True)
    ]
    return replace(
        first,
        name=pool,
        parts=tuple(parts),
        records=join_clusters(records, questions),
        left_out=[],  # that of its parts
        questions=questions,
        task={f"{part.name}: {fact}": value for part in parts for fact, value in part.task.items()},
        note="; ".join(filter(None, (shared, *(f"{part.name}: {part.note}" for part in parts if part.note)))) or None,
        asked={f"{part.name}/{case}": asked for part in parts for case, asked in part.asked.items()},
        problems={score: said for part in reversed(parts) for score, said in part.problems.items()},
    )


def _format_shared(parts: Sequence[Outcomes]) -> str | None:
    """Say how many clusters that a field names are in more than one eval."""
    counts = Counter(cluster for part in parts for cluster in {record.cluster for record in part.records})
    num = sum(count > 1 for count in counts.values())
    if not num:
        return None
    return format_num(
        num,
        "cluster has one name in several evals and is one; else name it apart",
        "clusters have one name in several evals and are one each; else name them apart",
    )


def _list_vague(records: Sequence[CaseRecord]) -> set[str]:
    """Return the prompts that do not tell a question: those of several clusters in one eval, as a template's are."""
    clusters: dict[str, set[str]] = defaultdict(set)
    for record in records:
        clusters[record.prompt].add(record.cluster)
    return {prompt for prompt, own in clusters.items() if len(own) > 1}


def _make_common(question: Question, prompt: str) -> Question:
    """Return what tells a question in every eval: its prompt, too, which may stand in another request elsewhere.

    An id tells it within its eval alone, where it has joined its cases already.
    """
    by_prompt = identify_prompt(prompt)
    return replace(question, names=(), likes=(*question.likes, *by_prompt.keys, *by_prompt.likes))


def _check_buckets(pool: str, parts: Sequence[Outcomes]) -> None:
    """Refuse a case that would be counted in another eval's bucket, where it could outweigh that eval's loss."""
    names = {part.name for part in parts}
    for part in parts:
        taken = names - {part.name}
        if found := next((b for record in part.records for b in record.buckets if b in taken), None):
            raise EvidenceError(
                f"pool {pool}: {part.path}: expected buckets that bear no other eval's name, got "
                f"{found!r}; each eval is a bucket of the pool: rename one of the two"
            )


def _move(record: CaseRecord, eval_name: str, has_own_cluster: bool) -> CaseRecord:
    """Return a record as one of a pool: what it asks and how it is called are its eval's, and its cluster may be."""
    return change_row(
        record,
        case_id=f"{eval_name}/{record.case_id}",
        input_digest=digest_json([eval_name, record.input_digest]),
        cluster=f"{eval_name}/{record.cluster}" if has_own_cluster else record.cluster,
        buckets=tuple(dict.fromkeys((*record.buckets, eval_name))),
    )
