"""Seconds by phase: added up in order, also of a phase that failed."""

from __future__ import annotations

import pytest

from pipeline.running import phases as phases_module
from pipeline.running.phases import Phases, format_phases


def test_a_phase_that_comes_again_adds_to_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 2.0, 5.0, 5.0, 6.0])
    monkeypatch.setattr(phases_module.time, "perf_counter", lambda: next(clock))
    phases = Phases()
    for name in ("load", "save"):
        with phases.measure(name):
            pass
    with pytest.raises(ValueError, match="full"), phases.measure("load"):
        raise ValueError("full")
    phases.add({"digest": 4.0})
    assert phases.seconds == {"load": 3.0, "save": 3.0, "digest": 4.0}
    assert format_phases(phases.seconds) == "load 3.0 s, save 3.0 s, digest 4.0 s; 10.0 s in all"
