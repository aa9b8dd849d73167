"""What work says of its progress: facts as data for a view of the whole run, or plain lines where there is no view.

A view (`progress_view.py`) names a file in the variable QUANTGATE_PROGRESS. Each process of the run appends facts to
it, one JSON object a line. Facts change no result. One that can't be written is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

FILE = "QUANTGATE_PROGRESS"  # the variable that names the file
DVC_STAGE = "DVC_STAGE"  # the variable in which DVC names the stage that it runs
STEP = "QUANTGATE_STEP"  # the variable that names the step of this process and its workers, as in "evaluate@int8"
_FACT_EVERY_S, _LINE_EVERY_S = 0.5, 10.0
_STEADY_AFTER_S = 10.0  # the rate of the first cases says little: they warm caches, and the first batch ends at once
_LEAST_SHARE = 0.02  # of what was not kept: many cases begin at once, and when the first ends its rate says hours


@dataclass(frozen=True)
class Fact:
    """How far one piece of work is. Without a piece: the step begins or ends, or its whole result is taken over.

    Attributes:
        step: a stage and its candidate or product.
        piece: an eval, or what else is counted.
        unit: what is counted, such as "cases".
        done: so many, those that were kept among them.
        total: so many there are.
        kept: so many were not done in this run: a journal or the last evaluation had them.
        note: what else is to be seen, such as workers that died.
        is_taken: the result was made ahead.
        cpu_s: seconds of CPU time that the step took; 0: it goes on.
    """

    step: str
    piece: str = ""
    unit: str = ""
    done: int = 0
    total: int = 0
    kept: int = 0
    note: str = ""
    is_taken: bool = False
    cpu_s: float = 0.0


def begin_step(name: str) -> None:
    """Say that this process begins a step."""
    os.environ[STEP] = name
    tell(Fact(name))


def is_step(name: str) -> bool:
    """Say whether this process carries out a step, for DVC or for prefetch."""
    return os.environ.get(STEP) == name


def tell_taken(name: str) -> None:
    """Say that the whole result of a step was made ahead, and is taken over."""
    tell(Fact(name, is_taken=True))


def tell_cpu() -> None:
    """Say how much CPU time the step of this process took, which ends."""
    tell(Fact(os.environ.get(STEP, ""), cpu_s=read_cpu_s()))


def read_cpu_s() -> float:
    """Return the seconds of CPU time of this process and of those that have ended below it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def tell_kept(piece: str, num: int, *, unit: str = "cases") -> None:
    """Say that a piece of work is taken over whole."""
    tell(Fact(os.environ.get(STEP, ""), piece, unit, num, num, num))


def tell(fact: Fact) -> None:
    """Hand a fact to the view, where there is one."""
    if path := os.environ.get(FILE):
        line = (json.dumps(asdict(fact)) + "\n").encode()
        with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
            file.write(line)  # one write: lines of several processes don't mix


class Progress:
    """Counts what is done of a piece of work, and says so now and then."""

    def __init__(
        self, piece: str, *, total: int, kept: int = 0, unit: str = "cases", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to count.

        Args:
            piece: an eval, or what else is counted.
            total: so many there are.
            kept: so many a journal has of a run before.
            unit: what is counted.
            clock: seconds.
        """
        self._fact = Fact(os.environ.get(STEP, ""), piece, unit, kept, total, kept)
        self._clock = clock
        self._start = self._last = clock()
        if kept:
            print(f"  {piece}: {kept} finished {unit} taken from the journal", file=sys.stderr, flush=True)
        tell(self._fact)

    def advance(self, num: int = 1) -> None:
        """Count so many more."""
        self.reach(self._fact.done + num)

    def reach(self, done: int, *, note: str = "") -> None:
        """Set what is done, and what else is to be seen."""
        self._fact, now = replace(self._fact, done=done, note=note), self._clock()
        if FILE in os.environ:
            if now - self._last >= _FACT_EVERY_S or done >= self._fact.total:
                self._last = now
                tell(self._fact)
        elif now - self._last >= _LINE_EVERY_S:
            self._last = now
            print(f"  {format_fact(self._fact, now - self._start)}", file=sys.stderr, flush=True)


def measure_rate(fact: Fact, seconds: float) -> float:
    """Return how many a second are done, apart from those that were kept."""
    return (fact.done - fact.kept) / seconds if seconds > 0 else 0.0


def predict_left_s(fact: Fact, seconds: float) -> float | None:
    """Return the seconds that a piece of work still takes at its rate so far; None: nobody knows."""
    rate = measure_rate(fact, seconds)
    is_steady = seconds >= _STEADY_AFTER_S and fact.done - fact.kept >= _LEAST_SHARE * (fact.total - fact.kept)
    return (fact.total - fact.done) / rate if rate and is_steady else None


def format_fact(fact: Fact, seconds: float, *, left_s: float | None = None) -> str:
    """Return how far a piece of work is after so many seconds.

    Args:
        fact: about it.
        seconds: since it began.
        left_s: that are left, where somebody knows more than the rate says.
    """
    left_s = predict_left_s(fact, seconds) if left_s is None else left_s
    parts = [f"{fact.piece}: {fact.done:,}/{fact.total:,} {fact.unit}"]
    if fact.done < fact.total and (rate := measure_rate(fact, seconds)):
        parts.append(format_rate(rate, f" {fact.unit}"))
    if fact.note:
        parts.append(fact.note)
    if left_s:
        parts.append(f"about {format_duration(left_s)} left")
    return ", ".join(parts)


def format_rate(per_s: float, unit: str = "") -> str:
    """Return a rate with a digit that says something, where a case takes long too."""
    return f"{per_s:.1f}{unit}/s" if per_s >= 0.1 else f"{per_s * 60:.1f}{unit}/min"


def format_duration(seconds: float) -> str:
    """Return a time as a person would say it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
