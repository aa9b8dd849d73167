"""What a network candidate's steps for speed gain, as its notes say."""

from __future__ import annotations

from pipeline.errors import EvidenceError
from pipeline.gate.network_notes import LayerNotes, NetworkNotes, SpeedNotes, read_network_notes
from pipeline.gate.pairing import Evidence
from pipeline.network_params import SPEED_STEPS
from pipeline.verdict_records import GAIN_BELOW, Gain, MedianInterval


def measure_gain(evidence: Evidence) -> Gain | None:
    """Return what a candidate's steps for speed gain, by its first eval; None where it has none.

    Raises:
        EvidenceError: its notes can't be read, whether it has such steps or not: the report shows them.
    """
    notes = read_network_notes(evidence)
    steps = tuple(step["kind"] for step in evidence.candidate.steps if step["kind"] in SPEED_STEPS)
    if not steps:
        return None
    what = " and ".join(steps)
    speed = notes.speed if notes else None
    if speed is None:
        left = "; ".join(fallback.reason for fallback in evidence.candidate.fallbacks)
        return Gain(steps=steps, baseline="", why=f"{what}: not timed: {left or 'it is not in force'}")
    ratio = speed.ratio
    if ratio is None:
        return Gain(steps=steps, baseline=speed.baseline,
                    why=f"{what}: not timed, as its outputs {tell_difference(speed)} those of {speed.baseline}")
    if (wall := speed.timed["wall"].ratio if speed.timed and "wall" in speed.timed else ratio).low > 1:
        return Gain(steps=steps, baseline=speed.baseline, ratio=wall, clock="wall",
                    why=f"{what}: by the wall clock it takes {tell_ratio(wall)} of the time of {speed.baseline}, "
                        f"though {tell_ratio(ratio)} by the {tell_clock(speed.clock)} clock; users wait by the former")
    return Gain(steps=steps, baseline=speed.baseline, ratio=ratio, clock=speed.clock,
                why=f"{what}: it takes {tell_ratio(ratio)} of the {tell_clock(speed.clock)} time of {speed.baseline}; "
                    f"a gain is surely below {GAIN_BELOW:g}")


def read_soundly(evidence: Evidence | None) -> NetworkNotes | None:
    """Return the notes of a candidate, None where there are none or they can't be read: the verdict says so."""
    try:
        return None if evidence is None else read_network_notes(evidence)
    except EvidenceError:
        return None


def list_inexact_layers(evidence: Evidence | None) -> dict[str, LayerNotes]:
    """Return the layers of a candidate; none where no layer differs from the reference's in float32, or unknown."""
    notes = read_soundly(evidence)
    return notes.layers if notes and any(layer.error for layer in notes.layers.values()) else {}


def tell_ratio(ratio: MedianInterval) -> str:
    """Write a ratio of times with its interval."""
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def tell_clock(clock: str) -> str:
    """Name a clock for people."""
    return clock.replace("cpu", "CPU")


def tell_difference(speed: SpeedNotes) -> str:
    """Say why two outputs were not timed side by side."""
    if speed.difference is None:
        return "are not finite, or of other shapes than"
    return (f"differ by {speed.difference:.2g} of their standard deviation, more than the {speed.tolerance:g} that "
            "rounding explains, from")
