"""The Markdown of a sweep: what was rendered, a row a setting, the Pareto set, and what the gate would conclude."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from examples.guidance_sweep.judging import OVERSATURATION, STD_RATIO, Estimate, SweepRow, list_pareto
from examples.guidance_sweep.settings import SATURATION, SIMILARITY
from pipeline.gate.wording import format_harm, format_range, format_tolerance
from pipeline.products.images.settings import GuidanceStep, ImagesProduct

_COLUMNS = (
    "guidance",
    "rescale",
    "threshold",
    "saturated pixels",
    "oversaturated images",
    "CLIP similarity",
    "guided std ratio",
    "Pareto set",
    "gate: saturation",
    "gate: CLIP",
    "verdict",
)
_ALIGNED = ("---:", "---:", "---", "---:", "---:", "---:", "---:", "---", "---", "---", "---")


def render_sweep(rows: Sequence[SweepRow], product: ImagesProduct, *, picture: str) -> str:
    """Return the whole of `sweep.md`.

    Args:
        rows: of `judge_sweep`.
        product: of `make_sweep_product`.
        picture: file name of the plot beside it.
    """
    parts = [
        "# Guidance: saturation against CLIP similarity",
        _format_work(rows, product),
        f"![saturated pixels against CLIP similarity, a point a setting]({picture})",
        render_table(rows),
        _format_columns(product),
        "## Pareto set",
        format_pareto(rows),
        "## What the gate would conclude",
        format_verdicts(rows),
    ]
    return "\n\n".join(parts) + "\n"


def render_table(rows: Sequence[SweepRow]) -> str:
    """Return the table, a row a setting."""
    return "\n".join([_join(_COLUMNS), f"|{'|'.join(_ALIGNED)}|", *map(_render_row, rows)])


def format_pareto(rows: Sequence[SweepRow]) -> str:
    """List the settings of the Pareto set as steps of params.yaml, the least saturated first."""
    lines = [
        f"- `{format_step(row.step)}`: saturated {100 * row.estimates[SATURATION].value:.2f} %, CLIP similarity "
        f"{row.estimates[SIMILARITY].value:.3f}; in {row.pareto_share:.0%} of bootstrap samples"
        + ("; the reference's own guidance" if row.verdict is None else "")
        for row in list_pareto(rows)
    ]
    often = [row for row in rows if not row.is_pareto and row.pareto_share >= 0.05]
    if often:
        named = ", ".join(f"`{format_step(row.step)}`" for row in often)
        lines.append(f"\nNot in it, but in 5 % of the samples or more: {named}")
    return "\n".join(lines)


def format_verdicts(rows: Sequence[SweepRow]) -> str:
    """Count the verdicts and name what would pass."""
    judged = [row for row in rows if row.verdict]
    counts = Counter(row.verdict.outcome for row in judged if row.verdict)
    outcomes = ", ".join(f"{num} {outcome}" for outcome, num in sorted(counts.items()))
    passed = [f"`{format_step(row.step)}`" for row in judged if row.verdict and row.verdict.outcome == "pass"]
    return (
        f"Of {len(judged)} settings: {outcomes}. "
        + (f"Would pass: {', '.join(passed)}. " if passed else "None would pass. ")
        + "Each is judged as if it were released alone. The best of many looks better than it is: what was chosen "
        "here should be proved on prompts or seeds that the sweep has not seen."
    )


def format_step(step: GuidanceStep) -> str:
    """Write a setting as params.yaml takes it."""
    text = f"kind: guidance, scale: {step.scale:g}, rescale: {step.rescale:g}"
    if step.dynamic_threshold_percentile is not None:
        text += (
            f", dynamic_threshold_percentile: {step.dynamic_threshold_percentile:g}, "
            f"sample_max_value: {step.sample_max_value:g}"
        )
    return f"{{{text}}}"


def format_threshold(step: GuidanceStep) -> str:
    """Write a setting's thresholding in a few words."""
    if step.dynamic_threshold_percentile is None:
        return "none"
    return f"{step.dynamic_threshold_percentile:g} %, at most {step.sample_max_value:g}"


def _format_work(rows: Sequence[SweepRow], product: ImagesProduct) -> str:
    (settings,) = product.evals.values()
    sampling = product.serving
    return (
        f"{len(rows)} settings of `{product.candidates[product.reference].checkpoint}`, {rows[0].num_prompts} prompts "
        f"of `{settings.evalset}`, each with its own seed, the same for all; {sampling.num_inference_steps} steps, "
        f"CLIP `{settings.clip}`. The reference is `{product.reference}`: guidance {sampling.guidance.scale:g}, "
        f"rescale {sampling.guidance.rescale:g}, no thresholding."
    )


def _format_columns(product: ImagesProduct) -> str:
    ((eval_name, settings),) = product.evals.items()
    tolerated = [
        f"{name} {format_tolerance(metric, allowed.overall)}"
        for name, metric in (
            ("saturation", f"{eval_name}/{SATURATION}"),
            ("CLIP similarity", f"{eval_name}/{SIMILARITY}"),
        )
        if (allowed := product.gate.tolerances.get(metric)) and allowed.overall is not None
    ]
    return (
        f"In brackets 95 % intervals by cluster, as the gate's. A pixel is saturated with a channel above 0.97, an "
        f"image oversaturated with more than {settings.oversaturated_above:.0%} of such pixels. The ratio is the "
        "standard deviation of the guided prediction over that of the conditional one, mean over the steps, "
        "before any thresholding. *Pareto set*: no other setting has fewer saturated pixels and a CLIP similarity "
        "as high, or the reverse; in brackets the share of 2,000 bootstrap samples of the prompts in which that "
        "holds. *gate*: the outcome, the loss against the reference and its one-sided bounds at "
        f"{1 - product.gate.alpha:.0%}; tolerated: {', '.join(tolerated) or 'nothing is set'}. The verdict rests on "
        f"all tolerances of the eval ({', '.join(sorted(product.gate.tolerances))})."
    )


def _render_row(row: SweepRow) -> str:
    saturated, similar = (_format_estimate(m, row.estimates[m]) for m in (SATURATION, SIMILARITY))
    over = _format_estimate(OVERSATURATION, row.estimates[OVERSATURATION])
    pareto = f"{'**yes**' if row.is_pareto else 'no'} ({row.pareto_share:.0%})"
    cells = [
        f"{row.step.scale:g}",
        f"{row.step.rescale:g}",
        format_threshold(row.step),
        saturated,
        over,
        similar,
        _format_estimate(STD_RATIO, row.estimates[STD_RATIO]),
        pareto,
        _format_outcome(row, SATURATION),
        _format_outcome(row, SIMILARITY),
        row.verdict.outcome if row.verdict else "reference",
    ]
    return _join(cells)


def _join(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _format_estimate(metric: str, estimate: Estimate) -> str:
    if metric in (SATURATION, OVERSATURATION):  # the bounds of a share that is nearly 0 may lie below it
        low, high = (100 * min(max(x, 0.0), 1.0) for x in (estimate.low, estimate.high))
        return f"{100 * estimate.value:.2f} % ({low:.2f} to {high:.2f})"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def _format_outcome(row: SweepRow, metric: str) -> str:
    comparison = row.find_comparison(metric)
    if comparison is None:
        return "–"
    bounds = format_range(comparison.metric, comparison.low, comparison.high)
    return f"{comparison.outcome}: {format_harm(comparison.metric, comparison.harm, signed=True)} ({bounds})"
