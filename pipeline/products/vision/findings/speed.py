"""How fast a network candidate is, as its notes say: what its steps for speed gain, and what it takes in total."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.gate.pairing import Evidence
from pipeline.products.vision.findings.notes import (
    CompileNotes,
    Int8Notes,
    LayerNotes,
    NetworkNotes,
    ShapeNotes,
    SpeedNotes,
    parse_notes,
    read_network_notes,
)
from pipeline.records.medians import GAIN_BELOW, MedianInterval
from pipeline.records.serving import NetworkServing
from pipeline.records.verdicts import Gain


def measure_gain(evidence: Evidence, notes: NetworkNotes, *, speed_steps: Collection[str]) -> Gain | None:
    """Return what a candidate's steps for speed gain, by the notes of its first eval; None where it has none.

    Raises:
        EvidenceError: the notes of another eval can't be read.
    """
    steps = tuple(step["kind"] for step in evidence.candidate.steps if step["kind"] in speed_steps)
    if not steps:
        return None
    what, is_slower = " and ".join(steps), notes.total is not None and notes.total.is_slower
    timing = notes.total if is_slower else notes.speed
    if timing is None:
        left = "; ".join(fallback.reason for fallback in evidence.candidate.fallbacks)
        return Gain(steps=steps, baseline="", why=f"{what}: not timed: {left or 'it is not in force'}")
    for met in list_limits(evidence):
        return Gain(
            steps=steps,
            baseline=timing.baseline,
            why=f"{what}: {describe_limit(met)}; give it fewer shapes, or dynamic: true",
        )
    if timing.worse is None:
        return Gain(
            steps=steps,
            baseline=timing.baseline,
            why=f"{what}: not timed, as its outputs {describe_difference(timing)} those of {timing.baseline}",
        )
    clock, ratio = timing.worse
    where = f", on {format_shape(notes.shapes)}" if notes.shapes.num_shapes > 1 else ""
    end = ": it is slower than without any step" if is_slower else f"; a gain is surely below {GAIN_BELOW:g}"
    return Gain(
        steps=steps,
        baseline=timing.baseline,
        ratio=ratio,
        clock=clock,
        why=f"{what}: it takes {format_ratio(ratio)} of the {format_clock(clock)} time of {timing.baseline}"
        f"{where}{end}",
    )


def measure_total(
    evidence: Evidence, reference: Evidence, notes: NetworkNotes, limit: float | None
) -> MedianInterval | None:
    """Return the time of a candidate in total, to that of the reference run plainly; None where it has none.

    Args:
        evidence: of the candidate.
        reference: of the reference.
        notes: of the candidate's first eval.
        limit: `gate.max_slowdown`.

    Raises:
        EvidenceError: there is a limit, and it was not timed though it could be.
    """
    total = notes.total
    if total is not None and total.worse is not None:
        return total.worse[1]
    if limit is not None and total is not None:
        raise EvidenceError(
            f"gate.max_slowdown: not timed, as its outputs {describe_difference(total)} those of {total.baseline}"
        )
    serving = evidence.candidate.serving
    assert isinstance(serving, NetworkServing)
    is_other = Path(evidence.candidate.checkpoint.path) != Path(reference.candidate.checkpoint.path)
    if limit is not None and serving.choose_total(is_other=is_other) is not None and not notes.is_emulated:
        what = "is another checkpoint" if is_other else "is run in another way than in float32 without a step"
        raise EvidenceError(
            f"gate.max_slowdown: expected the time in total, as it {what}, found none in "
            f"{evidence.folder}; run `dvc repro`"
        )
    return None


def explain_untimed(evidence: Evidence) -> str | None:
    """Say why a candidate can't have a time in total; None where it can."""
    if (notes := read_soundly(evidence)) is not None and notes.is_emulated:
        return "INT8 that is emulated has no time of its own"
    serving = evidence.candidate.serving
    assert isinstance(serving, NetworkServing)
    return "an emulated policy has no time of its own" if serving.conv_policy else None


def describe_total(total: MedianInterval, limit: float | None) -> str:
    """Say how long a candidate takes in total."""
    text = f"it takes {format_ratio(total)} of the time of the reference in float32 without a step"
    return text + ("" if limit is None else f", expected at most {1 + limit:g} (gate.max_slowdown)")


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


def list_limits(evidence: Evidence) -> list[CompileNotes]:
    """Return what compilation met in each eval in which it reached torch's limit.

    Raises:
        EvidenceError: an eval's notes can't be read.
    """
    notes = (parse_notes(evidence.folder / f"{name}.json") for name in evidence.records)
    return [n.compile for n in notes if n.compile and n.compile.num_over_limit]


def describe_limit(met: CompileNotes) -> str:
    """Say that some shapes ran without compilation."""
    frames = "1 frame" if met.num_over_limit == 1 else f"{met.num_over_limit} frames"
    return (
        f"torch.compile reached its limit of {met.limit} graphs of one function at shape {met.shape_over_limit} of "
        f"{met.num_shapes} ({frames}): it and new shapes after it run without compilation"
    )


def format_shape(shapes: ShapeNotes) -> str:
    """Say what was timed: "8 pictures of 320 x 320, the most common of 2 shapes (296 of 300 pictures)"."""
    num, rows, columns = shapes.timed
    text = f"{num} picture{'' if num == 1 else 's'} of {rows} x {columns}"
    if shapes.num_shapes == 1:
        return text
    return (
        f"{text}, the most common of {shapes.num_shapes} shapes ({shapes.num_timed} of {shapes.num_pictures} pictures)"
    )


def format_ratio(ratio: MedianInterval) -> str:
    """Write a ratio of times with its interval."""
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def format_clock(clock: str) -> str:
    """Name a clock for people."""
    return clock.replace("cpu", "CPU")


def describe_difference(speed: SpeedNotes) -> str:
    """Say why two outputs were not timed side by side."""
    if speed.difference is None or speed.tolerance is None:
        return "are not finite, or of other shapes than"
    return (
        f"differ by {speed.difference:.2g} of their standard deviation, more than the {speed.tolerance:g} that "
        "rounding explains, from"
    )


def describe_emulation(int8: Int8Notes) -> str:
    """Say how many layers ran in no INT8 kernel."""
    return (
        f"emulated: of {int8.num_layers} layers in INT8 {int8.num_kernel_calls} ran in an INT8 kernel, the others were "
        "rounded and multiplied in float32: the verdict says nothing about time"
    )
