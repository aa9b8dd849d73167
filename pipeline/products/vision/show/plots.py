"""The pictures of a network product's report that show numbers: average precision by size, and the error of each layer.

Drawn without dates, so that equal numbers give equal files. No meaning rests on colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.verdicts import Judgement
from pipeline.gate.wording import definition_of
from pipeline.products.vision.findings.notes import LayerNotes
from pipeline.products.vision.findings.speed import list_inexact_layers
from pipeline.records.verdicts import Metric
from pipeline.report.plots import draw_bars, save_figure, style_bars

_DPI = 110
_PLAIN, _OVERFLOWED = "torch's own", "NaN or infinity"
_MARKS = {
    "winograd_f43": ("#D55E00", "^"),
    "winograd_f23": ("#E69F00", "s"),
    "direct": ("#0072B2", "o"),
    _PLAIN: ("#4D4D4D", "o"),
    _OVERFLOWED: ("#000000", "X"),
}
_LEAST = 1e-7  # drawn of a relative error: about that of float32's rounding
_MAX_NAMES = 60  # of layers below the panels
_LETTERS = 40  # of a layer's name


def plot_buckets(compared: ReleaseComparison, path: Path) -> None:
    """Draw average precision by bucket of objects for the reference and every candidate, with 95 % intervals."""
    judgement = compared.judgement
    sides = {judgement.policy.reference: judgement.reference_metrics}
    sides |= {v.candidate: v.metrics for v in judgement.verdicts}
    by_side = {side: _select_areas(metrics, judgement) for side, metrics in sides.items()}
    series = {side: areas for side, areas in by_side.items() if areas}  # a refused one has no bar to explain
    areas = list(dict.fromkeys(area for by_side in series.values() for area in by_side))
    figure = Figure(
        figsize=(min(60.0, max(7.0, 1.2 + len(areas) * (0.4 + 0.15 * len(series)))), 4.2),
        dpi=_DPI,
        layout="constrained",
    )
    axis = figure.subplots()
    width = 0.85 / max(len(series), 1)
    for number, (side, by_area) in enumerate(series.items()):
        draw_bars(axis, [by_area.get(area) for area in areas], number, width, side)
    axis.set_xticks([i + 0.425 - width / 2 for i in range(len(areas))], areas, fontsize=8, parse_math=False)
    style_bars(axis, len(series), "average precision, %", "Average precision by bucket of objects, 95 % intervals")
    save_figure(figure, path)


def _select_areas(metrics: Sequence[Metric], judgement: Judgement) -> dict[str, Metric]:
    """Return AP over COCO's thresholds by bucket: all, small, medium, large, then named areas and categories."""
    kinds = judgement.policy.eval_kinds
    evals = [name for name, kind in kinds.items() if kind == "detection"]
    by_bucket = {(m.name, m.bucket): m for m in metrics}
    chosen: dict[str, Metric] = {}
    for name in evals:
        start = f"{name}\n" if len(evals) > 1 else ""
        wanted = {
            d.area: (m.name, None)
            for m in metrics
            if m.bucket is None and m.name.startswith(f"{name}/") and (d := definition_of(m.name)).iou is None
            if d.estimator == "average_precision"
        }
        settings = judgement.policy.evals[name]
        named = settings.get("areas", {}) | settings.get("categories", {})
        wanted |= {bucket: (f"{name}/ap", bucket) for bucket in named}
        chosen |= {f"{start}{area}": by_bucket[key] for area, key in wanted.items() if key in by_bucket}
    return chosen


def plot_layers(compared: ReleaseComparison, path: Path) -> None:
    """Draw the relative error of each layer against float32, a panel for each candidate that has any.

    Without any the file is written all the same, as DVC expects it; the report does not show it then.
    """
    inexact = {name: list_inexact_layers(findings.evidence) for name, findings in compared.findings.items()}
    panels = {name: layers for name, layers in inexact.items() if layers}
    num_layers = max((len(layers) for layers in panels.values()), default=0)
    figure = Figure(
        figsize=(min(16.0, max(7.0, 1.5 + 0.2 * num_layers)), 1.6 + 1.3 * max(len(panels), 2)),
        dpi=_DPI,
        layout="constrained",
    )
    axes = figure.subplots(max(len(panels), 1), 1, squeeze=False, sharex=True, sharey=True).ravel()
    if not panels:
        axes[0].set_axis_off()
        axes[0].text(0.5, 0.5, "no layer of any candidate differs from the reference in float32", ha="center")
        save_figure(figure, path)
        return
    errors = [layer.error for layers in panels.values() for layer in layers.values() if 0 < layer.error < math.inf]
    top, low = max([1e-3, *(10 * error for error in errors)]), max(_LEAST, min(errors, default=_LEAST) / 10)
    axes[0].set_ylim(low / 2, 4 * top)
    marks: set[str] = set()
    for axis, (name, layers) in zip(axes, panels.items(), strict=True):
        evidence = compared.findings[name].evidence
        formats = {layer.layer: layer.format for layer in evidence.candidate.coverage} if evidence else {}
        marks |= _draw_layers(axis, layers, formats, top)
        axis.set_title(name, fontsize=8, loc="left")
    _name_layers(axes[-1], max(map(list, panels.values()), key=len))
    figure.supylabel("relative error against float32", fontsize=8)
    _add_legend(figure, marks)
    save_figure(figure, path)


def _draw_layers(axis: Axes, layers: Mapping[str, LayerNotes], formats: Mapping[str, str], top: float) -> set[str]:
    """Draw a dot a layer; one that is equal to the reference has none, one that overflowed a cross at the top.

    Returns:
        The names of the marks that were drawn.
    """
    drawn = set()
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))  # no formula: it needs fonts
    axis.yaxis.set_minor_formatter(NullFormatter())
    for place, (name, layer) in enumerate(layers.items()):
        algorithm = formats.get(name, "").partition(" ")[0]
        mark = _OVERFLOWED if math.isinf(layer.error) else algorithm if algorithm in _MARKS else _PLAIN
        colour, marker = _MARKS[mark]
        if mark == _OVERFLOWED:
            axis.plot([place], [top], color=colour, marker=marker, markersize=7, markeredgecolor="white")
        elif layer.error:
            axis.plot([place], [max(layer.error, _LEAST)], color=colour, marker=marker, markersize=4.5)
        drawn |= {mark} if layer.error else set()
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(axis="both", labelsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return drawn


def _name_layers(axis: Axes, names: Sequence[str]) -> None:
    every = -(-len(names) // _MAX_NAMES)
    axis.set_xlim(-0.7, len(names) - 0.3)
    axis.set_xticks(
        range(0, len(names), every),
        [name[-_LETTERS:] for name in names[::every]],
        rotation=90,
        fontsize=6,
        parse_math=False,
    )


def _add_legend(figure: Figure, drawn: Collection[str]) -> None:
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", markersize=6, label=label)
        for label, (colour, marker) in _MARKS.items()
        if label in drawn
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=7, frameon=False)
