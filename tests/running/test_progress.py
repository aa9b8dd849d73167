"""What work says of its progress: facts in a file, or a line now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.running.progress import (
    FILE,
    STEP,
    Fact,
    Progress,
    begin_step,
    format_duration,
    format_fact,
    predict_left_s,
    tell,
)
from pipeline.running.progress_view import FactFile


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_without_a_view_a_line_comes_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    """`dvc repro` alone and stages by hand have no view."""
    monkeypatch.delenv(FILE, raising=False)
    progress = Progress("choices", total=100, kept=20, clock=clock)
    for _ in range(40):
        clock.now += 0.5
        progress.advance()
    assert capsys.readouterr().err.splitlines() == [
        "  choices: 20 finished cases taken from the journal",
        "  choices: 40/100 cases, 2.0 cases/s, about 30 s left",
        "  choices: 60/100 cases, 2.0 cases/s, about 20 s left",
    ]


@pytest.mark.parametrize(("seconds", "rate"), [(4, "0.5 pictures/s"), (40, "3.0 pictures/min")])
def test_the_rate_of_slow_cases_is_no_zero(seconds: float, rate: str) -> None:
    assert format_fact(Fact("evaluate@int8", "views", "pictures", 2, 100), seconds).startswith(
        f"views: 2/100 pictures, {rate}"
    )


def test_a_view_gets_facts_and_the_last_one_in_any_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, clock: Clock
) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "facts"))
    monkeypatch.setenv(STEP, "")
    begin_step("evaluate@int8")
    progress = Progress("choices", total=1000, clock=clock)
    for _ in range(1000):
        clock.now += 0.001
        progress.advance()
    begin, first, *rest, last = FactFile(tmp_path / "facts").read_new()
    assert begin == Fact("evaluate@int8") and (first.step, first.done, first.total) == ("evaluate@int8", 0, 1000)
    assert last.done == 1000 and len(rest) == 1, "a fact for each case would fill the disk"
    assert not capsys.readouterr().err


def test_facts_are_read_whole_and_once_and_what_is_none_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process may be killed in the middle of a line."""
    path = tmp_path / "facts"
    monkeypatch.setenv(FILE, str(path))
    reader = FactFile(path)
    assert not list(reader.read_new()), "nobody has said anything yet"
    tell(Fact("a"))
    whole = path.read_bytes() + b'no fact\n[1]\n{"stage": "b"}\n{"step": "c"'
    path.write_bytes(whole)
    assert list(reader.read_new()) == [Fact("a")]
    path.write_bytes(whole + b"}\n")
    assert list(reader.read_new()) == [Fact("c")]


def test_a_fact_that_can_t_be_written_costs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "gone" / "facts"))
    Progress("choices", total=1).advance()


@pytest.mark.parametrize(
    ("done", "kept", "seconds", "left_s"),
    [
        (30, 0, 10.0, 23.333),
        (30, 10, 10.0, 35.0),  # the journal's cases took no time now
        (10, 10, 10.0, None),
        (1, 0, 2.0, None),  # the first case alone says little
        (1, 0, 30.0, None),  # nor does it of many that began at once
        (2, 0, 30.0, 1470.0),
        (91, 90, 30.0, 270.0),  # a tenth of those that were left
        (100, 0, 20.0, 0.0),
    ],
)
def test_the_rest_takes_as_long_as_the_rate_says(done: int, kept: int, seconds: float, left_s: float | None) -> None:
    assert predict_left_s(Fact("s", "p", "cases", done, 100, kept), seconds) == pytest.approx(left_s, abs=1e-3)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5999, "100 min"), (6000, "1.7 h")]
)
def test_a_time_is_said_as_people_say_it(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
