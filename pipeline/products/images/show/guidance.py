"""The picture of what guidance does to the images of a release: saturation against likeness, and where it comes from.

On the left what the gate judges, on the right the mechanism: by how much guidance widens the model's prediction at
each denoising step, which the decoder later turns into saturated colours (Lin et al. 2023, arXiv 2305.08891, section
3.4). Only the reference and candidates that guide otherwise; the numbers are those of the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence
from pipeline.gate.verdicts import Policy
from pipeline.gate.wording import escape_markdown
from pipeline.products.images.findings.decoder import read_notes
from pipeline.records.verdicts import Metric
from pipeline.report.plots import save_figure

_SATURATION, _SIMILARITY = "saturated_pixel_fraction", "clip_similarity"
_COLOURS = ("#4D4D4D", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe-Ito
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
_DPI = 130


def plot_guidance(compared: ReleaseComparison, path: Path) -> None:
    """Draw the reference and every candidate that guides otherwise, a row of panels an eval.

    Where no candidate does, the picture says so: DVC expects the file, and the report leaves it out.
    """
    policy = compared.judgement.policy
    guided = list_guided({name: m.evidence for name, m in compared.findings.items()}, policy.reference)
    ratios = {eval_name: _read_ratios(guided, eval_name) for eval_name in policy.evals}
    num_columns = 2 if any(ratios.values()) else 1
    figure = Figure(
        figsize=(1.6 + 4.2 * num_columns, 3.4 * len(ratios) + 0.25 * len(guided) + 0.5), dpi=_DPI, layout="constrained"
    )
    axes = figure.subplots(len(ratios), num_columns, squeeze=False)
    for line, (eval_name, by_step) in zip(axes, ratios.items(), strict=True):
        _draw_trade(line[0], {name: compared.findings[name] for name in guided}, eval_name, policy)
        if by_step:
            _draw_steps(line[1], by_step, list(guided))
        elif num_columns == 2:
            line[1].set_axis_off()
    if guided:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", fontsize=8, frameon=False)
    save_figure(figure, path)


def _read_ratios(guided: Mapping[str, Evidence], eval_name: str) -> dict[str, list[float]]:
    return {
        name: by_step
        for name, evidence in guided.items()
        if eval_name in evidence.records and (by_step := read_std_ratios(evidence, eval_name))
    }


def _draw_trade(axis: Axes, guided: Mapping[str, CandidateFindings], eval_name: str, policy: Policy) -> None:
    """Draw saturated pixels against CLIP similarity with 95 % intervals, and what is tolerated of the reference."""
    for number, (name, findings) in enumerate(guided.items()):
        by_name = {
            m.name.rpartition("/")[2]: m
            for m in findings.metrics
            if m.bucket is None and m.name.startswith(f"{eval_name}/")
        }
        if _SATURATION in by_name and _SIMILARITY in by_name:
            similar, saturated = by_name[_SIMILARITY], by_name[_SATURATION]
            axis.errorbar(
                similar.value,
                100 * saturated.value,
                xerr=_reach(similar, 1),
                yerr=_reach(saturated, 100),
                label=_label(name, findings, policy),
                capsize=3,
                markersize=7,
                **_style(number),
            )
            if name == policy.reference:
                _draw_tolerated(axis, similar, saturated, policy)
    axis.set_xlabel("CLIP similarity, right is better", fontsize=9)
    axis.set_ylabel("saturated pixels, %, down is better", fontsize=9)
    _finish(
        axis,
        f"{eval_name}, with 95 % intervals; dotted: what is tolerated"
        if guided
        else "No candidate guides otherwise than the reference",
    )


def _draw_steps(axis: Axes, ratios: Mapping[str, list[float]], names: list[str]) -> None:
    """Draw how much wider the guided prediction is than the conditional one at each denoising step."""
    for name, by_step in ratios.items():
        axis.plot(range(1, len(by_step) + 1), by_step, linewidth=1.4, markersize=4, **_style(names.index(name)))
    axis.axhline(1, color="#000000", linewidth=1, linestyle="--")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_yscale("log")  # the first steps are several times wider than all others
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
    axis.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.minorticks_off()
    axis.set_xlabel("denoising step", fontsize=9)
    axis.set_ylabel("std of guided / conditional prediction", fontsize=9)
    _finish(axis, "Mean over images; 1 is no guidance")


def _finish(axis: Axes, title: str) -> None:
    axis.set_title(title, fontsize=9, loc="left", parse_math=False)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8)


def _style(number: int) -> dict[str, Any]:
    return {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}


def _reach(metric: Metric, factor: float) -> list[list[float]] | None:
    if metric.low is None or metric.high is None:
        return None
    return [[factor * (metric.value - metric.low)], [factor * (metric.high - metric.value)]]


def _label(name: str, findings: CandidateFindings, policy: Policy) -> str:
    assert findings.evidence is not None
    return f"{name}{' (reference)' if name == policy.reference else ''}: {describe_guidance(findings.evidence)}"


def _draw_tolerated(axis: Axes, similar: Metric, saturated: Metric, policy: Policy) -> None:
    tolerances = [policy.tolerances.get(metric.name) for metric in (similar, saturated)]
    least, most = (t.overall if t else None for t in tolerances)
    if least is not None:
        axis.axvline(similar.value - least, color="#000000", linewidth=1, linestyle=":")
    if most is not None:
        axis.axhline(100 * (saturated.value + most), color="#000000", linewidth=1, linestyle=":")


def read_std_ratios(evidence: Evidence, eval_name: str) -> list[float]:
    """Return the ratio of guided to conditional deviation of each denoising step; none where it was not noted."""
    return list(read_notes(evidence, eval_name).get("std_ratio_by_step") or [])


def describe_guidance(evidence: Evidence) -> str:
    """Say how a candidate guides: "scale 12, rescale 0.7"."""
    serving = evidence.candidate.serving.model_dump()
    text = f"scale {serving['guidance_scale']:g}, rescale {serving['guidance_rescale']:g}"
    for step in evidence.candidate.steps:
        if step.get("dynamic_threshold_percentile") is not None:
            text += f", thresholded at {step['dynamic_threshold_percentile']:g} % up to {step['sample_max_value']:g}"
    for bucket, guidance in serving["guidance_by_category"].items():
        text += f"; {bucket}: scale {guidance['scale']:g}, rescale {guidance['rescale']:g}"
    return text


def list_guided(evidence: Mapping[str, Evidence | None], reference: str) -> dict[str, Evidence]:
    """Return the reference and every candidate that guides otherwise, in order; nothing where none does."""
    known = {name: e for name, e in evidence.items() if e is not None}
    if reference not in known:
        return {}
    plain = describe_guidance(known[reference])
    others = {name: e for name, e in known.items() if describe_guidance(e) != plain}
    return {reference: known[reference], **others} if others else {}


def explain_guidance(guided: Mapping[str, Evidence]) -> str:
    """Say how each candidate guides that guides otherwise, and how to read the picture.

    Args:
        guided: of `list_guided`.
    """
    settings = "; ".join(f"`{name}` ({escape_markdown(describe_guidance(e))})" for name, e in guided.items())
    explained = f"What guidance does: {settings}. Down and to the right is better."
    if any(read_std_ratios(e, eval_name) for e in guided.values() for eval_name in e.records):
        explained += " On the right panel: the wider guidance makes a prediction, the more images saturate."
    return explained
