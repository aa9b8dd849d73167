"""What the gate and the report of a network track read beside the scores: gain, costs, and the layers' errors."""

from __future__ import annotations

from typing import Any

from pipeline.gate.images import read_notes
from pipeline.gate.pairing import Evidence
from pipeline.network_params import SPEED_STEPS
from pipeline.verdict_records import GAIN_BELOW, Gain, MedianInterval


def measure_gain(evidence: Evidence) -> Gain | None:
    """Return what a candidate's steps for speed gain, by its first eval; None where it has none."""
    steps = tuple(step["kind"] for step in evidence.candidate.steps if step["kind"] in SPEED_STEPS)
    if not steps:
        return None
    what = " and ".join(steps)
    speed = next((read_notes(evidence, name)["speed"] for name in evidence.records), None)
    if speed is None:
        left = "; ".join(fallback.reason for fallback in evidence.candidate.fallbacks)
        return Gain(steps=steps, baseline="", why=f"{what}: not timed: {left or 'it is not in force'}")
    if speed["timed"] is None:
        differs = f"are not finite, or of other shapes than those of {speed['baseline']}"
        if speed["difference"] is not None:
            differs = (f"differ from those of {speed['baseline']} by {speed['difference']:.2g} of their standard "
                       f"deviation, more than the {speed['tolerance']:g} that rounding explains")  # fmt: skip
        return Gain(steps=steps, baseline=speed["baseline"], why=f"{what}: not timed, as its outputs {differs}")
    ratio = MedianInterval(**speed["timed"][speed["clock"]]["ratio"])
    return Gain(steps=steps, baseline=speed["baseline"], ratio=ratio, clock=speed["clock"],
                why=f"{what}: {tell_ratio(speed)}; a gain is surely below {GAIN_BELOW:g}")


def tell_ratio(speed: dict[str, Any]) -> str:
    """Say how long a candidate takes beside its baseline."""
    ratio = speed["timed"][speed["clock"]]["ratio"]
    return (f"it takes {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) of the "
            f"{speed['clock'].replace('cpu', 'CPU')} time of {speed['baseline']}")
