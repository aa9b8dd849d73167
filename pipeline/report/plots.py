"""The plot of every report, harm against tolerance, and what the plots of all kinds have in common.

Drawn without pyplot (no global state, no display) and saved without dates or versions, so that
equal numbers give equal files. Colours are from the Okabe-Ito set, and no meaning rests on colour
alone: outcomes also differ in marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from pipeline.gate.verdicts import Judgement
from pipeline.gate.wording import format_tolerance
from pipeline.records.files import replace_whole
from pipeline.records.verdicts import Comparison, Metric, Verdict
from pipeline.report.pictures.shown import render_figure

OUTCOMES = {"pass": ("#009E73", "o", 7), "inconclusive": ("#E69F00", "D", 7), "fail": ("#D55E00", "X", 9)}
SIDES = ("#4D4D4D", "#0072B2", "#56B4E9", "#E69F00", "#CC79A7", "#009E73", "#D55E00", "#F0E442")
_MAX_SHOWN = 6.0  # tolerances; a harm beyond is drawn at the edge with an arrow
_PANELS_A_ROW = 3
_MAX_CANDIDATES = 12  # of a picture that people can still read
_DPI = 130

Row = tuple[str, str | None, float | None]  # metric, bucket, tolerance


def plot_harm(judgement: Judgement, path: Path) -> None:
    """Draw each gated comparison's harm and bounds in units of its tolerance, one panel a candidate."""
    panels = [
        (v, {(c.metric, c.bucket, c.tolerance): c for c in v.comparisons if c.outcome in OUTCOMES})
        for v in choose_shown(judgement)
    ]
    rows = list(dict.fromkeys(row for _, drawn in panels for row in drawn))
    num_columns = min(max(len(panels), 1), _PANELS_A_ROW)
    num_lines = max(1, -(-len(panels) // num_columns))
    size = (3.2 + 2.7 * num_columns, 0.9 + num_lines * (0.8 + 0.3 * max(len(rows), 2)))
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    axes = figure.subplots(num_lines, num_columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, (verdict, drawn) in zip(axes, panels, strict=False):
        _draw_panel(axis, drawn, rows)
        axis.set_title(f"{verdict.candidate}: {verdict.outcome}", fontsize=10)
    axes[0].set_yticks(range(len(rows)), [_row_label(*row) for row in rows], parse_math=False)  # "$" is no formula
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    axes[0].set_xlim(*_reach([c for _, drawn in panels for c in drawn.values()]))
    figure.supxlabel(
        "harm in units of the tolerance, right is worse (dashed line: the tolerance; "
        f"bar: one-sided {1 - judgement.policy.alpha:.0%} bounds){format_shown(judgement)}",
        fontsize=9,
    )
    _add_outcome_legend(figure)
    save_figure(figure, path)


def choose_shown(judgement: Judgement) -> list[Verdict]:
    """Return the candidates that a picture shows: all, or the first of many, those of the release before others."""
    if len(judgement.verdicts) <= _MAX_CANDIDATES:
        return list(judgement.verdicts)
    return sorted(judgement.verdicts, key=lambda verdict: not verdict.is_release)[:_MAX_CANDIDATES]


def format_shown(judgement: Judgement) -> str:
    """Say in the title of a picture that it does not show all candidates; nothing where it does."""
    num = len(judgement.verdicts)
    return f"; {_MAX_CANDIDATES} of {num} candidates, all are in report.md" if num > _MAX_CANDIDATES else ""


def _reach(comparisons: Sequence[Comparison]) -> tuple[float, float]:
    ends = [x / c.tolerance for c in comparisons if c.tolerance for x in (c.low, c.high)]
    return max(-_MAX_SHOWN, min([-1.0, *ends])) - 0.2, min(_MAX_SHOWN, max([2.0, *ends])) + 0.3


def _draw_panel(axis: Axes, drawn: dict[Row, Comparison], rows: Sequence[Row]) -> None:
    axis.axvspan(1, 2 * _MAX_SHOWN, color="#000000", alpha=0.05, linewidth=0)
    axis.axvline(0, color="#808080", linewidth=0.8)
    axis.axvline(1, color="#000000", linewidth=1.1, linestyle="--")
    for height, row in enumerate(rows):
        if row in drawn:
            _draw_comparison(axis, drawn[row], height)
        else:
            axis.text(1.15, height, "refused", fontsize=8, color="#606060", va="center")
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(axis="both", labelsize=8, labelbottom=True)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_comparison(axis: Axes, comparison: Comparison, height: int) -> None:
    scale = comparison.tolerance or 1.0
    colour, marker, size = OUTCOMES[comparison.outcome]
    low, harm, high = (
        max(-_MAX_SHOWN, min(_MAX_SHOWN, x / scale)) for x in (comparison.low, comparison.harm, comparison.high)
    )
    axis.plot([low, high], [height, height], color=colour, linewidth=2.2, solid_capstyle="butt")
    if comparison.harm / scale > _MAX_SHOWN:
        axis.plot([_MAX_SHOWN], [height], color=colour, marker=">", markersize=9)
        axis.text(_MAX_SHOWN - 0.25, height, f"{comparison.harm / scale:.0f} ×", fontsize=8, ha="right", va="center")
    else:
        axis.plot([harm], [height], color=colour, marker=marker, markersize=size, markeredgecolor="white")


def _row_label(metric: str, bucket: str | None, tolerance: float | None) -> str:
    eval_name, _, name = metric.partition("/")
    return f"{eval_name}: {bucket or name} ({format_tolerance(metric, tolerance or 0.0)})"


def _add_outcome_legend(figure: Figure) -> None:
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=size, markeredgecolor="white", label=outcome)
        for outcome, (colour, marker, size) in OUTCOMES.items()
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=8, frameon=False)


def draw_bars(axis: Axes, metrics: Sequence[Metric | None], number: int, width: float, label: str) -> None:
    """Draw one side's bars, a metric a group, in percent with its interval.

    Args:
        axis: to draw on.
        metrics: one a group; None leaves its place empty.
        number: of the side, 0-based.
        width: of a bar, in groups.
        label: of the side.
    """
    known = [(i, m) for i, m in enumerate(metrics) if m is not None]
    places = [i + number * width for i, _ in known]
    values = [100 * m.value for _, m in known]
    axis.bar(
        places,
        values,
        width=0.92 * width,
        color=SIDES[number % len(SIDES)],
        label=label,
        hatch="////" if number >= len(SIDES) else None,
    )  # colours are used up
    for place, (_, metric) in zip(places, known, strict=True):
        if metric.low is not None and metric.high is not None:
            axis.plot([place, place], [100 * metric.low, 100 * metric.high], color="#000000", linewidth=1)


def style_bars(axis: Axes, num_sides: int, ylabel: str, title: str) -> None:
    """Give a plot of bars its title, scale and legend."""
    axis.set_ylim(0, 100)
    axis.set_ylabel(ylabel, fontsize=9)
    axis.set_title(title, fontsize=10, loc="left")
    if num_sides:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=min(num_sides, 6), fontsize=8, frameon=False)
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def save_figure(figure: Figure, path: Path) -> None:
    """Save as PNG under a temporary name first; without metadata the bytes follow from the numbers.

    Git keeps these files: one without pictures in it has as few colours as a palette holds, at a third of the bytes.
    """
    image = render_figure(figure)
    if not any(axis.images for axis in figure.axes):
        image = image.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    with replace_whole(path) as temporary:
        image.save(temporary, format="PNG", optimize=True)
