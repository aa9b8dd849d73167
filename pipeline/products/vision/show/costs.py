"""What each candidate of a network product costs, and how its numbers hold: a table, a row a candidate.

A column in which no candidate has anything to say, as compilation where nothing is compiled, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.wording import escape_markdown, format_value
from pipeline.products.vision.findings.notes import LayerNotes, NetworkNotes
from pipeline.products.vision.findings.speed import (
    describe_difference,
    format_clock,
    format_ratio,
    format_shape,
    read_soundly,
)
from pipeline.records.evaluations import BuiltCandidate
from pipeline.records.medians import GAIN_BELOW, MedianInterval
from pipeline.report.markdown import render_name

_NOTHING = "–"
_CANDIDATE, _ENGINE, _BASELINE, _GAIN = "candidate", "run by", "baseline", "gain"
_TIME, _WALL, _TOTAL = "time to its baseline", "by the wall clock", "in total"
_PEAK, _SHARE, _WORK = "peak, MiB", "to the reference's", "work"
_COMPILED = "graphs / graph breaks / recompilations / first call"
_FORMATS, _REORDERS = "modules in another format", "reorders"
_ERROR, _HEADROOM, _FINITE = "largest relative error", "least headroom, doublings", "finite outputs"
_COLUMNS = (
    _CANDIDATE,
    _ENGINE,
    _TIME,
    _WALL,
    _BASELINE,
    _GAIN,
    _TOTAL,
    _PEAK,
    _SHARE,
    _WORK,
    _COMPILED,
    _FORMATS,
    _REORDERS,
    _ERROR,
    _HEADROOM,
    _FINITE,
)

_EMULATED = """- **a convolution policy is emulated**: what comes out, and so every accuracy here, is that of Lavin
  and Gray's transforms (points 0, ±1, ±2) in the arithmetic it names; a kernel with other points loses otherwise. Its
  time and memory say nothing and are left out: what real kernels gain is in `benchmarks/README.md`, from ncnn, whose
  F(4,3) has other points, in float32."""
_USUAL = {_ENGINE: "torch"}  # what alone makes no column
_LEGEND = {  # by column
    _ENGINE: """- **run by**: the engine that serves and is evaluated; **in total** is the time of one batch to that of
  the reference, each by its own engine, in turn, with its 95 % interval.""",
    _TIME: f"""- **time**: of one batch on this machine, {{shape}}, candidate / baseline in turn, the median of the
  ratios with its 95 % interval. The baseline of a memory format and of compilation is the same candidate without them,
  of any other the same weights in float32 without a step; **in total** is to the reference in float32 without a step,
  whatever the baseline, by the wall clock where it is slower by that. A step for speed is a gain where the interval
  ends below {GAIN_BELOW:g}; what is slower in total has none, and is timed no further. Where outputs of
  the same weights differ by more than rounding explains, nothing is timed.""",
    _COMPILED: """- **graphs** are all that torch compiled, **graph breaks** those of the first shape,
  **recompilations** the graphs of the others; where the **limit** is reached, the shapes after it run without.
  The **first call** compiles, beside whatever else the machine worked on.""",
    _PEAK: "- **peak** is what running the largest picture holds at most, weights included; counted, not sampled.",
    _WORK: """- **work**: pixels that the network is run on, per pixel of the largest picture, as tiles
  overlap. What tiles alone cost is timed beside whole pictures, other steps within the same tiles.""",
    _FORMATS: """- **modules in another format** write channels first although channels-last was asked for; **reorders**
  are oneDNN's copies of activations between formats, channels first → channels last.""",
    _ERROR: """- **largest relative error** is that of any layer's output against the reference in float32,
  accumulated from the input on, and **headroom** how often the largest output can double before its number format
  ends: both on a few pictures. Numbers inside a Winograd convolution are larger than those it writes.""",
    _FINITE: "- **finite outputs**: the share of all pictures whose raw outputs hold neither NaN nor infinity.",
}


def has_policy(candidate: BuiltCandidate) -> bool:
    """Say whether the arithmetic of its convolutions is emulated."""
    return any(step["kind"] == "conv_policy" for step in candidate.steps)


def explain_network_costs(compared: ReleaseComparison) -> str:
    """Say how to read the table: what was measured, and what was not."""
    columns = tabulate_network_costs(compared)[0]
    lines = [text for column, text in _LEGEND.items() if column in columns]
    known = next((n for m in compared.findings.values() if (n := read_soundly(m.evidence))), None)
    shape = format_shape(known.shapes) if known else "the most common shape"
    lines = [line.replace("{shape}", shape) for line in lines]
    if any(m.evidence and has_policy(m.evidence.candidate) for m in compared.findings.values()):
        lines.insert(0, _EMULATED)
    return "\n".join(["How to read this table:", "", *lines])


