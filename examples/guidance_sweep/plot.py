"""The picture of a sweep: saturated pixels against CLIP similarity, a point a setting, with 95 % intervals.

Guidance is the colour, rescaling the marker; thresholded settings are hollow. Drawn without dates, so that equal
numbers give equal files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from examples.guidance_sweep.judging import Estimate, SweepRow, list_pareto
from examples.guidance_sweep.settings import SATURATION, SIMILARITY
from pipeline.products.images.settings import ImagesProduct
from pipeline.report.plots import save_figure

_COLOURS = ("#009E73", "#0072B2", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#4D4D4D")  # Okabe-Ito
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
_TICKS = (0, 0.1, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 10, 15, 20, 30, 40, 60, 80, 100)  # percent
_DPI = 130


def plot_sweep(rows: Sequence[SweepRow], product: ImagesProduct, path: Path) -> None:
    """Draw every setting, the Pareto set as a line, and what the gate tolerates of the reference as a shaded area."""
    figure = Figure(figsize=(9.5, 6.2), dpi=_DPI, layout="constrained")
    axis = figure.subplots()
    colours, markers = (
        dict(zip(sorted({getattr(r.step, key) for r in rows}), kinds * len(rows), strict=False))
        for key, kinds in (("scale", _COLOURS), ("rescale", _MARKERS))
    )
    for row in rows:
        _draw_point(axis, row, colours[row.step.scale], markers[row.step.rescale])
    front = list_pareto(rows)
    axis.plot(
        [100 * r.estimates[SATURATION].value for r in front],
        [r.estimates[SIMILARITY].value for r in front],
        color="#000000",
        linewidth=2,
        zorder=4,
    )
    reference = rows[0].estimates
    axis.plot(
        100 * reference[SATURATION].value,
        reference[SIMILARITY].value,
        marker="o",
        color="#000000",
        markersize=14,
        markerfacecolor="none",
        zorder=2,
    )
    _shade_tolerated(axis, rows, product)
    most = max(100 * row.estimates[SATURATION].high for row in rows)
    axis.set_xscale("function", functions=(_root, np.square))  # what may ship lies near 0, and 0 itself is possible
    axis.set_xlim(0, 1.05 * most)
    axis.set_xticks([x for x in _TICKS if x <= 1.05 * most])
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g} %")
    axis.set_xlabel("saturated pixels, left is better (square-root scale)", fontsize=9)
    axis.set_ylabel("CLIP similarity, up is better", fontsize=9)
    axis.set_title(
        f"{len(rows)} settings, {rows[0].num_prompts} prompts each; bars: 95 % intervals by cluster", fontsize=10
    )
    _add_legend(figure, rows, colours, markers)
    save_figure(figure, path)


def _root(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt(np.maximum(x, 0.0))


def _draw_point(axis: Axes, row: SweepRow, colour: str, marker: str) -> None:
    saturated, similar = row.estimates[SATURATION], row.estimates[SIMILARITY]
    is_hollow = row.step.dynamic_threshold_percentile is not None
    axis.errorbar(
        100 * saturated.value,
        similar.value,
        xerr=_reach(saturated, 100, least=0),
        yerr=_reach(similar, 1, least=-1),
        marker=marker,
        markersize=7,
        color=colour,
        markerfacecolor="#FFFFFF" if is_hollow else colour,
        elinewidth=0.7,
        zorder=3,
    )


def _reach(estimate: Estimate, factor: float, *, least: float) -> list[list[float]]:
    low = max(estimate.low, least)
    return [[factor * (estimate.value - low)], [factor * (estimate.high - estimate.value)]]


def _shade_tolerated(axis: Axes, rows: Sequence[SweepRow], product: ImagesProduct) -> None:
    (eval_name,), reference = product.evals, rows[0]
    allowed = [product.gate.tolerances.get(f"{eval_name}/{metric}") for metric in (SATURATION, SIMILARITY)]
    if any(a is None or a.overall is None for a in allowed):
        return
    most, least = (
        reference.estimates[metric].value + sign * (a.overall or 0.0)
        for metric, sign, a in ((SATURATION, 1, allowed[0]), (SIMILARITY, -1, allowed[1]))
        if a
    )
    axis.fill_between([0, 100 * most], least, 1.0, color="#000000", alpha=0.07, linewidth=0, zorder=0)
    top = max(row.estimates[SIMILARITY].high for row in rows)
    axis.set_ylim(top=min(1.0, top + 0.02))


def _add_legend(figure: Figure, rows: Sequence[SweepRow], colours: dict[float, str], markers: dict[float, str]) -> None:
    def dot(colour: str, marker: str, label: str, face: str | None = None) -> Line2D:
        return Line2D([], [], color=colour, marker=marker, linestyle="", label=label, markerfacecolor=face or colour)

    handles = [dot(colour, "o", f"guidance {scale:g}") for scale, colour in colours.items()]
    handles += [dot("#4D4D4D", marker, f"rescale {rescale:g}") for rescale, marker in markers.items()]
    if any(row.step.dynamic_threshold_percentile is not None for row in rows):
        handles.append(dot("#4D4D4D", "o", "thresholded", "#FFFFFF"))
    handles += [
        Line2D(
            [],
            [],
            color="#000000",
            marker="o",
            markersize=12,
            markerfacecolor="none",
            linestyle="",
            label="the reference",
        ),
        Line2D([], [], color="#000000", linewidth=2, label="Pareto set"),
    ]
    handles.append(Line2D([], [], color="#000000", alpha=0.15, linewidth=8, label="tolerated loss"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False)
