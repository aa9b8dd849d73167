"""Where a run stands: which steps are done, how far the others are, how long all of it will take. No terminal, no file.

A run has phases, one after another. In a phase steps wait in their order, so many work at once, and the steps of one
candidate or product follow each other. How long a step takes is what it took the last time on this machine
(`last_times.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pipeline.running.last_times import LastTime, LastTimes
from pipeline.running.progress import Fact, predict_left_s

Clock = Callable[[], float]
_RESTS_AFTER_S = 10.0  # while cases of another eval have the places

Ending = Literal["done", "failed", "interrupted"]


@dataclass(frozen=True)
class Estimate:
    """How long work takes.

    Attributes:
        seconds: of the steps whose time is known.
        num_unknown: steps that never ran on this machine.
        num_known: the others.
    """

    seconds: float = 0.0
    num_unknown: int = 0
    num_known: int = 0

    def followed_by(self, other: Estimate) -> Estimate:
        """Return how long both take, one after the other."""
        return Estimate(
            self.seconds + other.seconds, self.num_unknown + other.num_unknown, self.num_known + other.num_known
        )


@dataclass
class Piece:
    """A piece of a step's work.

    Attributes:
        fact: the last one about it.
        since: when its rate begins: as it began, or went on after other pieces had the machine.
        before: so many were done then.
        advanced: when more was done last.
        num_advances: facts since then that said of more.
    """

    fact: Fact
    since: float
    before: int
    advanced: float
    num_advances: int = 0

    def take(self, fact: Fact, now: float) -> None:
        """Take up the next fact."""
        if fact.done > self.fact.done:
            if self.rests(now):
                self.since, self.before, self.num_advances = now, self.fact.done, 0
            self.advanced = now
            self.num_advances += 1
        self.fact = fact

    def rests(self, now: float) -> bool:
        """Tell whether it stands still for much longer than between two facts so far."""
        if not self.num_advances:
            return False
        usual_s = (self.advanced - self.since) / self.num_advances or _RESTS_AFTER_S / 2
        return now - self.advanced > max(_RESTS_AFTER_S, 10 * usual_s)

    @property
    def pace(self) -> tuple[Fact, float]:
        """What its rate is measured by: the fact, with what was done before as kept, and since when."""
        return replace(self.fact, kept=self.before), self.since


@dataclass
class Step:
    """A step that has begun.

    Attributes:
        name: a stage and its candidate or product, as in "evaluate@int8".
        number: its place in the phase, counted from 1.
        start: when, by the clock.
        seconds: that it took; None: it works.
        outcome: how it ended.
        is_taken: its result was made ahead.
        cpu_s: seconds of CPU time that it took; 0: nobody said so.
        is_announced: a log says that it has begun.
        pieces: of its work, by their names; the last one told is the last here.
    """

    name: str
    number: int
    start: float
    seconds: float | None = None
    outcome: Literal[""] | Ending = ""
    is_taken: bool = False
    cpu_s: float = 0.0
    is_announced: bool = False
    pieces: dict[str, Piece] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        """What it does."""
        return self.name.partition("@")[0]

    @property
    def owner(self) -> str:
        """The candidate or product."""
        return self.name.partition("@")[2]

    def find_work(self, now: float) -> list[tuple[Fact, float]]:
        """Return what is at work, as `Piece.pace` has it, the least done first, and what has not begun behind it."""
        unfinished = [piece for piece in self.pieces.values() if piece.fact.done < piece.fact.total]
        unfinished.sort(key=lambda piece: (piece.fact.done == 0, piece.fact.done / piece.fact.total))
        moving = [piece for piece in unfinished if not piece.rests(now)]
        return [piece.pace for piece in moving or unfinished or list(self.pieces.values())[-1:]]

    @property
    def num_kept(self) -> int:
        """Cases that an earlier run had finished."""
        return sum(piece.fact.kept for piece in self.pieces.values())

    @property
    def num_counted(self) -> int:
        """Cases of all its work so far."""
        return sum(piece.fact.total for piece in self.pieces.values())


class Phase:
    """Steps that are worked on so many at once. Not safe among threads: the view has the lock."""

    def __init__(
        self,
        title: str,
        planned: Sequence[str],
        *,
        num_jobs: int,
        last: LastTimes,
        clock: Clock,
        is_serial: bool = False,
        of_dvc: Collection[str] = (),
    ) -> None:
        """Plan it.

        Args:
            title: what it does.
            planned: names of steps in their order, those of one candidate next to each other.
            num_jobs: steps at once.
            last: times of the steps.
            clock: seconds.
            is_serial: the steps begin in order, and each ends where the next begins; those in between are passed over.
            of_dvc: steps that DVC runs one after the other for each owner; how many work beside them counts for little.
        """
        self.title, self.num_jobs, self.is_serial = title, num_jobs, is_serial
        self.waiting, self.steps, self.num_passed = list(planned), dict[str, Step](), 0
        self.reused: list[str] = []  # what needed no step, for the summary
        self._of_dvc = of_dvc
        self._last, self._clock = last, clock

    @property
    def now(self) -> float:
        """Seconds by the clock."""
        return self._clock()

    @property
    def total(self) -> int:
        """Steps in all, as far as is known."""
        return self.num_passed + len(self.steps) + len(self.waiting)

    @property
    def num_done(self) -> int:
        """Steps that have ended, or were passed over."""
        return self.num_passed + sum(step.seconds is not None for step in self.steps.values())

    @property
    def running(self) -> list[Step]:
        """Steps at work, in the order in which they began."""
        return [step for step in self.steps.values() if step.seconds is None]

    def begin(self, name: str) -> None:
        """Say that a step begins; a second time it says nothing."""
        if name in self.steps:
            return
        if self.is_serial:
            for step in self.running:
                self.end(step.name)
            while name in self.waiting and self.waiting[0] != name:
                self.drop(self.waiting[0])
        if name in self.waiting:
            self.waiting.remove(name)
        self.steps[name] = Step(name, self.num_passed + len(self.steps) + 1, self._clock())

    def end(self, name: str, how: Ending = "done") -> None:
        """Say that a step ends; its time is kept where it did all of its work."""
        step = self.steps[name]
        step.seconds = self._clock() - step.start
        step.outcome = how
        if how == "done" and not (step.num_kept or step.is_taken):
            self._last.keep(name, LastTime(round(step.seconds, 3), self._count_jobs(name), step.num_counted))

    def _end_before(self, name: str) -> None:
        """End the stage that DVC ran before this one."""
        for step in self.running:
            if step.name in self._of_dvc and step.owner == name.partition("@")[2]:
                self.end(step.name)

    def _count_jobs(self, name: str) -> int:
        return 1 if name in self._of_dvc else self.num_jobs

    def finish(self, names: Collection[str], how: Ending = "done") -> dict[str, Step]:
        """Say that of these steps none is left, and return those that began: the others needed no work."""
        for name in names:
            self.drop(name)
        begun = {name: step for name, step in self.steps.items() if name in names}
        for step in begun.values():
            if step.seconds is None:
                self.end(step.name, how)
        return begun

    def drop(self, name: str) -> None:
        """Say that a step that waits needs no work."""
        if name in self.waiting:
            self.waiting.remove(name)
            self.num_passed += self.is_serial

    def take(self, fact: Fact) -> None:
        """Take up what a process says of its step; one that names none is no part of the run."""
        if not fact.step:
            return
        if fact.step not in self.steps:
            if fact.step in self._of_dvc:
                self._end_before(fact.step)
            self.begin(fact.step)
        step = self.steps[fact.step]
        step.is_taken |= fact.is_taken
        step.cpu_s = fact.cpu_s or step.cpu_s
        if fact.piece:
            now = self._clock()
            piece = step.pieces.pop(fact.piece, None) or Piece(fact, now, fact.kept, now)
            piece.take(fact, now)
            step.pieces[fact.piece] = piece

    def close(self, how: Ending = "done") -> None:
        """Say that the phase ends, and with it what is at work."""
        for step in self.running:
            self.end(step.name, how)

    def predict_step_s(self, step: Step) -> float | None:
        """Return the seconds that a step at work still takes; None: nobody knows."""
        now = self._clock()
        known = (predict_left_s(fact, now - began) for fact, began in step.find_work(now))
        by_rate = max((left_s for left_s in known if left_s is not None), default=None)
        if (last := self._last.find(step.name)) is None:
            return by_rate  # of the pieces of work at hand
        whole = last.predict_s(self._count_jobs(step.name), num_kept=step.num_kept)
        return max(0.0, whole - (now - step.start), by_rate or 0.0)

    def predict(self) -> Estimate:
        """Return how long the rest takes with so many at once: whoever is free first has the next candidate."""
        names = [step.name for step in self.running] + self.waiting
        known = [name for name in names if self._last.find(name) is not None]
        ends: dict[str, float] = {}
        for step in self.running:
            ends[step.owner] = ends.get(step.owner, 0.0) + (self.predict_step_s(step) or 0.0)
        waiting: dict[str, float] = {}
        for name in self.waiting:
            owner, seconds = name.partition("@")[2], self._predict_s(name)
            rest = ends if owner in ends else waiting
            rest[owner] = rest.get(owner, 0.0) + seconds
        jobs = [*ends.values(), *[0.0] * (self.num_jobs - len(ends))]
        heapq.heapify(jobs)
        for seconds in waiting.values():
            heapq.heapreplace(jobs, jobs[0] + seconds)
        seconds = sum(ends.values()) + sum(waiting.values()) if self.is_serial else max(jobs)
        return Estimate(seconds, len(names) - len(known), len(known))

    def _predict_s(self, name: str) -> float:
        last = self._last.find(name)
        return 0.0 if last is None else last.predict_s(self._count_jobs(name))
