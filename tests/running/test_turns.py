"""Turns: who has the machine alone, who waits, and that a queue of others never keeps anybody waiting."""

from __future__ import annotations

import threading
from pathlib import Path

from pipeline.products.vision.workers import measure_run, run_batch
from pipeline.running.turns import is_timed_alone, take_turn


class Visitor(threading.Thread):
    """Takes one turn and keeps it until it is let go."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        super().__init__(daemon=True)
        self.folder, self.alone = folder, alone
        self.has_turn, self.may_go = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        """Wait for the turn."""
        with take_turn(self.folder, alone=self.alone):
            self.has_turn.set()
            self.may_go.wait(60)

    def is_in(self) -> bool:
        """Say whether it has its turn, now or soon; for whoever is to wait."""
        return self.has_turn.wait(0.2)

    def comes_in(self) -> bool:
        """Say whether it gets its turn, however busy the machine is."""
        return self.has_turn.wait(60)

    def leave(self) -> None:
        """Give the turn back."""
        self.may_go.set()
        self.join(60)


def test_turns_are_shared_unless_somebody_needs_the_machine_alone(tmp_path: Path) -> None:
    first, second = (Visitor(tmp_path, alone=False) for _ in range(2))
    assert first.comes_in() and second.comes_in()
    timing = Visitor(tmp_path, alone=True)
    assert not timing.is_in()
    third = Visitor(tmp_path, alone=False)
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
    while not any(visitor.is_in() for visitor in both):
        pass
    inside, waiting = sorted(both, key=lambda visitor: not visitor.has_turn.is_set())
    assert not waiting.is_in()
    inside.leave()
    assert waiting.comes_in()
    waiting.leave()


def test_what_a_detector_s_verdict_on_speed_rests_on_is_timed_alone() -> None:
    assert is_timed_alone(measure_run) and not is_timed_alone(run_batch)
