"""What a user sees of a run: bars on a terminal, lines in a log, and a terminal that is whole afterwards."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.running.last_times import LastTime, LastTimes
from pipeline.running.progress import FILE, Fact, tell
from pipeline.running.progress_view import View, format_estimate
from pipeline.running.run_state import Estimate, Phase
from pipeline.running.run_summary import format_summary
from tests.paths import ROOT
from tests.running.test_progress import Clock

STEPS = ["optimize@int8", "evaluate@int8", "optimize@awq", "evaluate@awq"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def open_view(folder: Path, clock: Clock, *, width: int = 80, is_terminal: bool = True) -> tuple[View, Phase]:
    """Return a view that is not at work by itself, at a phase whose last times are known for one candidate."""
    last = LastTimes(folder / "last_times.json", folder / "machine.json")
    for name, seconds in zip(STEPS[:2], (10, 100), strict=True):
        last.keep(name, LastTime(seconds, 2, 0))
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=width, highlight=False)
    view = View(folder / "facts", clock=clock, console=console)
    phase = view.plan("candidates", STEPS, num_jobs=2)
    view._phases.append(phase)
    return view, phase


def draw(view: View) -> list[str]:
    console = Console(file=io.StringIO(), width=view._console.width, no_color=True)
    console.print(view._draw())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def work(view: View, clock: Clock) -> None:
    view.begin("evaluate@int8")
    view.begin("optimize@awq")
    view._phases[-1].take(Fact("evaluate@int8", "choices", "cases", 0, 4000))
    clock.now += 40
    view._phases[-1].take(Fact("evaluate@int8", "choices", "cases", 2000, 4000, note="2 replicas (a 20/s), 1 dead"))


@pytest.mark.parametrize("width", [80, 40])
def test_each_step_has_a_row_that_fits(tmp_path: Path, clock: Clock, width: int) -> None:
    view, _ = open_view(tmp_path, clock, width=width)
    work(view, clock)
    lines = draw(view)
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("candidates") and lines[0].endswith("0 of 4 steps")
    said = " ".join(lines[1:-3]).replace("  ", " ")
    assert said == "40 s so far, more than 70 s left: 2 steps never ran here"
    assert re.fullmatch(
        r"int8 evaluate +" + (r"choices 2,000/4,000 50.0/s .* 1:00" if width == 80 else r"2,000/4,000 1:00"), lines[-3]
    )
    assert lines[-2] == "awq optimize" and lines[-1].strip().startswith("2 replicas (a 20/s), 1 dead")


@pytest.mark.parametrize(("seconds", "rate"), [(4, "0.5/s"), (40, "3.0/min"), (600, "0.2/min")])
def test_the_rate_of_slow_cases_is_no_zero(tmp_path: Path, clock: Clock, seconds: float, rate: str) -> None:
    """Of pictures that take half a minute each the bars said 0.0 a second."""
    view, phase = open_view(tmp_path, clock)
    view.begin("evaluate@int8")
    phase.take(Fact("evaluate@int8", "views", "pictures", 0, 100))
    clock.now += seconds
    phase.take(Fact("evaluate@int8", "views", "pictures", 2, 100))
    assert f" 2/100 {rate} " in draw(view)[-1]


def test_a_log_has_a_line_for_each_step_and_one_for_the_run(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    view, _ = open_view(tmp_path, clock, is_terminal=False)
    assert not view.has_bars
    work(view, clock)
    view.tick()
    clock.now += 29
    view.tick()  # not yet again
    assert capsys.readouterr().err.splitlines() == [
        "progress: int8: evaluate begins, step 1 of 4",
        "progress: awq: optimize begins, step 2 of 4",
        "progress: int8: evaluate: choices: 2,000/4,000 cases, 50.0 cases/s, 2 replicas (a 20/s), 1 dead, "
        "about 60 s left",
        "progress: awq: optimize: 40 s so far",
        "progress: 0 of 4 steps done, 2 at work, 40 s so far, more than 70 s left: 2 steps never ran here",
    ]


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_where_nobody_looks_there_are_no_bars(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Some CI systems give a terminal to each job, and their logs would fill with frames."""
    assert open_view(tmp_path, clock)[0].has_bars
    monkeypatch.setenv(name, value)
    assert not open_view(tmp_path, clock)[0].has_bars


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(540, 0, 4), "about 9 min left"),
        (Estimate(540, 1, 3), "more than 9 min left: 1 step never ran here"),
        (Estimate(0, 4, 0), "no earlier run on this machine: no estimate"),
    ],
)
def test_an_estimate_says_what_it_does_not_know(estimate: Estimate, text: str) -> None:
    assert format_estimate(estimate) == text


