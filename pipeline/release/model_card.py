"""A model card for a released candidate: what the gate found, for people and in Hugging Face's `model-index` form.

The card's front matter holds one result per gated metric and bucket, so a hub shows them where it shows any model's
results; its text holds the bounds, which that form has no place for. What the model is for, its licence and its
data are its owner's to write.
"""

from __future__ import annotations

from typing import Any

from pipeline.gate.verdicts import Judgement, released_verdicts
from pipeline.gate.wording import (
    definition_of,
    escape_markdown,
    format_harm,
    format_tolerance,
    format_value,
    is_rate,
    name_comparison,
)
from pipeline.products import find_eval_kind
from pipeline.records.verdicts import Comparison, Verdict
from pipeline.settings.base import RELEASE

CARDS = "cards"  # folder of a bundle


def render_cards(judgement: Judgement) -> dict[str, str]:
    """Return the card of each released candidate by its file's name; nothing but the judgement is in them."""
    bundle = (RELEASE / judgement.policy.product).as_posix()  # as a reader would type it
    return {
        f"{verdict.candidate}.md": _render_card(judgement, verdict, bundle) for verdict in released_verdicts(judgement)
    }


def _render_card(judgement: Judgement, verdict: Verdict, bundle: str) -> str:
    from huggingface_hub import ModelCardData

    gated = [c for c in verdict.comparisons if c.tolerance is not None]
    results = [_describe_result(c, judgement) for c in gated]
    data = ModelCardData(
        model_name=verdict.candidate, eval_results=results, tags=["quantgate", _name_product(judgement)]
    )
    front = data.to_yaml(line_break="\n")
    return f"---\n{front}\n---\n\n{_render_section(judgement, verdict, gated, bundle)}"


def _name_product(judgement: Judgement) -> str:
    return f"quantgate-{judgement.policy.product}"


def _describe_result(comparison: Comparison, judgement: Judgement) -> Any:
    from huggingface_hub import EvalResult

    c = comparison
    eval_name, _, metric = c.metric.rpartition("/")
    settings = judgement.policy.evals[eval_name]
    arguments = {
        "n": c.n,
        "reference": c.reference,
        "harm": c.harm,
        "harm_low": c.low,
        "harm_high": c.high,
        "confidence_one_sided": round(1 - judgement.policy.alpha, 6),
        "tolerance": c.tolerance,
        "outcome": c.outcome,
    }
    return EvalResult(
        task_type=kind.hub_task if (kind := find_eval_kind(settings["kind"])) else "other",
        dataset_type=settings.get("evalset") or settings.get("task") or eval_name,
        dataset_name=eval_name,
        dataset_config=c.bucket,
        metric_type=metric,
        metric_name=name_comparison(c),
        metric_value=c.candidate,
        metric_args=arguments,
    )


def _render_section(judgement: Judgement, verdict: Verdict, gated: list[Comparison], bundle: str) -> str:
    policy = judgement.policy
    rows = [
        "| metric | reference | this model | loss at most | tolerated | n | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    rows += [
        f"| {escape_markdown(name_comparison(c))} | {format_value(c.metric, c.reference)} | "
        f"{format_value(c.metric, c.candidate)} | {_format_bound(c)} | "
        f"{format_tolerance(c.metric, c.tolerance or 0.0)} | {c.n:,} | {c.outcome} |"
        for c in gated
    ]
    return (
        f"# {verdict.candidate}\n\n## Release gate\n\n"
        f"quantgate judged this model against `{policy.reference}`, case by case: **{verdict.outcome}**. "
        f"Each loss is bounded at {1 - policy.alpha:.0%} confidence, one-sided; rates are compared in points, "
        "perplexity in percent.\n\n" + "\n".join(rows) + "\n\n"
        f"Fingerprint of what was evaluated: `{verdict.fingerprint}`. The release bundle holds the scores of every "
        f"case; `python -m scripts.verify {bundle}` computes this verdict again from them.\n"
    )


def _format_bound(comparison: Comparison) -> str:
    """Write the upper bound of the harm; below zero it is a gain."""
    c = comparison
    if c.high < 0 and (is_rate(c.metric) or definition_of(c.metric).harm == "relative"):
        return f"none: better by {format_harm(c.metric, -c.high)} or more"
    return format_harm(c.metric, c.high)
