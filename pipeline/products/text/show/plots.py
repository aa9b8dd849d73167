"""The pictures of a language model's report: completion by bucket, quality by size, throughput by cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.wording import is_rate, natural_key
from pipeline.report.plots import OUTCOMES, SIDES, choose_shown, draw_bars, format_shown, save_figure, style_bars

_DPI = 130


def plot_completion(compared: ReleaseComparison, path: Path) -> None:
    """Draw task completion by bucket for the reference and every candidate, with 95 % intervals."""
    judgement = compared.judgement
    evals = [name for name, kind in judgement.policy.eval_kinds.items() if kind == "trajectories"]
    names = {f"{name}/task_completion_rate": f"{name}\n" if len(evals) > 1 else "" for name in evals}
    sides = {judgement.policy.reference: judgement.reference_metrics}
    sides |= {v.candidate: v.metrics for v in choose_shown(judgement)}
    series = {
        side: {names[m.name] + (m.bucket or "all"): m for m in metrics if m.name in names}
        for side, metrics in sides.items()
    }
    buckets = sorted(
        {bucket for metrics_by_bucket in series.values() for bucket in metrics_by_bucket},
        key=lambda bucket: (not bucket.endswith("all"), natural_key(bucket)),
    )
    figure = Figure(
        figsize=(max(7.0, 1.2 + len(buckets) * (0.35 + 0.17 * len(series))), 4.2), dpi=_DPI, layout="constrained"
    )
    axis = figure.subplots()
    width = 0.8 / max(len(series), 1)
    for number, (side, metrics_by_bucket) in enumerate(series.items()):
        draw_bars(axis, [metrics_by_bucket.get(bucket) for bucket in buckets], number, width, side)
    counts = [next((f[b].n for f in series.values() if b in f), 0) for b in buckets]
    axis.set_xticks(
        [i + 0.4 - width / 2 for i in range(len(buckets))],
        [f"{b}\nn = {n:,}" for b, n in zip(buckets, counts, strict=True)],
        fontsize=8,
        parse_math=False,
    )
    axis.margins(x=0.01)
    title = f"Task completion by bucket, with 95 % intervals{format_shown(judgement)}"
    style_bars(axis, len(series), "task completion, %", title)
    save_figure(figure, path)


def plot_sizes(compared: ReleaseComparison, path: Path) -> None:
    """Draw the headline metric by the bytes of the weights, with 95 % intervals; join what nothing smaller beats."""
    judgement = compared.judgement
    metric = next(iter(judgement.policy.tolerances))
    scale = 100 if is_rate(metric) else 1
    figure = Figure(figsize=(7.0, 4.2), dpi=_DPI, layout="constrained")
    axis = figure.subplots()
    sides = [(judgement.policy.reference, "reference", judgement.reference_metrics)]
    sides += [(v.candidate, v.outcome, v.metrics) for v in choose_shown(judgement)]
    points, labels, sign = [], list[tuple[float, float, str]](), 1
    for name, outcome, metrics in sides:
        findings = compared.findings.get(name)
        found = next((m for m in metrics if (m.name, m.bucket) == (metric, None)), None)
        if findings is None or findings.evidence is None or found is None:
            continue
        size, value = findings.evidence.candidate.checkpoint.num_bytes / 1e6, scale * found.value
        sign = 1 if found.better == "higher" else -1
        points.append((size, sign * value))
        colour, marker, width = OUTCOMES.get(outcome, ("#606060", "s", 6))
        if found.low is not None and found.high is not None:
            axis.plot([size] * 2, [scale * found.low, scale * found.high], color=colour, linewidth=1.6)
        look: dict[str, Any] = {"markersize": width, "markeredgecolor": "white"}
        if outcome == "reference":  # a candidate may lie on it: it is a frame around that
            look = {"markersize": width + 4, "markeredgecolor": colour, "markerfacecolor": "none"}
        axis.plot([size], [value], color=colour, marker=marker, **look)
        labels.append((value, size, f"{name}: {outcome}"))
    _write_labels(axis, labels)
    front = find_front(points)
    axis.plot([size for size, _ in front], [sign * y for _, y in front], color="#808080", linewidth=0.9, zorder=0)
    axis.set_xlabel("megabytes of weights, as stored", fontsize=9)
    axis.set_ylabel(f"{metric.rpartition('/')[2]}{', %' if scale == 100 else ''}", fontsize=9)
    line = " (line: nothing smaller is as good)" if len(front) > 1 else ""
    title = f"Quality by size, with 95 % intervals{line}{format_shown(judgement)}"
    axis.set_title(title, fontsize=10, loc="left")
    axis.margins(x=0.2)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    save_figure(figure, path)


def _write_labels(axis: Axes, labels: Sequence[tuple[float, float, str]]) -> None:
    """Write labels beside their points, (y, x, text), from above, each below those that it would cover.

    Those of the right half stand left of their points: they would leave the picture.
    """
    (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
    width, height = 0.35 * (right - left), 0.04 * (high - low)
    placed: list[tuple[float, float]] = []
    for y, x, text in sorted(labels, reverse=True):
        place = y
        for other, near in sorted(placed, reverse=True):
            if abs(near - x) < width and abs(other - place) < height:
                place = other - height
        placed.append((place, x))
        line = {"arrowstyle": "-", "color": "#A0A0A0", "linewidth": 0.6}
        side, aside = ("right", -0.1) if x > (left + right) / 2 else ("left", 0.1)
        where = (x + aside * width, place)
        axis.annotate(text, (x, y), where, fontsize=8, va="center", ha=side, arrowprops=line, parse_math=False)


def find_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one beats, (size, goodness) from the smallest on: smaller and better is best."""
    front: list[tuple[float, float]] = []
    for size, goodness in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or goodness > front[-1][1]:
            front.append((size, goodness))
    return front


def plot_speed(compared: ReleaseComparison, path: Path) -> None:
    """Draw the throughput's ratio of every benchmarked candidate in every cell, with its interval."""
    speeds = {v.candidate: v.speed for v in compared.judgement.verdicts if v.speed is not None}
    cells = next(iter(speeds.values())).cells if speeds else ()
    size = (max(7.0, 1.2 + len(cells) * (0.8 + 0.2 * len(speeds))), 3.6)
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    axis = figure.subplots()
    axis.axhline(1, color="#000000", linewidth=1.1, linestyle="--")
    for number, (name, speed) in enumerate(speeds.items()):
        shift = 0.15 * (number - (len(speeds) - 1) / 2)
        ratios = [cell.throughput_tokens_per_s.ratio for cell in speed.cells]
        errors = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
        axis.errorbar(
            [i + shift for i in range(len(ratios))],
            [r.median for r in ratios],
            yerr=errors,
            fmt="o",
            capsize=4,
            color=SIDES[(number + 1) % len(SIDES)],
            label=name,
        )
    axis.set_xticks(
        range(len(cells)),
        [f"{c.concurrency} in flight\n{c.prompt_tokens[0]} to {c.prompt_tokens[1]} prompt tokens" for c in cells],
        fontsize=8,
    )
    axis.set_ylabel("throughput, candidate / reference", fontsize=9)
    axis.set_title(
        "Throughput on matched work, above 1 is faster" if speeds else "No candidate was benchmarked",
        fontsize=10,
        loc="left",
    )
    if speeds:
        axis.legend(fontsize=8, frameon=False)
    save_figure(figure, path)
