"""Turns: who has the machine alone, who waits, and that a queue of others never keeps anybody waiting."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.running.turns import have_machine_alone, keep_nobody_waiting, share_machine


class Visitor(threading.Thread):
    """Takes a turn, wants to be alone in it or not, and keeps it until it is let go.

    With a meeting, it says there that it has a turn beside others, and is met there again before it wants to be alone.
    `long` is for something that takes long.
    """

    def __init__(
        self, folder: Path, *, alone: bool = False, long: bool = False, meeting: threading.Barrier | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.folder, self.alone, self.long, self.meeting = folder, alone, long, meeting
        self.has_turn, self.may_go = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        """Wait for the turn."""
        with share_machine(self.folder), ExitStack() as stack:
            if self.meeting:
                self.meeting.wait(60)
                self.meeting.wait(60)
            if self.alone:
                stack.enter_context(have_machine_alone())
            if self.long:
                stack.enter_context(keep_nobody_waiting())
            self.has_turn.set()
            self.may_go.wait(60)

    def is_in(self) -> bool:
        """Say whether it has its turn, now or soon; for whoever is to wait."""
        return self.has_turn.wait(0.2)

    def comes_in(self) -> bool:
        """Say whether it gets its turn, however busy the machine is."""
        return self.has_turn.wait(60)

    def leave(self) -> None:
        """Give the turn back; whoever was alone then waits to go on beside others."""
        self.may_go.set()


def see_who_is_in(both: list[Visitor]) -> list[Visitor]:
    """Return two of whom one has its turn, that one first."""
    assert any(visitor.is_in() for visitor in both * 100)
    return sorted(both, key=lambda visitor: not visitor.has_turn.is_set())


def test_turns_are_shared_unless_somebody_needs_the_machine_alone(tmp_path: Path) -> None:
    first, second = (Visitor(tmp_path) for _ in range(2))
    assert first.comes_in() and second.comes_in()
    timing = Visitor(tmp_path, alone=True)
    assert not timing.is_in()
    third = Visitor(tmp_path)
    assert not third.is_in(), "who waits to time would else wait for as long as others come"
    first.leave()
    assert not timing.is_in()
    second.leave()
    assert timing.comes_in() and not third.is_in()
    timing.leave()
    assert third.comes_in()
    third.leave()


def test_one_at_a_time_is_alone(tmp_path: Path) -> None:
    both = [Visitor(tmp_path, alone=True) for _ in range(2)]
    inside, waiting = see_who_is_in(both)
    assert not waiting.is_in()
    inside.leave()
    assert waiting.comes_in()
    waiting.leave()


def test_who_was_alone_goes_on_beside_others_and_may_be_alone_again(tmp_path: Path) -> None:
    """What follows a timing would else keep the machine idle, or work while another one times."""
    with share_machine(tmp_path):
        with pytest.raises(ZeroDivisionError), have_machine_alone():
            raise ZeroDivisionError
        beside = Visitor(tmp_path)
        assert beside.comes_in()
        beside.leave()
        with have_machine_alone():
            beside = Visitor(tmp_path)
            assert not beside.is_in()
        assert beside.comes_in()
        beside.leave()
        timing = Visitor(tmp_path, alone=True)
        assert not timing.is_in()
    assert timing.comes_in()
    timing.leave()


def test_all_that_time_something_follow_each_other_before_others_go_on(tmp_path: Path) -> None:
    """To wait until the machine is empty takes longer than a timing: each waited for a batch of all others."""
    meeting = threading.Barrier(2)
    second = Visitor(tmp_path, alone=True, meeting=meeting)
    meeting.wait(60)  # it has a turn beside others
    first = Visitor(tmp_path, alone=True)
    assert not first.is_in()
    beside = Visitor(tmp_path)
    assert not beside.is_in()
    meeting.wait(60)  # it wants to be alone, later than the third came
    inside, waiting = see_who_is_in([first, second])
    assert not waiting.is_in() and not beside.is_in()
    inside.leave()
    assert waiting.comes_in() and not beside.is_in()
    waiting.leave()
    assert beside.comes_in()
    beside.leave()


def test_who_is_alone_stays_alone_when_it_asks_again(tmp_path: Path) -> None:
    with share_machine(tmp_path), have_machine_alone():
        with have_machine_alone():
            pass
        beside = Visitor(tmp_path)
        assert not beside.is_in()
    beside.leave()


def test_what_takes_long_keeps_only_those_waiting_who_want_to_be_alone(tmp_path: Path) -> None:
    """On 16 cores all stood still for the two minutes of a compilation, as a few had something to time."""
    compiling = Visitor(tmp_path, long=True)
    assert compiling.comes_in()
    both = [Visitor(tmp_path, alone=True) for _ in range(2)]
    assert not both[0].is_in() and not both[1].is_in(), "it would be timed beside a compilation"
    beside = Visitor(tmp_path)
    assert beside.comes_in()
    compiling.leave()
    assert not both[0].is_in() and not both[1].is_in()
    beside.leave()
    inside, waiting = see_who_is_in(both)
    inside.leave()
    assert waiting.comes_in()
    waiting.leave()


def test_what_takes_long_begins_when_nobody_is_alone_or_waits_for_it(tmp_path: Path) -> None:
    beside, meeting = Visitor(tmp_path), threading.Barrier(2)
    assert beside.comes_in()
    compiling = Visitor(tmp_path, long=True, meeting=meeting)
    meeting.wait(60)  # it has a turn beside others
    timing = Visitor(tmp_path, alone=True)
    assert not timing.is_in()
    meeting.wait(60)  # it wants to compile, later than the other came
    assert not compiling.is_in()
    beside.leave()
    assert timing.comes_in() and not compiling.is_in()
    timing.leave()
    assert compiling.comes_in()
    compiling.leave()


def test_a_turn_goes_on_after_what_took_long(tmp_path: Path) -> None:
    """It would be timed beside what follows, or keep everybody waiting for good."""
    with share_machine(tmp_path):
        with pytest.raises(ZeroDivisionError), keep_nobody_waiting():
            raise ZeroDivisionError
        timing = Visitor(tmp_path, alone=True)
        assert not timing.is_in()
    assert timing.comes_in()
    timing.leave()


def test_without_a_turn_nobody_is_waited_for() -> None:
    with have_machine_alone(), have_machine_alone(), keep_nobody_waiting():
        pass
