"""reports/report.md: what was decided and why, for a person who opens it on GitHub.

The table of candidates comes first, then per candidate what was done to it, every comparison with
its counts and bounds, and a handful of the cases behind a failure. The text follows from the
records alone: no date, so that git shows a change only when a number changed; where speeds were measured is one of
their facts. Names and texts from records and evalsets pass `escape_markdown` or `render_block`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence
from pipeline.gate.verdicts import (
    Judgement,
    Policy,
    blocking_verdicts,
    order_for_readers,
    released_verdicts,
)
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
from pipeline.records.benchmarks import Machine
from pipeline.records.reasons import ReasonKind
from pipeline.records.verdicts import Comparison, Metric, Verdict
from pipeline.report.built_candidate import describe_shards
from pipeline.report.certificate_section import describe_certificate, describe_floor, tabulate_losses
from pipeline.report.explanation_records import CandidateExplanation, Explanation
from pipeline.report.failure_section import build_failure_section
from pipeline.report.markdown import write_block, write_section
from pipeline.report.presenting import Presenter, Words
from pipeline.report.sections import Folded, Table
from pipeline.report.unproven import list_unproven

HARM = "harm.png"
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


def render_report(
    compared: ReleaseComparison,
    explanation: Explanation,
    presenter: Presenter[Any],
    here: Machine | None = None,
) -> str:
    """Write the whole report as Markdown.

    Args:
        compared: what to report.
        explanation: the cases behind its verdicts.
        presenter: of the kind of product.
        here: the machine that this runs on, where known: speeds may have been measured on another.
    """
    judgement = compared.judgement
    blocks = [
        _candidate_table(judgement, presenter.list_columns(compared.evals), compared.findings),
        describe_floor(judgement),
        *([f"![Harm of every gated comparison against its tolerance]({HARM})"] if _has_gated(judgement) else []),
        *presenter.build_overview(compared),
    ]
    parts = [_headline(judgement), *(f"{write_block(block)}\n" for block in blocks)]
    reference = compared.findings[judgement.policy.reference].evidence
    parts += [
        _candidate_section(
            verdict,
            compared.findings[verdict.candidate],
            explanation.of(verdict.candidate),
            presenter,
            reference=reference,
            here=here,
            policy=judgement.policy,
        )
        for verdict in order_for_readers(judgement)
    ]
    parts.append(_explain(judgement.policy, presenter.words))
    return "\n".join(parts)


def _has_gated(judgement: Judgement) -> bool:
    """Say whether anything was compared with a tolerance: nothing is where all evidence is unfit."""
    return any(own.outcome != "reported" for verdict in judgement.verdicts for own in verdict.comparisons)


def _explain(policy: Policy, words: Words) -> str:
    return _LEGEND.format(
        confidence=1 - policy.alpha,
        alpha=policy.alpha,
        units=words.units,
        clusters=words.clusters,
        marks=words.marks,
        family="all gated comparisons of the release (of the candidate alone where it is not released)",
        inconclusive="blocks" if policy.on_inconclusive == "block" else "is a warning and does not block",
    )


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
        for sentence in list_unproven(judgement)
        for line in (f"**{escape_markdown(sentence[0].upper() + sentence[1:])}.**", "")
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


def _candidate_table(judgement: Judgement, reported: Sequence[str], findings: Mapping[str, CandidateFindings]) -> Table:
    columns = _columns(judgement, reported)
    values = {(m.name, m.bucket): m for m in judgement.reference_metrics}
    header = ["candidate", "release", "verdict", "MB"] + [_column_title(*column, columns) for column in columns]
    reference = [f"`{judgement.policy.reference}`", "", "reference", _size_cell(findings[judgement.policy.reference])]
    reference += [_cell(values[column]) if column in values else "–" for column in columns]
    rows = [header, reference]
    for verdict in judgement.verdicts:
        if verdict.candidate != judgement.policy.reference:
            compared = {(c.metric, c.bucket): c for c in verdict.comparisons}
            rows.append(
                [
                    f"`{verdict.candidate}`",
                    "yes" if verdict.is_release else "",
                    f"{_MARKS[verdict.outcome]} {verdict.outcome}",
                    _size_cell(findings[verdict.candidate]),
                ]
                + [_compared_cell(compared.get(column)) for column in columns]
            )
    if len(columns) > _MAX_COLUMNS:
        header, *rows = map(list, zip(*rows, strict=True))
        return Table([header, ["---"] + ["---:"] * (len(header) - 1), *rows])
    return Table([header, ["---"] * 3 + ["---:"] * (1 + len(columns)), *rows[1:]])


def _columns(judgement: Judgement, reported: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return the (metric, bucket) columns: the gated metrics in the order of params.yaml, then those only reported.

    Each is followed by its gated buckets: what alone can block a release must show in the candidate's row.
    """
    columns: list[tuple[str, str | None]] = []
    tolerances = judgement.policy.tolerances
    for metric in tolerances:
        columns += [(metric, None), *((metric, b) for b in sorted(tolerances[metric].buckets, key=natural_key))]
    columns += dict.fromkeys(
        (c.metric, c.bucket)
        for verdict in judgement.verdicts
        for c in verdict.comparisons
        if c.tier == "watched" and c.outcome == "fail"
    )
    return [*columns, *((metric, None) for metric in reported)]


