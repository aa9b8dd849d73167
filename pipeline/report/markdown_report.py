"""reports/report.md: what was decided and why, for a person who opens it on GitHub.

The table of candidates comes first, then per candidate what was done to it, every comparison with
its counts and bounds, and a handful of the cases behind a failure. The text follows from the
records alone: no date, so that git shows a change only when a number changed; where speeds were measured is one of
their facts. Names and texts from records and evalsets pass `escape_markdown` or `render_block`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.gate.audits import Measured
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence
from pipeline.gate.verdicts import Judgement, Policy, blocking_verdicts, released_verdicts
from pipeline.gate.wording import (
    definition_of,
    escape_markdown,
    format_harm,
    format_p,
    format_range,
    format_tolerance,
    format_value,
    name_comparison,
    natural_key,
)
from pipeline.products.images.findings.decoder import describe_files, describe_rendering, embed_pictures
from pipeline.products.images.show.costs import COSTS_LEGEND, tabulate_costs
from pipeline.products.text.findings.canary import describe_canary
from pipeline.products.text.findings.speculation import describe_speculation
from pipeline.products.text.show.speed import describe_measurement, tabulate_speed
from pipeline.products.vision.show.costs import explain_network_costs, tabulate_network_costs
from pipeline.products.vision.show.sections import describe_network, embed_network_pictures
from pipeline.records.benchmarks import Machine
from pipeline.records.evaluations import BuiltCandidate
from pipeline.records.reasons import ReasonKind
from pipeline.records.verdicts import Comparison, Metric, Verdict
from pipeline.report.certificate_section import describe_certificate, describe_floor, tabulate_losses
from pipeline.report.explain import EXPLAINED
from pipeline.report.failure_section import explain_failure
from pipeline.report.markdown import render_table
from pipeline.report.unproven import list_unproven

_MARKS = {"pass": "✅", "fail": "❌", "inconclusive": "❔", "refused": "⛔", "no gain": "➖", "reported": "·"}
_MAX_COLUMNS = 12  # of numbers in the table of candidates, before it is turned on its side

_LEGEND = """\
## How to read this

Every case is paired with the same case of the reference. `b` counts cases that only the reference gets right, `c`
cases that only the candidate gets right. Harm is what was lost (positive = worse): points for rates, {units}. \
`at least` and `at most` are one-sided {confidence:.0%} bounds of the harm, widened where cases share a
cluster ({clusters}). `p` is the chance of so large a loss if there were no difference at all (cluster
sign-flip test), after Holm's correction over {family}.

The share of a tolerance that is spent is the harm seen against the pinned reference, not the last release: small
losses of several releases add up there.

- ✅ **pass**: the loss is proven to be within the tolerance, `at most` ≤ tolerance.
- ❌ **fail**: the loss seen is beyond the tolerance, and p ≤ {alpha:g}.
- ❔ **inconclusive**: neither; the sentence says which side it was seen on. Here this {inconclusive} a release; a
  metric of tier supporting blocks only where the loss is seen beyond its tolerance, an advisory one never. A category
  without a tolerance of its own is watched: judged by that of AP, and only a fail of it counts.
