"""An evaluation in shards, each run by a process of its own anywhere, and merged strictly.

    python -m stages.evaluate CANDIDATE --shard 2/8

A shard holds the clusters whose hash falls to it, so that cases of one cluster stay together. Each attempt at a shard
has a folder of its own, which nobody else writes to, so a scheduler may start the same shard twice:

    build/<product>/shards/<candidate>/2-of-8/<attempt>/attempt.json     what answered, under which keys
                                                        <eval>.jsonl     finished cases, as in a journal

An attempt begins with what earlier ones of its shard finished. The stage without `--shard` takes the cases of all
shards over instead of asking for them, and then does what needs all of them. Refused are a missing or unfinished shard,
a damaged file, other settings, cases or code, another endpoint or device, and two answers to one case. The first
finished answer counts; an equal one more changes nothing.

Not covered: who starts the shards (`docs/scale.md`).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import EvidenceError, SettingsError
from pipeline.records.digests import digest_file, digest_json
from pipeline.records.evaluations import ShardCounts
from pipeline.records.fingerprints import Facts, find_difference, fingerprint
from pipeline.records.record_files import Record, read_record, write_record
from pipeline.running.journal import Journal, read_entries

_ATTEMPT = "attempt.json"
T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """One of several parts of an evaluation's cases; `number` counts from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.number}-of-{self.count}"

    def holds(self, cluster: str) -> bool:
        """Say whether the cases of a cluster belong to it; each cluster belongs to one shard."""
        return int(hashlib.sha256(cluster.encode()).hexdigest()[:16], 16) % self.count == self.number - 1


def parse_shard(text: str) -> Shard:
    """Read a shard as a command line names it.

    Raises:
        SettingsError: it is not "i/n" with i from 1 to n.
    """
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise SettingsError(f"--shard: expected a number and how many there are, such as 1/8 or 8/8, got {text!r}")
    return Shard(int(found[1]), int(found[2]))


def choose_batches(batches: Sequence[T], shard: Shard, clusters: Callable[[T], Sequence[str]]) -> list[T]:
    """Return the batches of a shard, in their order.

    Who shares a batch may change a rounding, so batches stay as one process would make them. Those that share a cluster
    stay together.

    Args:
        batches: of all cases.
        shard: the part that is wanted.
        clusters: names the clusters of a batch.
    """
    leaders: dict[str, str] = {}  # of each cluster, one that stands for all that are joined to it

    def lead(cluster: str) -> str:
        while (leader := leaders.setdefault(cluster, cluster)) != cluster:
            cluster = leader
        return cluster

    for batch in batches:
        first, *others = clusters(batch)
        for other in others:
            leaders[lead(other)] = lead(first)
    return [batch for batch in batches if shard.holds(lead(clusters(batch)[0]))]


class ShardEval(Record):
    """What an attempt has of one eval: under which key, and once it is finished how many entries in which file."""

    key: str
    num_entries: int | None = None
    sha256: str | None = None


class Attempt(Record):
    """The index of one attempt at a shard (`attempt.json`)."""

    candidate: str
    number: int
    count: int
    host: str
    fingerprint: str
    facts: dict[str, Any]  # of the endpoint that answered
    evals: dict[str, ShardEval]
    is_finished: bool = False


class AttemptFolder:
    """The folder of an attempt in the making."""

    def __init__(self, build: Path, candidate: str, shard: Shard) -> None:
        """Choose a name that no other attempt has; names sort by the time at which they began."""
        self._candidate, self._shard = candidate, shard
        self._home = _locate(build, candidate) / shard.folder
        self.path = self._home / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
        self._evals: dict[str, ShardEval] = {}
        self._facts: dict[str, Any] = {}

    @contextlib.contextmanager
    def open_journal(self, name: str, facts: Facts, *, key: str) -> Iterator[Journal]:
        """Open the journal of one eval, which begins with what earlier attempts finished; seal it at the end.

        Args:
            name: of the eval.
            facts: what is known of what answers.
            key: digest of the rest that a judgement comes from: settings, cases, code.
        """
        earlier = sorted(self._home.glob(f"*/{name}.jsonl"))
        self._facts = dict(facts)
        self._evals[name] = ShardEval(key=key)
        self._write()
        path = self.path / f"{name}.jsonl"
        with Journal(path, fingerprint=fingerprint(facts), key=key) as journal:
            for other in earlier:
                for entry in read_entries(other):
                    journal.take_over(entry)
            yield journal
        self._evals[name] = ShardEval(key=key, num_entries=len(journal), sha256=digest_file(path))
        self._write()

    def finish(self) -> int:
        """Say that the shard is whole; return the number of its entries."""
        self._write(is_finished=True)
        return sum(made.num_entries or 0 for made in self._evals.values())

    def _write(self, *, is_finished: bool = False) -> None:
        index = Attempt(
            candidate=self._candidate,
            number=self._shard.number,
            count=self._shard.count,
            host=socket.gethostname(),
            fingerprint=fingerprint(self._facts),
            facts=self._facts,
            evals=dict(self._evals),
            is_finished=is_finished,
        )
        write_record(self.path / _ATTEMPT, index)


