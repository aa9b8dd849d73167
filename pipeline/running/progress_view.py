"""The one view of a run: bars on a terminal, plain lines elsewhere, a summary at the end. The only importer of rich.

Processes of the run append facts to a file (`progress.py`), which is read a few times a second. What they print
appears above the bars. Where stderr is no terminal, or CI is set, a line for each step that works and one for the whole
run come every half minute. `run_state.py` says what is done and how long the rest takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.running.last_times import LastTimes
from pipeline.running.progress import FILE, Fact, format_duration, format_fact, format_rate, measure_rate, read_cpu_s
from pipeline.running.run_state import Clock, Ending, Estimate, Phase, Step
from pipeline.running.run_summary import format_summary

_FRAME_EVERY_S, _LINES_EVERY_S = 0.25, 30.0
_NARROW = 60  # columns: below there is no room for names of evals, rates and bars


class FactFile:
    """Reads what processes append to a file, whole lines only."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read_new(self) -> Iterator[Fact]:
        """Yield the facts since the last call; what is none is passed over."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError, TypeError):
                    yield Fact(**json.loads(line))


class View:
    """Shows a run as long as it is open. Use as a context manager; several threads may call it."""

    def __init__(
        self,
        facts: Path,
        *,
        start: float | None = None,
        clock: Clock = time.monotonic,
        console: Console | None = None,
    ) -> None:
        """Prepare it.

        Args:
            facts: the file for what processes say, made new; beside it lie the last times and the machine.
            start: of the run, by the clock, where work was done ahead of the view; None: now.
            clock: seconds.
            console: where it is shown.
        """
        self._console = console or Console(stderr=True, highlight=False)
        self._facts_path, self._facts, self._clock = facts, FactFile(facts), clock
        self._last = LastTimes(facts.with_name("last_times.json"), facts.with_name("machine.json"))
        is_terminal = self._console.is_interactive and not os.environ.get("CI")
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self.has_bars = is_terminal
        self.later = Estimate()  # what comes after the phase at hand
        self._phases: list[Phase] = []
        self._lock, self._end = threading.RLock(), threading.Event()
        self._last_lines = clock()
        self._start = self._last_lines if start is None else start

    def __enter__(self) -> View:
        self._facts_path.parent.mkdir(parents=True, exist_ok=True)
        self._facts_path.write_bytes(b"")
        os.environ[FILE] = str(self._facts_path.resolve())
        if self.has_bars:
            self._live.start()
        self._thread = threading.Thread(target=self._go_on, daemon=True, name="progress-view")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bars away, and say what was done."""
        self._end.set()
        self._thread.join()
        self.tick()
        self._live.stop()
        os.environ.pop(FILE, None)
        self._facts_path.unlink(missing_ok=True)
        if self._phases:
            for line in format_summary(self._phases, self._clock() - self._start, read_cpu_s()):
                print(line, file=sys.stderr, flush=True)

    def plan(
        self,
        title: str,
        planned: Sequence[str],
        *,
        num_jobs: int = 1,
        is_serial: bool = False,
        of_dvc: Collection[str] = (),
    ) -> Phase:
        """Plan a phase by the last times of this machine.

        Args:
            title: what it does.
            planned: names of steps in their order, those of one candidate next to each other.
            num_jobs: steps at once.
            is_serial: the steps begin one after another, and none says that it ends.
            of_dvc: steps that DVC runs one after the other for each owner.
        """
        return Phase(
            title,
            planned,
            num_jobs=num_jobs,
            last=self._last,
            clock=self._clock,
            is_serial=is_serial,
            of_dvc=of_dvc,
        )

    @contextlib.contextmanager
    def open_phase(self, phase: Phase, *, is_last: bool = False) -> Iterator[None]:
        """Show a phase for the block; its steps at work end as it does.

        Args:
            phase: as planned.
            is_last: nothing comes later.
        """
        with self._lock:
            self._phases.append(phase)
            self.later = Estimate() if is_last else self.later
        how: Ending = "failed"
        try:
            yield
            how = "done"
        except KeyboardInterrupt:
            how = "interrupted"
            raise
        finally:
            self.close_phase(how)

    def close_phase(self, how: Ending) -> None:
        """Say that the phase ends; a second time it says nothing."""
        self.tick()
        with self._lock:
            self._phases[-1].close(how)

    def begin(self, name: str) -> None:
        """Say that a step of the phase begins."""
        with self._lock:
            self._phases[-1].begin(name)
            self._announce()

    def end(self, name: str, how: Ending = "done") -> None:
        """Say that a step of the phase ends."""
        self.tick()  # what its process said last
        with self._lock:
            self._phases[-1].end(name, how)

    def finish(self, names: Collection[str], how: Ending = "done") -> dict[str, Step]:
        """Say that of these steps of the phase none is left; return those that began, by name."""
        self.tick()
        with self._lock:
            return self._phases[-1].finish(names, how)

    def drop(self, name: str) -> None:
        """Say that a step of the phase needs no work."""
        with self._lock:
            self._phases[-1].drop(name)

    def show(self, line: str) -> None:
        """Show a line that a process printed, as it is."""
        with self._lock:
            if self.has_bars and sys.stdout.isatty():
                self._console.print(Text.from_ansi(line), soft_wrap=True)
            else:
                print(line, flush=True)

    def say(self, line: str) -> None:
        """Show a line about the run itself."""
        with self._lock:
            if self.has_bars:
                self._console.print(Text(line), soft_wrap=True)
            else:
                print(line, file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Take up what processes said, and show it when it is time."""
        with self._lock:
            for fact in self._facts.read_new():
                if self._phases:
                    self._phases[-1].take(fact)
                    self._announce()
            if self.has_bars:
                self._live.update(self._draw(), refresh=True)
            elif self._clock() - self._last_lines >= _LINES_EVERY_S:
                self._last_lines = self._clock()
                for line in self._format_lines():
                    self.say(line)

    def leave(self) -> None:
        """Take the bars away, whoever works on."""
        self._live.stop()

    def _go_on(self) -> None:
        while not self._end.wait(_FRAME_EVERY_S):
            self.tick()

    def _announce(self) -> None:
        """Say in a log which step has begun; bars show it."""
        phase = self._phases[-1]
        for step in phase.running:
            if not self.has_bars and not step.is_announced:
                self.say(f"progress: {_format_name(step)} begins, step {step.number} of {phase.total}")
            step.is_announced = True

    def _format_lines(self) -> Iterator[str]:
        """Yield a line for each step at work, and one for the whole run."""
        if not self._phases or not (phase := self._phases[-1]).running:
            return
        for step in phase.running:
            yield f"progress: {_format_name(step)}: {_format_step(phase, step)}"
        done = f"{phase.num_done} of {phase.total} steps done, {len(phase.running)} at work"
        yield f"progress: {done}, {self._format_times(phase)}"

    def _format_times(self, phase: Phase) -> str:
        estimate = phase.predict().followed_by(self.later)
        return f"{format_duration(self._clock() - self._start)} so far, {format_estimate(estimate)}"

    def _draw(self) -> Group | str:
        """Return the bars."""
        if not self._phases or not (phase := self._phases[-1]).total:
            return ""
        is_wide = self._console.width >= _NARROW
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        count = f"{phase.num_done} of {phase.total} steps"
        head.add_row(Text(phase.title, "bold"), _draw_bar(phase.total, phase.num_done), count)
        notes = [
            Text(f"  {fact.note}", "dim")
            for step in phase.running
            for fact, _ in step.find_work(phase.now)
            if fact.note
        ]
        return Group(head, Text(self._format_times(phase)), _draw_steps(phase, is_wide=is_wide), *notes)


@contextlib.contextmanager
def end_on_sigterm(view: View, before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Take the bars away and say so before SIGTERM or SIGHUP ends this process as ever; for the main thread.

    Args:
        view: of the run.
        before: ends what would go on by itself.
    """

    def leave(number: int, _: FrameType | None) -> None:
        before()
        view.leave()
        with contextlib.suppress(OSError):  # the terminal may be gone; unbuffered, as this may come within a write
            os.write(2, f"quantgate: ended by {signal.Signals(number).name}; what finished is kept\n".encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # a terminal that is closed, unless `nohup` has it passed by
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    old = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def format_estimate(estimate: Estimate) -> str:
    """Return how long a run still takes, and how much of it nobody knows."""
    if not estimate.num_unknown:
        return f"about {format_duration(estimate.seconds)} left"
    if not estimate.num_known:
        return "no earlier run on this machine: no estimate"
    steps = "1 step" if estimate.num_unknown == 1 else f"{estimate.num_unknown} steps"
    return f"more than {format_duration(estimate.seconds)} left: {steps} never ran here"


def _format_name(step: Step) -> str:
    return f"{step.owner}: {step.stage}" if step.owner else step.stage


def _format_step(phase: Phase, step: Step) -> str:
    """Return how far a step is, as words."""
    left_s = phase.predict_step_s(step)
    for fact, began in step.find_work(phase.now):
        return format_fact(fact, phase.now - began, left_s=left_s)
    left = "" if left_s is None else f", about {format_duration(left_s)} left"
    return f"{format_duration(phase.now - step.start)} so far{left}"


def _draw_steps(phase: Phase, *, is_wide: bool) -> Table:
    """Return a row for each step at work: name, eval, cases, rate, bar, and the time that is left."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=None if is_wide else 1)
    if is_wide:
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True, justify="right")
        table.add_column(ratio=1, min_width=8)
    else:
        table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, justify="right")
    for step in phase.running:
        piece, count, rate = "", "", ""
        work = step.find_work(phase.now)
        for fact, began in work[:1]:
            others = len(work) - 1
            piece, count = fact.piece + f" +{others}" * (others > 0), f"{fact.done:,}/{fact.total:,}"
            per_s = measure_rate(fact, phase.now - began)
            rate = format_rate(per_s) if per_s and fact.done < fact.total else ""
        left_s = phase.predict_step_s(step)
        left = "" if left_s is None else _format_clock(left_s)
        name = f"{step.owner} {step.stage}".strip()
        if is_wide:
            table.add_row(name, piece, count, rate, _draw_step_bar(phase, step, left_s), left)
        else:
            table.add_row(name, count, left)
    return table


def _draw_bar(total: float, done: float) -> ProgressBar:
    return ProgressBar(total, done, complete_style="cyan")


def _draw_step_bar(phase: Phase, step: Step, left_s: float | None) -> ProgressBar | str:
    """Return the bar of a step by its time, or by the cases of its eval where nobody knows that."""
    if left_s is not None:
        gone = phase.now - step.start
        return _draw_bar(gone + left_s or 1.0, gone)
    return next((_draw_bar(fact.total, fact.done) for fact, _ in step.find_work(phase.now)), "")


def _format_clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
