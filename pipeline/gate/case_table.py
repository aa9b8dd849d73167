"""Case records as a table: columns that are computed once, and a file that is read again when memory was needed.

A release may compare a hundred candidates on two million cases, far more than fits into memory as records. So a table
knows how to load its records: what was let go is read, and its seal checked, again when someone looks at it, for
example to show a failure; of a single record only its line is parsed. How many records stay is bounded for all tables
together; scores, a number a case, stay. A table behaves like the list of its records.

Not covered: whether the records are fit to be judged (`pairing.py`), and arrays beside them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import ClassVar, overload

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EvidenceError
from pipeline.gate.case_rows import change_row
from pipeline.records.evaluations import CaseRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MAX_RECORDS = 40_000  # in memory beside the pinned ones: about 120 MB


class _Content:
    """Records in memory, and what was computed from them."""

    def __init__(self, records: list[CaseRecord]) -> None:
        self.records = records

    @cached_property
    def digests(self) -> list[str]:
        return [record.input_digest for record in self.records]

    @cached_property
    def groups(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(record.cluster, record.buckets) for record in self.records]

    @cached_property
    def clusters(self) -> Ints:
        return _number(tuple(record.cluster for record in self.records))

    @cached_property
    def positions(self) -> dict[str, Ints]:
        found: dict[str, list[int]] = {}
        for i, record in enumerate(self.records):
            for bucket in record.buckets:
                found.setdefault(bucket, []).append(i)
        return {bucket: np.array(places, dtype=np.int64) for bucket, places in found.items()}

    @cached_property
    def guesses(self) -> Floats:
        return np.array([1 / r.num_choices if r.num_choices else 0.0 for r in self.records])


class CaseTable(Sequence[CaseRecord]):
    """The records of one eval; see the module for what it adds to a list of them."""

    _loaded: ClassVar[OrderedDict[int, tuple[CaseTable, _Content]]] = OrderedDict()  # the latest last

    def __init__(
        self,
        load: Callable[[], list[CaseRecord]],
        *,
        pick: Callable[[int], CaseRecord] | None = None,
        is_pinned: bool = False,
    ) -> None:
        """Load the records.

        Args:
            load: returns the records, the same ones each time.
            pick: returns the record at a position without the others; None: all are loaded for one.
            is_pinned: keep them in memory.

        Raises:
            EvidenceError: what `load` finds wrong.
        """
        self._load, self._pick = load, pick
        self._scores: dict[str, Floats] = {}
        self._pinned: _Content | None = None
        content = _Content(load())
        self._len = len(content.records)
        if is_pinned:
            self._pinned = content
        else:
            self._keep(content)

    @classmethod
    def of(cls, records: Sequence[CaseRecord]) -> CaseTable:
        """Return records as a table: those of a table as they are, a list's in memory."""
        return records if isinstance(records, CaseTable) else cls(lambda: list(records), is_pinned=True)

    def _keep(self, content: _Content) -> None:
        loaded = CaseTable._loaded
        loaded[id(self)] = self, content
        while len(loaded) > 1 and sum(len(table) for table, _ in loaded.values()) > _MAX_RECORDS:
            loaded.popitem(last=False)

    @property
    def _content(self) -> _Content:
        if self._pinned is not None:
            return self._pinned
        found = CaseTable._loaded.get(id(self))
        if found is None:
            self._keep(content := _Content(self._load()))
            return content
        CaseTable._loaded.move_to_end(id(self))
        return found[1]

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, index: int) -> CaseRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[CaseRecord]: ...
    def __getitem__(self, index: int | slice) -> CaseRecord | list[CaseRecord]:
        if isinstance(index, int) and self._pick and self._pinned is None and id(self) not in CaseTable._loaded:
            return self._pick(index)
        return self._content.records[index]

    def __iter__(self) -> Iterator[CaseRecord]:
        return iter(self._content.records)

    def at(self, order: Ints) -> CaseTable:
        """Return the table with its records in another order."""
        if np.array_equal(order, np.arange(len(self))):
            return self
        return CaseTable(
            lambda: [self._content.records[i] for i in order.tolist()],
            pick=lambda i: self[int(order[i])],
            is_pinned=self._pinned is not None,
        )

    def with_score(self, key: str, values: Sequence[float]) -> CaseTable:
        """Return the table with one more score in every record.

        Args:
            key: of the score.
            values: one a record, in their order.
        """
        return CaseTable(
            lambda: [_add_score(record, key, values[i]) for i, record in enumerate(self)],
            pick=lambda i: _add_score(self[i], key, values[i]),
            is_pinned=self._pinned is not None,
        )

    @property
    def digests(self) -> list[str]:
        """What each case asks."""
        return self._content.digests

    @property
    def groups(self) -> list[tuple[str, tuple[str, ...]]]:
        """The cluster and the buckets of each case."""
        return self._content.groups

    @property
    def clusters(self) -> Ints:
        """The cluster of each case as a number, 0-based, in the order of their first cases."""
        return self._content.clusters

    @property
    def buckets(self) -> list[str]:
        """The buckets that cases carry, in the order of their first cases."""
        return list(self._content.positions)

    def locate(self, bucket: str | None) -> Ints:
        """Return the positions of a bucket's cases; None selects all."""
        if bucket is None:
            return np.arange(len(self))
        return self._content.positions.get(bucket, np.empty(0, dtype=np.int64))

    def expect_guesses(self, bucket: str | None) -> float:
        """Return the share of a bucket's cases that guessing gets right: one of its choices, and no free answer."""
        return float(self._content.guesses[self.locate(bucket)].mean())

    def scores(self, key: str, *, where: str) -> Floats:
        """Return one score of every case.

        Raises:
            EvidenceError: a case lacks it.
        """
        if key not in self._scores:
            records = self._content.records
            for record in records:
                if key not in record.scores:
                    raise EvidenceError(
                        f"{where}: case {record.case_id!r} has no score {key!r}, it has {sorted(record.scores)}"
                    )
            self._scores[key] = np.array([record.scores[key] for record in records], dtype=np.float64)
        return self._scores[key]


def _add_score(record: CaseRecord, key: str, value: float) -> CaseRecord:
    return change_row(record, scores=record.scores | {key: value})


@lru_cache(maxsize=64)  # candidates have the same clusters
def _number(names: tuple[str, ...]) -> Ints:
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
