"""The canary on disk: what each path answered to its prompts, and the digests that tell a path from another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.records.digests import digest_json
from pipeline.records.record_files import Record, iterate_records


class CanaryAnswer(Record):
    """What one path answered to a prompt of the canary."""

    text: str
    token_ids: tuple[int, ...] | None = None  # None: the endpoint does not give them

    @property
    def content(self) -> Any:
        """What is digested: the token ids where they are known."""
        return self.text if self.token_ids is None else self.token_ids

    def is_same(self, other: CanaryAnswer) -> bool:
        """Compare by token ids where both sides know them, else by text."""
        if self.token_ids is None or other.token_ids is None:
            return self.text == other.text
        return self.token_ids == other.token_ids


class CanaryRecord(Record):
    """One prompt of the canary, and what each path made of it.

    A run is named "alone" (one request at a time), "loaded" (at the deployed concurrency) or "again" (that once
    more), with "plain " before it when speculation was off. `margins` holds, for the answers of a run, how far
    each token is ahead of the second most likely one, in nat.
    """

    case_id: str
    input_digest: str
    answers: dict[str, CanaryAnswer]
    margins: dict[str, tuple[float, ...]] = {}


class CanaryPart(Record):
    """What an endpoint answered to prompts of the canary, by their place among all, ahead of any margins."""

    fingerprint: str
    records: dict[int, CanaryRecord]
    prompt_tokens: dict[int, tuple[int, ...]]  # of a prompt; none where the endpoint does not give them


class CanaryFile(Record):
    """The canary's records on disk, and the digest of each run's answers: the behavioural fingerprint."""

    num_asked: int  # of params.yaml; there may be fewer cases
    num_prompts: int
    num_unstable: int  # prompts on which the path differs from itself: the floor
    records: str  # file name inside the evaluation folder
    sha256: str
    behaviour: dict[str, str]


def digest_behaviour(records: Sequence[CanaryRecord]) -> dict[str, str]:
    """Return the digest of each run's answers: the behavioural fingerprint."""
    runs = dict.fromkeys(run for record in records for run in record.answers)
    return {
        run: digest_json([[r.input_digest, r.answers[run].content] for r in records if run in r.answers])
        for run in runs
    }


def count_unstable(records: Sequence[CanaryRecord], prefix: str = "") -> int:
    """Count the prompts on which a path differs from itself: alone or again from loaded, whichever differs more."""
    pairs = [(prefix + "loaded", prefix + other) for other in ("alone", "again")]
    return max(
        sum(not r.answers[a].is_same(r.answers[b]) for r in records if {a, b} <= r.answers.keys()) for a, b in pairs
    )


def read_canary(path: Path) -> list[CanaryRecord]:
    """Read the canary's records; a malformed line is an EvidenceError with its number."""
    return list(iterate_records(path, CanaryRecord))
