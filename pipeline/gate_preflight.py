"""Checks of what is asked of the gate, before any model runs: it can be proven, and was not loosened in silence."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.gate.loosening import check_loosening
from pipeline.gate.plan import check_plan, plan_gate, read_last
from pipeline.gate.verdicts import describe_policy
from pipeline.params import Params, get_track
from pipeline.settings import TRACKS, Track
from pipeline.suite_sizes import read_sizes


def check_gates(params: Params, root: Path) -> list[str]:
    """Check the gate of every track; return a warning for each tolerance that can't be proven and need not be.

    Raises:
        SettingsError: a tolerance that must be proven can't be, a setting is looser than at the last release, or a
            released candidate is not timed though it may be too slow.
    """
    warnings = []
    _check_timed(params)
    for track in [get_track(params, name, kind=Track) for name in TRACKS
                  if name == "text" or getattr(params, name) is not None]:  # fmt: skip
        check_loosening(describe_policy(track), root, material={})
        warnings += check_plan(track, plan_gate(track, read_sizes(track, root), read_last(track.name, root)))
    return warnings


def _check_timed(params: Params) -> None:
    """Refuse a limit on slowness that a released candidate escapes, as nobody times it."""
    timed = params.benchmark
    untimed = [name for name in params.release if name not in timed.candidates]
    if timed.max_slowdown is not None and untimed:
        raise SettingsError(f"benchmark.candidates: expected every released candidate, as benchmark.max_slowdown is "
                            f"{timed.max_slowdown:g}, found no {untimed[0]!r}; add it")
