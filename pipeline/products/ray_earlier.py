"""What an earlier run of an evaluation on Ray has left: shards that need no second evaluation, unless they are stale.

Whether settings, cases and code are still the same is known as soon as this run has finished a shard of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from pipeline.running.shards import Attempt, Shard, read_attempts


class EarlierShards:
    """The attempts at shards that lay in a candidate's folder when this run began."""

    def __init__(self, folder: Path) -> None:
        """Read them.

        Args:
            folder: the candidate's, with a folder of each shard.

        Raises:
            EvidenceError: an attempt's index can't be read.
        """
        self._folder, self._attempts = folder, read_attempts(folder)

    @property
    def finished(self) -> set[Shard]:
        """The shards of which one is whole."""
        return _list_finished(self._attempts.values())

    def drop_stale(self) -> list[Shard]:
        """Remove those that had other settings, cases or code, as the first new shard tells.

        Beside them, no evaluation could be made of the new shards.

        Returns:
            The shards that nobody has finished now. None at all while this run has not finished one, nor once it has
            told.
        """
        now = read_attempts(self._folder)
        new = [attempt for path, attempt in now.items() if path not in self._attempts and attempt.is_finished]
        if not self._attempts or not new:
            return []
        keys = {name: made.key for attempt in new for name, made in attempt.evals.items()}
        stale = {path: attempt for path, attempt in self._attempts.items() if _is_stale(attempt, keys)}
        self._attempts = {}
        for path in stale:
            shutil.rmtree(path)
        left = _list_finished(attempt for path, attempt in now.items() if path not in stale)
        return sorted(_list_finished(stale.values()) - left, key=lambda shard: shard.number)


def read_entries_by_eval(folder: Path) -> dict[str, bytes]:
    """Return the whole entries of all attempts at a shard.

    Args:
        folder: of the shard.
    """
    entries: dict[str, bytes] = {}
    for path in sorted(folder.glob("*/*.jsonl")):
        data = path.read_bytes()
        entries[path.stem] = entries.get(path.stem, b"") + data[: data.rfind(b"\n") + 1]
    return entries


def _list_finished(attempts: Iterable[Attempt]) -> set[Shard]:
    return {Shard(attempt.number, attempt.count) for attempt in attempts if attempt.is_finished}


def _is_stale(attempt: Attempt, keys: Mapping[str, str]) -> bool:
    return any(keys.get(name, made.key) != made.key for name, made in attempt.evals.items())