def tabulate_network_costs(compared: ReleaseComparison) -> list[list[str]]:
    """Return the rows of a Markdown table, the head first: a row for each candidate, by its first eval."""
    rows = [_describe(name, findings, compared) for name, findings in compared.findings.items()]
    columns = [c for c in _COLUMNS if any(row.get(c, _NOTHING) not in (_NOTHING, _USUAL.get(c)) for row in rows)]
    aligned = ["---:" if c in (_PEAK, _SHARE, _WORK, _FINITE) else "---" for c in columns]
    return [columns, aligned, *([row.get(c, _NOTHING) for c in columns] for row in rows)]


def _describe(name: str, findings: CandidateFindings, compared: ReleaseComparison) -> dict[str, str]:
    """Return what is known of one candidate, by column."""
    row, notes = {_CANDIDATE: f"`{name}`"}, read_soundly(findings.evidence)
    if findings.evidence:
        row[_ENGINE] = findings.evidence.candidate.serving.engine
    if notes is None:
        return row  # refused: what it cost is not known either
    row |= _fill_time(notes) | _fill_numbers(notes) | _fill_engine(notes)
    if findings.gain is not None:
        row[_GAIN] = "yes" if findings.gain.is_sure else "**no gain**"
    if findings.evidence and findings.evidence.candidate.serving.tiling:
        row[_WORK] = f"{notes.work:.2f}"
    if notes.peak_mib is not None:
        row[_PEAK] = f"{notes.peak_mib:.1f}"
        reference = read_soundly(compared.findings[compared.judgement.policy.reference].evidence)
        row[_SHARE] = f"{notes.peak_mib / reference.peak_mib:.2f}" if reference and reference.peak_mib else _NOTHING
    finite = next((m for m in findings.metrics if m.name.endswith("/finite_output_rate") and m.bucket is None), None)
    row[_FINITE] = format_value(finite.name, finite.value) if finite else _NOTHING
    return row


def _fill_time(notes: NetworkNotes) -> dict[str, str]:
    speed, total = notes.speed, notes.total
    row = {_TOTAL: _format_time(*total.worse)} if total and total.worse else {}
    if speed is None:
        return row
    row |= {_BASELINE: escape_markdown(speed.baseline)}
    if speed.ratio is None or speed.timed is None:
        return row | {_TIME: f"not timed: its outputs {describe_difference(speed)} the baseline's"}
    row[_TIME] = _format_time(speed.clock, speed.ratio)
    return row | ({_WALL: format_ratio(speed.timed["wall"].ratio)} if "wall" in speed.timed else {})


def _format_time(clock: str, ratio: MedianInterval) -> str:
    return f"{format_ratio(ratio)} {format_clock(clock)}"


def _fill_engine(notes: NetworkNotes) -> dict[str, str]:
    row = {}
    if (met := notes.compile) is not None:
        counts = (met.num_graphs + met.num_recompilations, met.num_graph_breaks, met.num_recompilations)
        row[_COMPILED] = (
            " / ".join(map(str, counts))
            + f" / {met.first_call_s:.1f} s"
            + (", limit reached" if met.num_over_limit else "")
        )
    if notes.layout is not None:
        row[_FORMATS] = str(len(notes.layout.other_formats))
        row[_REORDERS] = " → ".join(str(notes.layout.num_reorders.get(key, _NOTHING)) for key in ("first", "last"))
    return row


def _fill_numbers(notes: NetworkNotes) -> dict[str, str]:
    if not notes.layers:
        return {}
    worst, least = find_worst_layer(notes.layers), find_scarcest_layer(notes.layers)
    return {
        _ERROR: f"{format_error(notes.layers[worst])}{_name_layer(worst, notes.layers[worst].error != 0)}",
        _HEADROOM: f"{format_headroom(notes.layers[least])}{_name_layer(least, True)}",
    }


def _name_layer(name: str, is_named: bool) -> str:
    return f" in {render_name(name)}" if is_named else ""


def find_worst_layer(layers: Mapping[str, LayerNotes]) -> str:
    """Return the layer with the largest relative error, of equals the first."""
    return max(layers, key=lambda name: layers[name].error)


def find_scarcest_layer(layers: Mapping[str, LayerNotes]) -> str:
    """Return the layer with the least headroom, of equals the first: that in which an overflow begins."""
    return min(layers, key=lambda name: layers[name].headroom)


def format_error(layer: LayerNotes) -> str:
    """Write a relative error with two significant digits, or that it is not finite."""
    if math.isinf(layer.error):
        return "not finite"
    return f"{100 * layer.error:.2g} %" if layer.error else "0"


def format_headroom(layer: LayerNotes) -> str:
    """Write the doublings that are left, or that it overflowed."""
    return "overflow" if layer.headroom == -math.inf else f"{layer.headroom:.1f}"


def count_overflows(layers: Iterable[LayerNotes]) -> int:
    """Return how many layers wrote NaN or infinity."""
    return sum(layer.nonfinite_count > 0 for layer in layers)
