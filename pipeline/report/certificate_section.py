"""What the certificate says, in sentences and as a table: the losses that the gate misses, and its false fails."""

from __future__ import annotations

from pipeline.gate.measure import GradedScore
from pipeline.gate.verdicts import Judgement, Policy
from pipeline.gate.wording import (
    definition_of,
    escape_markdown,
    format_harm,
    format_tolerance,
    is_rate,
    name_comparison,
    name_metric,
)
from pipeline.records.verdicts import Certificate, Comparison, DetectableLoss, Verdict
from pipeline.report.sections import Table


def describe_certificate(verdict: Verdict, policy: Policy) -> str:
    """Say which losses the gate misses on this suite, and how often it fails what is equal."""
    certificate = verdict.certificate
    if certificate is None or not certificate.losses:
        return ""
    sentences = [_describe_false_fails(certificate, policy.alpha), describe_dependence(certificate)]
    return " ".join(part for part in (describe_misses(verdict, policy), *sentences) if part)


def describe_misses(verdict: Verdict, policy: Policy) -> str:
    """Say which losses the gate misses on this suite; nothing of a candidate whose own losses are no noise."""
    certificate = verdict.certificate
    if certificate is None or not certificate.losses or verdict.outcome in ("fail", "refused"):
        return ""
    order = list(policy.tolerances)
    headline = min(certificate.losses, key=lambda loss: (order.index(loss.metric), loss.bucket or ""))
    widest = max(certificate.losses, key=lambda loss: (is_rate(loss.metric), loss.k80))
    clauses = [f"On this suite this gate {_describe_loss(headline)}"]
    if widest is not headline:
        clauses.append(f"; of all rates it is blindest in {_name(widest)}: {_format_sizes(widest)}")
    clauses.append(", whether the lost cases flip beside those seen or are among them.")
    parts = ("".join(clauses), _describe_passes(certificate), _describe_unseen(verdict, policy.alpha))
    return " ".join(part for part in parts if part)


def _describe_passes(c: Certificate) -> str:
    """Say how often a release without a loss passes, and what stops it most."""
    if c.num_passes is None or c.num_weakest_passes is None:
        return ""
    passes, alone = (f"{100 * count / c.num_swaps:.1f} %" for count in (c.num_passes, c.num_weakest_passes))
    sentence = f"A release without a loss, at these flips, passes {passes} of the time"
    if c.num_weakest_passes == c.num_swaps:
        return f"{sentence}."
    sentence += f"; {c.weakest}, which stops it most often, passes {alone} by itself"
    if c.num_passes >= 0.8 * c.num_swaps:
        return f"{sentence}."
    return (
        f"{sentence}: more cases there, a wider tolerance, or `tier: supporting` for what need not be proven let more "
        "of them pass."
    )


def _describe_unseen(verdict: Verdict, alpha: float) -> str:
    """Say which bounds have no room for what no case showed, and how rare a loss may hide so."""
    open_ended = [
        c
        for c in verdict.comparisons
        if c.tolerance is not None
        and c.bucket is None
        and definition_of(c.metric).estimator == "mean"
        and not isinstance(definition_of(c.metric), GradedScore)
    ]
    if not open_ended:
        return ""
    share = 1 - alpha ** (1 / min(c.effective_clusters for c in open_ended))
    names = ", ".join(c.metric for c in open_ended)
    return (
        f"The bounds of {names} rest on what was seen: a loss that hits one case in {1 / share:.0f} is in none of "
        f"these {100 * alpha:g} % of the time, and goes unseen."
    )


def _describe_false_fails(c: Certificate, alpha: float) -> str:
    within, blocks = (f"{100 * count / c.num_swaps:.1f} %" for count in (c.num_false_fails, c.num_block_fails))
    return (
        f"Of {c.num_swaps:,} swaps of the labels within clusters, which make both sides equal, it fails {within} "
        f"(alpha {100 * alpha:g} %), of swaps in blocks of {c.block} neighbouring clusters {blocks}."
    )


def describe_dependence(certificate: Certificate) -> str:
    """Name the metrics whose clusters are less independent than they are taken for; empty where there are none."""
    if not certificate.dependent:
        return ""
    return (
        f"Neighbouring clusters move together in {', '.join(certificate.dependent)}: they are less independent "
        "than the bounds take them for; put what belongs together into one cluster."
    )


def describe_floor(judgement: Judgement) -> str:
    """Say how far the reference is from itself, where a candidate is the same thing evaluated once more."""
    again = next((v for v in judgement.verdicts if v.fingerprint == judgement.reference_fingerprint), None)
    if again is None:
        return (
            "How far the reference is from itself was not measured: a candidate with its checkpoint and no steps "
            "would show it."
        )
    gated = [c for c in again.comparisons if c.tolerance is not None and c.bucket is None]
    moved = [c for c in gated if c.harm != 0 or c.b or c.c]
    if not moved:
        return (
            f"The reference against itself (`{again.candidate}`): nothing moved in one repeat, in any of "
            f"{len(gated)} gated metrics."
        )
    return (
        f"The reference against itself (`{again.candidate}`), which is the floor: "
        + "; ".join(f"{name_comparison(c)} {_format_moved(c)}" for c in moved)
        + "."
    )


def tabulate_losses(verdict: Verdict) -> Table:
    """Return the table of the losses that stop the release, of each gated comparison."""
    compared = {(c.metric, c.bucket): c for c in verdict.comparisons}
    rows = [
        ["metric", "n", "tolerance", "stopped one time in two", "stopped four times in five"],
        ["---", "---:", "---:", "---:", "---:"],
    ]
    for loss in verdict.certificate.losses if verdict.certificate else ():
        c = compared[loss.metric, loss.bucket]
        rows.append(
            [
                escape_markdown(_name(loss)),
                f"{c.n:,}",
                format_tolerance(c.metric, c.tolerance or 0.0),
                *("any, even none" if k == 0 else format_harm(loss.metric, k) for k in (loss.k50, loss.k80)),
            ]
        )
    return Table(rows)


def _describe_loss(loss: DetectableLoss) -> str:
    if loss.k80 == 0:
        return f"stops every candidate, one without a loss too: the cases of {_name(loss)} prove too little"
    return (
        f"misses a true loss of {format_harm(loss.metric, loss.k50)} in {_name(loss)} one time in two at most, "
        f"and one of {format_harm(loss.metric, loss.k80)} one time in five"
    )


def _format_sizes(loss: DetectableLoss) -> str:
    return f"{format_harm(loss.metric, loss.k50)} and {format_harm(loss.metric, loss.k80)}"


def _format_moved(c: Comparison) -> str:
    if c.b is not None and c.c is not None:
        return f"{c.b + c.c} of {c.n:,} cases flip"
    return f"moves by {format_harm(c.metric, c.harm, signed=True)}"


def _name(loss: DetectableLoss) -> str:
    return name_metric(loss.metric, loss.bucket)