class Shards:
    """All shards of a candidate's evaluation, whole and of one kind."""

    def __init__(self, folder: Path, attempts: Mapping[Path, Attempt]) -> None:
        """Keep what `find_shards` read."""
        self._folder = folder
        # those that count first; a retry that did not end can only contradict
        self._attempts = dict(sorted(attempts.items(), key=lambda item: (not item[1].is_finished, item[0].name)))

    @property
    def counts(self) -> ShardCounts:
        """How many there are."""
        return ShardCounts(
            num_shards=next(iter(self._attempts.values())).count,
            num_attempts=len(self._attempts),
            num_unfinished=sum(not attempt.is_finished for attempt in self._attempts.values()),
            num_hosts=len({attempt.host for attempt in self._attempts.values()}),
        )

    def merge(self, name: str, facts: Facts, *, key: str, journal: Journal) -> None:
        """Take the finished cases of one eval over into a journal.

        Args:
            name: of the eval.
            facts: of the endpoint that this process runs or asks.
            key: of the eval's settings, cases and code as they are now.
            journal: of this process.

        Raises:
            EvidenceError: a shard answered otherwise than this process would, is damaged, or contradicts another.
        """
        origins: dict[str, tuple[str, Path]] = {}  # digest of each entry, and which attempt has it
        for folder, attempt in self._attempts.items():
            path, made = folder / f"{name}.jsonl", attempt.evals.get(name)
            if made is None or (made.sha256 is None and not path.is_file()):
                continue  # killed before it had a file
            self._check_equal(folder, attempt, made, facts, key)
            _check_whole(path, made)  # once more: a server has started since `find_shards`, which takes minutes
            for entry in read_entries(path):
                mark, origin = _digest_entry(entry), origins.get(entry["key"])
                if origin is None:
                    origins[entry["key"]] = (mark, path)
                    journal.take_over(entry)
                elif origin[0] != mark:
                    raise EvidenceError(
                        f"{path}: {_name_case(entry)}: expected the answer of {origin[1]}, got another: one of the two "
                        "was not made by what the other was; remove the folder of the wrong one and run that shard "
                        "again"
                    )

    def remove(self) -> None:
        """Remove them: what they hold is in the evaluation."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check_equal(self, folder: Path, attempt: Attempt, made: ShardEval, facts: Facts, key: str) -> None:
        if made.key != key:
            raise EvidenceError(
                f"{folder}: expected the settings, cases and code of now, this attempt had others; remove "
                f"{self._folder} and run the shards again"
            )
        if attempt.fingerprint != fingerprint(facts):
            other = find_difference(facts, attempt.facts)
            what = (
                f"{other.field} {other.expected!r}, got {other.actual!r}" if other else "what answers here, got another"
            )
            raise EvidenceError(
                f"{folder}: expected {what} on {attempt.host}; run the shard again on a machine like this one, or this "
                "stage on one like that, and remove the other's folder"
            )


def find_shards(build: Path, candidate: str) -> Shards | None:
    """Return the shards of a candidate that lie in its build folder; None where there are none.

    Raises:
        EvidenceError: one is missing, damaged or not finished, or they are parts of different wholes.
    """
    folder = _locate(build, candidate)
    attempts = read_attempts(folder)
    if not attempts:
        return None
    if foreign := next((p for p, a in attempts.items() if a.candidate != candidate), None):
        raise EvidenceError(
            f"{foreign}: expected shards of {candidate!r}, found {attempts[foreign].candidate!r}; remove it"
        )
    count = find_count(folder) or 0
    finished = {attempt.number for attempt in attempts.values() if attempt.is_finished}
    if missing := [number for number in range(1, count + 1) if number not in finished]:
        raise EvidenceError(
            f"{folder}: expected {count} finished shards, found {len(finished)}; missing: "
            f"{', '.join(map(str, missing[:20]))}{', ...' if missing[20:] else ''}; run `python -m stages.evaluate "
            f"{candidate} --shard {missing[0]}/{count}`, or remove the folder to evaluate here"
        )
    for home, attempt in attempts.items():
        for name, made in attempt.evals.items():
            if made.sha256 is not None:
                _check_whole(home / f"{name}.jsonl", made)
    return Shards(folder, attempts)


def read_attempts(folder: Path) -> dict[Path, Attempt]:
    """Return the attempts at a candidate's shards, each by its own folder.

    Args:
        folder: the candidate's, with a folder of each shard.

    Raises:
        EvidenceError: an attempt's index can't be read.
    """
    return {path.parent: read_record(path, Attempt) for path in sorted(folder.glob(f"*-of-*/*/{_ATTEMPT}"))}


def find_count(folder: Path) -> int | None:
    """Return in how many shards a candidate's folder of shards was cut; None where it holds none.

    Raises:
        EvidenceError: there are some of several numbers, which can't be joined.
    """
    names = [re.fullmatch(r"\d+-of-(\d+)", path.name) for path in folder.glob("*-of-*")]
    counts = sorted({int(name[1]) for name in names if name})
    if len(counts) > 1:
        raise EvidenceError(
            f"{folder}: expected shards of one whole, found some of {' and some of '.join(map(str, counts))}; remove "
            "the folders of one kind"
        )
    return counts[0] if counts else None


def _check_whole(path: Path, made: ShardEval) -> None:
    if not path.is_file():
        raise EvidenceError(
            f"{path}: expected finished cases, found no file; remove its folder, and run that shard again"
        )
    if made.sha256 is not None and digest_file(path) != made.sha256:
        raise EvidenceError(
            f"{path}: expected {made.num_entries} entries as its attempt wrote them, got another file; copy it "
            "again, or remove its folder and run that shard again"
        )


def _locate(build: Path, candidate: str) -> Path:
    return build / "shards" / candidate


def _digest_entry(entry: Mapping[str, Any]) -> str:
    """Return a digest of an entry's content without its times, which differ from run to run."""
    if entry.get("is_measured"):
        return ""
    record = {key: value for key, value in (entry.get("record") or {}).items() if key != "latency_s"}
    return digest_json([record, entry.get("attachment"), entry.get("text")])


def _name_case(entry: Mapping[str, Any]) -> str:
    record = entry.get("record")
    return f"case {record['case_id']!r}" if record else f"entry {entry['key'][:12]}"