def test_what_processes_say_is_taken_up_and_the_file_is_gone_at_the_end(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=io.StringIO(), width=80)
    with View(tmp_path / "facts", clock=clock, console=console) as view:
        phase = view.plan("dvc repro", ["env", "gate@people"], is_serial=True)
        with view.open_phase(phase, is_last=True):
            tell(Fact("env"))
            tell(Fact("gate@people"))
            view.tick()
            assert [step.name for step in phase.running] == ["gate@people"]
            view.close_phase("failed")
    assert FILE not in os.environ and not (tmp_path / "facts").exists()
    assert "failed: gate@people" in capsys.readouterr().err.splitlines()


RUN = """
import os, signal, sys, threading, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
from pipeline.running.progress import Progress, begin_step
from pipeline.running.progress_view import View, end_on_sigterm
folder = Path(sys.argv[1])
with View(folder / "facts") as view, end_on_sigterm(view):
    phase = view.plan("candidates", ["evaluate@int8"])
    with view.open_phase(phase):
        begin_step("evaluate@int8")
        Progress("choices", total=400, kept=100)
        view.show("int8: \\x1b[31ma warning\\x1b[0m")
        view.tick()
        (folder / "ready").touch()
        if sys.argv[2] == "wait":
            threading.Event().wait(60)
        view.end("evaluate@int8")
"""


def run_on_terminal(folder: Path, how: str, number: int | None = None, *, columns: int = 80) -> tuple[int, str]:
    """Run a view on a terminal, perhaps end it by a signal; return the exit code and what the terminal got."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR")} | {"TERM": "xterm"}
    command = [sys.executable, "-c", RUN, str(folder), how]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        shown = b""
        for data in read(ours):
            shown += data
            if number is not None and (folder / "ready").exists():
                child.send_signal(number)
                number = None
    return child.returncode, shown.decode()


def read(terminal: int) -> Iterator[bytes]:
    try:
        while data := os.read(terminal, 1 << 16):
            yield data
    except OSError:  # nobody is left who has it open
        os.close(terminal)


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_has_bars_and_the_lines_of_tasks_above_them(tmp_path: Path, columns: int) -> None:
    code, shown = run_on_terminal(tmp_path, "end", columns=columns)
    assert code == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "int8: a warning\r\n" in plain and "━━" in plain and "100/400" in plain
    assert plain.index("100 finished cases") < plain.index("a warning")
    last = plain[plain.rindex("what ran, in seconds") :].split()
    assert last[7:9] == ["int8", "evaluate"] and "300" not in last
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, -signal.SIGTERM)])
def test_however_it_ends_the_cursor_is_back_and_no_bar_is_left(tmp_path: Path, number: int, code: int) -> None:
    ended, shown = run_on_terminal(tmp_path, "wait", number)
    assert ended in (code, -number), shown
    after = shown[shown.rindex("\x1b[?25h") :]
    assert "\x1b[?25l" not in after and "━" not in after
    if ended == -signal.SIGTERM:
        assert after.endswith("quantgate: ended by SIGTERM; what finished is kept\r\n")


def test_what_was_interrupted_has_not_failed(tmp_path: Path, clock: Clock) -> None:
    view, _ = open_view(tmp_path, clock)
    phase = view.plan("dvc repro", ["env"], is_serial=True)
    with pytest.raises(KeyboardInterrupt), view.open_phase(phase):
        view.begin("env")
        clock.now += 2
        raise KeyboardInterrupt
    assert phase.steps["env"].outcome == "interrupted" and not list(phase.running)
    assert not [line for line in format_summary([phase], 2, 0) if "failed" in line]
    assert view._last.find("env") is None, "half a step would make the next estimate half of what it takes"


def test_the_last_times_of_all_phases_are_kept_beside_the_facts(tmp_path: Path, clock: Clock) -> None:
    """The later phase is planned before the first one begins, for the estimate of the whole."""
    view, _ = open_view(tmp_path, clock)
    later = view.plan("dvc repro", ["env"], is_serial=True)
    view.begin("optimize@awq")
    clock.now += 5
    view.end("optimize@awq")
    with view.open_phase(later):
        view.begin("env")
        clock.now += 2
    [times] = json.loads((tmp_path / "last_times.json").read_text()).values()
    assert times["optimize@awq"] == {"seconds": 5, "num_jobs": 2, "num_counted": 0}
    assert times["env"] == {"seconds": 2, "num_jobs": 1, "num_counted": 0} and len(times) == 4