def _column_title(metric: str, bucket: str | None, columns: Sequence[tuple[str, str | None]]) -> str:
    """Name a column by its bucket, with the metric where another one of the eval is gated in that bucket too."""
    eval_name, _, name = metric.partition("/")
    is_shared = any(other != metric and b == bucket and other.startswith(f"{eval_name}/") for other, b in columns)
    title = name if bucket is None else f"{name} [{bucket}]" if is_shared else bucket
    return f"{eval_name}<br>{escape_markdown(title)}"


def _size_cell(findings: CandidateFindings) -> str:
    """Return the bytes of a candidate's weights as stored, in megabytes."""
    return "–" if findings.evidence is None else f"{findings.evidence.candidate.checkpoint.num_bytes / 1e6:,.1f}"


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
    verdict: Verdict,
    findings: CandidateFindings,
    explained: CandidateExplanation | None,
    presenter: Presenter[Any],
    *,
    reference: Evidence | None,
    here: Machine | None,
    policy: Policy,
) -> str:
    lines = [f"## `{verdict.candidate}`: {_MARKS[verdict.outcome]} {verdict.outcome}", ""]
    lines += [f"- {escape_markdown(str(reason))}" for reason in verdict.reasons]
    if findings.evidence is not None:
        blocks = presenter.build_candidate(verdict, findings, findings.evidence, reference)
        if (shards := findings.evidence.evaluation.shards) is not None:
            blocks = [*blocks, describe_shards(shards)]
        lines += [line for block in blocks for line in ("", write_block(block))]
    gated = [c for c in verdict.comparisons if c.outcome != "reported"]
    reported = [c for c in verdict.comparisons if c.outcome == "reported"]
    if gated:
        lines += ["", write_block(_tabulate(gated)), ""]
    if (speed := presenter.build_speed(findings, here)) is not None:
        lines += [write_section(speed), ""]
    if verdict.certificate is not None:
        planted = Folded("Losses that stop the release, planted into these records", [tabulate_losses(verdict)])
        lines += [describe_certificate(verdict, policy), "", write_block(planted), ""]
    if reported:
        lines.append(write_block(Folded("Reported only: other buckets, metrics and tripwires", [_tabulate(reported)])))
    if explained is not None:
        lines += ["", write_section(build_failure_section(explained, given=presenter.words.given))]
    return "\n".join(lines) + "\n"


def _tabulate(comparisons: Sequence[Comparison]) -> Table:
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
    return Table(rows + [_comparison_row(comparison) for comparison in comparisons])


def _format_tolerance(c: Comparison, tolerance: float) -> str:
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
        "–" if c.tolerance is None else _format_tolerance(c, c.tolerance),
        format_p(c.p_holm),
        _MARKS[c.outcome],
        c.sentence,
    ]