- ⛔ **refused**: the evidence is not fit to be judged.
{marks}"""
_MARKS_OF_TEXT = "- · reported only. Divergence (KL, changed outputs) says where to look and never decides.\n"
_MARKS_OF_NETWORKS = """\
- ➖ **no gain**: nothing is lost, and a step that is there for speed alone is not faster beyond noise.
- · reported only.
"""


def render_report(compared: ReleaseComparison, here: Machine | None = None) -> str:
    """Write the whole report as Markdown.

    Args:
        compared: what to report.
        here: the machine that this runs on, where known: speeds may have been measured on another.
    """
    judgement = compared.judgement
    parts = [_headline(judgement), _candidate_table(judgement), describe_floor(judgement) + "\n"]
    parts.append("![Harm of every gated comparison against its tolerance](harm.png)\n")
    if "trajectories" in judgement.policy.eval_kinds.values():
        parts.append("![Task completion by bucket](completion.png)\n")
    parts += _describe_costs(compared)
    if any(verdict.speed for verdict in judgement.verdicts):
        parts.append("![Throughput of every cell of the benchmark, candidate / reference](speed.png)\n")
    reference = compared.measured[judgement.policy.reference].evidence
    parts += [
        _candidate_section(v, compared.measured[v.candidate], reference, here, judgement.policy)
        for v in judgement.verdicts
    ]
    parts.append(_explain(judgement.policy))
    return "\n".join(parts)


def _explain(policy: Policy) -> str:
    is_text = policy.kind == "text"
    return _LEGEND.format(
        confidence=1 - policy.alpha,
        alpha=policy.alpha,
        units="percent for\nperplexity" if is_text else "others\nin their own unit",
        clusters="a template or a document" if is_text else "as the evalset says",
        marks=_MARKS_OF_NETWORKS if policy.kind == "vision" else _MARKS_OF_TEXT,
        family="all gated comparisons of the release (of the candidate alone where it is not released)",
        inconclusive="blocks" if policy.on_inconclusive == "block" else "is a warning and does not block",
    )


def _describe_costs(compared: ReleaseComparison) -> list[str]:
    """Return the table of costs of a product with pictures, how to read it, and the pictures."""
    policy = compared.judgement.policy
    evidence = {name: measured.evidence for name, measured in compared.measured.items()}
    if policy.kind == "images":
        return [
            render_table(tabulate_costs(compared)) + COSTS_LEGEND,
            *embed_pictures(evidence, compared.judgement.policy.reference),
        ]
    if policy.kind == "text":
        return []
    return [
        render_table(tabulate_network_costs(compared)) + explain_network_costs(compared),
        *embed_network_pictures(list(evidence.values()), finds_boxes="detection" in policy.eval_kinds.values()),
    ]


def metrics_tree(metrics: Sequence[Metric], policy: Policy) -> dict[str, Any]:
    """Nest metrics for `dvc metrics`: {eval: {n, metric: value, metric by bucket: {gated bucket: value}}}.

    Every metric overall, and the buckets that have a tolerance; all buckets are in verdict.json. Six significant
    digits: what moves beyond them moves with the composition of a batch.
    """
    tree: dict[str, Any] = {}
    for metric in metrics:
        eval_name, _, name = metric.name.partition("/")
        value = float(f"{metric.value:.6g}")
        place = tree.setdefault(eval_name, {})
        if metric.bucket is None:
            place |= {"n": metric.n, name: value}
        elif metric.name in policy.tolerances and metric.bucket in policy.tolerances[metric.name].buckets:
            place.setdefault(f"{name} by bucket", {})[metric.bucket] = value
    return tree


def _headline(judgement: Judgement) -> str:
    released = released_verdicts(judgement)
    blocking = blocking_verdicts(judgement)
    names = ", ".join(f"`{v.candidate}`" for v in released)
    lines = [
        "# Gate report",
        "",
        f"Release: {names}. Reference: `{judgement.policy.reference}`. "
        + (
            f"**Blocked** by {', '.join(f'`{v.candidate}` ({v.outcome})' for v in blocking)}."
            if blocking
            else "**Nothing blocks it.**"
        ),
        "",
    ]
    lines += [
        line
        for said in list_unproven(judgement)
        for line in (f"**{escape_markdown(said[0].upper() + said[1:])}.**", "")
    ]
    notable = [
        f"- {escape_markdown(reason.text[0].upper() + reason.text[1:])}."
        for verdict in judgement.verdicts
        for reason in verdict.reasons
        if reason.kind == ReasonKind.HEADLINE
    ]
    notable += [
        f"- Loosened: {escape_markdown(f'{key}, from {reason.was} to {reason.now}: {reason.why}')}"
        for key, reason in judgement.policy.loosened.items()
    ]
    return "\n".join(lines + ([*notable, ""] if notable else []))


def _candidate_table(judgement: Judgement) -> str:
    columns = _columns(judgement)
    values = {(m.name, m.bucket): m for m in judgement.reference_metrics}
    header = ["candidate", "release", "verdict"] + [_column_title(*column, columns) for column in columns]
    reference = [f"`{judgement.policy.reference}`", "", "reference"]
    reference += [_cell(values[column]) if column in values else "–" for column in columns]
    rows = [header, reference]
    for verdict in judgement.verdicts:
        if verdict.candidate != judgement.policy.reference:
            found = {(c.metric, c.bucket): c for c in verdict.comparisons}
            rows.append(
                [
                    f"`{verdict.candidate}`",
                    "yes" if verdict.is_release else "",
                    f"{_MARKS[verdict.outcome]} {verdict.outcome}",
                ]
                + [_compared_cell(found.get(column)) for column in columns]
            )
    if len(columns) > _MAX_COLUMNS:
        header, *rows = map(list, zip(*rows, strict=True))
        return render_table([header, ["---"] + ["---:"] * (len(header) - 1), *rows])
    return render_table([header, ["---"] * 3 + ["---:"] * len(columns), *rows[1:]])


def _columns(judgement: Judgement) -> list[tuple[str, str | None]]:
    """Return the (metric, bucket) columns: the gated metrics in the order of params.yaml, then KL.

    Each is followed by its gated buckets: what alone can block a release must show in the candidate's row.
    """
    columns: list[tuple[str, str | None]] = []
    kinds, tolerances = judgement.policy.eval_kinds, judgement.policy.tolerances
    for metric in tolerances:
        columns += [(metric, None), *((metric, b) for b in sorted(tolerances[metric].buckets, key=natural_key))]
    columns += dict.fromkeys(
        (c.metric, c.bucket)
        for verdict in judgement.verdicts
        for c in verdict.comparisons
        if c.tier == "watched" and c.outcome == "fail"
    )
    columns += [(f"{name}/kl_nats_per_token", None) for name, kind in kinds.items() if kind == "perplexity"]
    return columns


def _column_title(metric: str, bucket: str | None, columns: Sequence[tuple[str, str | None]]) -> str:
    """Name a column by its bucket, with the metric where another one of the eval is gated in that bucket too."""
    eval_name, _, name = metric.partition("/")
    is_shared = any(other != metric and b == bucket and other.startswith(f"{eval_name}/") for other, b in columns)
    title = name if bucket is None else f"{name} [{bucket}]" if is_shared else bucket
    return f"{eval_name}<br>{escape_markdown(title)}"


def _cell(metric: Metric) -> str:
    return f"{format_value(metric.name, metric.value)}"


def _compared_cell(comparison: Comparison | None) -> str:
    if comparison is None:
        return "–"
    c = comparison
    value = format_value(c.metric, c.candidate)
    if not definition_of(c.metric).is_gated:
        return value + (" ⚠️" if c.sentence.startswith("tripped") else "")
    mark = f" {_MARKS[c.outcome]}" if c.outcome != "reported" else ""
    change = -c.harm if definition_of(c.metric).better == "higher" else c.harm
    return f"{value} ({format_harm(c.metric, change, signed=True).replace(' points', '')}){mark}"


def _candidate_section(
    verdict: Verdict, measured: Measured, reference: Evidence | None, here: Machine | None, policy: Policy
) -> str:
    lines = [f"## `{verdict.candidate}`: {_MARKS[verdict.outcome]} {verdict.outcome}", ""]
    lines += [f"- {escape_markdown(str(reason))}" for reason in verdict.reasons]
    if measured.evidence is not None:
        if measured.evidence.candidate.serving.engine == "torch":
            lines += [text for said in describe_network(measured.evidence) for text in ("", said)]
        else:
            lines += ["", _describe_candidate(measured.evidence.candidate)]
        counts, asked = measured.evidence.evaluation.speculation, measured.evidence.candidate.serving.speculative
        if counts is not None and asked is not None:
            lines += ["", describe_speculation(counts, asked.method)]
        if measured.evidence.candidate.serving.engine == "diffusers":
            lines += [describe_files(measured.evidence, reference)] if reference else []
            lines += [text for said in describe_rendering(measured.evidence) for text in ("", said)]
        if verdict.canary is not None and not verdict.canary.is_same_weights:
            lines += ["", describe_canary(verdict.canary)]
    gated = [c for c in verdict.comparisons if c.outcome != "reported"]
    reported = [c for c in verdict.comparisons if c.outcome == "reported"]
    if gated:
        lines += ["", _comparison_table(gated)]
    lines += _describe_speed(measured, here)
    if verdict.certificate is not None:
        lines += [
            describe_certificate(verdict, policy),
            "",
            "<details><summary>Losses that stop the release, planted into these records</summary>",
            "",
            tabulate_losses(verdict),
            "</details>",
            "",
        ]
    if reported:
        lines += [
            "<details><summary>Reported only: other buckets, metrics and tripwires</summary>",
            "",
            _comparison_table(reported),
            "</details>",
        ]
    if verdict.outcome in EXPLAINED:
        lines += explain_failure(verdict, measured, policy.kind)
    return "\n".join(lines) + "\n"


def _describe_speed(measured: Measured, here: Machine | None) -> list[str]:
    if measured.benchmark is None or measured.speed is None:
        return []
    records = [r for found in (measured.evidence.records.values() if measured.evidence else ()) for r in found]
    paragraphs = describe_measurement(measured.benchmark, measured.speed, here, records)
    return [
        "### Speed, beside the reference",
        "",
        render_table(tabulate_speed(measured.speed)),
        *(line for paragraph in paragraphs for line in (paragraph, "")),
    ]


def _describe_candidate(candidate: BuiltCandidate) -> str:
    """Say what was done to a candidate and which layers ended in which format."""
    steps = "; ".join(escape_markdown(_describe_step(step)) for step in candidate.steps) or "none"
    sentences = [f"Steps: {steps}."]
    if candidate.coverage:
        total = sum(layer.num_bytes for layer in candidate.coverage)
        asked = [layer for layer in candidate.coverage if layer.asked]
        formats = sorted({layer.format for layer in asked})
        counts = [f"{sum(layer.format == f for layer in asked)} layers {escape_markdown(f)}" for f in formats]
        counts.append(f"{len(candidate.coverage) - len(asked)} excluded")
        sentences.append(
            f"Coverage: {', '.join(counts)}; the former hold "
            f"{_mib(sum(layer.num_bytes for layer in asked))} MiB of {_mib(total)} MiB."
        )
    sentences += [f"Fallback: `{escape_markdown(f.layer)}`: {escape_markdown(f.reason)}." for f in candidate.fallbacks]
    return " ".join(sentences)


def _describe_step(step: dict[str, Any]) -> str:
    plain = [f"{key} {value}" for key, value in step.items() if key != "kind" and isinstance(value, (int, float, str))]
    calibration = step.get("calibration", {})
    plain += (
        [
            f"calibration {calibration['num_samples']} samples of {', '.join(calibration['sources'])}"
            f" weighted by length^{calibration['length_exponent']:g}"
        ]
        if calibration
        else []
    )
    return f"{step['kind']} ({', '.join(plain)})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"


def _comparison_table(comparisons: Sequence[Comparison]) -> str:
    rows = [
        [
            "metric",
            "reference",
            "candidate",
            "n (clusters)",
            "b",
            "c",
            "harm",
            "at least to at most",
            "tolerance",
            "p",
            "",
            "why",
        ],
        ["---"] + ["---:"] * 9 + ["---", "---"],
    ]
    return render_table(rows + [_comparison_row(comparison) for comparison in comparisons])


def _tell_tolerance(c: Comparison, tolerance: float) -> str:
    """Write a tolerance, how much of it is spent, and the tier where it is not critical."""
    tier = "" if c.tier == "critical" else f", {c.tier}"
    return f"{format_tolerance(c.metric, tolerance)} ({100 * max(c.harm, 0.0) / tolerance:.0f} % spent{tier})"


def _comparison_row(c: Comparison) -> list[str]:
    return [
        escape_markdown(name_comparison(c)),
        format_value(c.metric, c.reference),
        format_value(c.metric, c.candidate),
        f"{c.n:,} ({c.num_clusters:,})" if c.num_clusters != c.n else f"{c.n:,}",
        "–" if c.b is None else str(c.b),
        "–" if c.c is None else str(c.c),
        format_harm(c.metric, c.harm, signed=True),
        format_range(c.metric, c.low, c.high),
        "–" if c.tolerance is None else _tell_tolerance(c, c.tolerance),
        format_p(c.p_holm),
        _MARKS[c.outcome],
        c.sentence,
    ]
