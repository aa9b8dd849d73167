"""What a tolerance lets through: all that could be lost, which is refused, or a large share of it, which is told.

A reference that hardly solves its cases has little to lose, and under a tolerance as large as that no loss could ever
show. Not covered: graded scores, whose span is checked where they are read (`measure.py`), and average precision
(`detection.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.errors import EvidenceError
from pipeline.gate.case_table import CaseTable
from pipeline.gate.decision import Measurement
from pipeline.gate.wording import format_tolerance, name_metric
from pipeline.records.evaluations import CaseRecord
from pipeline.settings.metrics import MetricDefinition

_SHOWN_CHARS = 60  # of an answer
_LARGE_SHARE = 0.1  # of what the reference has right: a tolerance above it is worth a sentence


def check_loss_can_show(measurement: Measurement, definition: MetricDefinition, records: Sequence[CaseRecord]) -> None:
    """Refuse a gated metric on which a loss of everything, or of all but what guessing gets, is tolerated.

    A broken evalset that nobody can solve would otherwise let everything through, and so would a tolerance of 3 that
    was meant as 3 points.

    Args:
        measurement: of the metric.
        definition: of the metric.
        records: the reference's of the whole eval, which may say among how many choices its answers are.

    Raises:
        EvidenceError: the share of cases that the reference has right, less what guessing gets, or the mean of scores
            of 0 and more of which more is better, is not above the tolerance.
    """
    m = measurement
    is_mean = definition.estimator in ("mean", "ratio") and definition.harm == "absolute"
    if is_mean and definition.better == "higher" and m.tolerance is not None and 0 <= m.reference <= m.tolerance:
        raise EvidenceError(
            f"{name_metric(m.metric, m.bucket)}: the reference has {m.reference:.4g}, "
            f"so a loss above the tolerance of {m.tolerance:g} can't show; it is in the unit of the "
            "scores: lower it, or look at the evalset"
        )
    right = m.reference if definition.better == "higher" else 1 - m.reference
    if m.tolerance is not None and definition.estimator == "proportion" and right <= m.tolerance:
        remedy = (
            "look at its weights and how it is run, as the others are NaN, infinite, black or saturated"
            if definition.is_validity
            else f"look at the evalset{_show_outputs(records)}"
        )
        raise EvidenceError(
            f"{name_metric(m.metric, m.bucket)}: the reference is right in "
            f"{round(right * m.n)} of {m.n} cases, so a loss above the tolerance of "
            f"{m.tolerance:g} can't show; {remedy}"
        )
    guesses = _expect_guesses(definition, records, m.bucket)
    if m.tolerance is not None and guesses and m.reference <= guesses + m.tolerance:
        raise EvidenceError(
            f"{name_metric(m.metric, m.bucket)}: the reference is right in {round(m.reference * m.n):,} of "
            f"{m.n:,} cases and guessing in {round(guesses * m.n):,}, so a loss above the tolerance of "
            f"{m.tolerance:g} can't show; look at the evalset"
        )


def _show_outputs(records: Sequence[CaseRecord]) -> str:
    """Show what the reference said: a blank or a sentence around each right answer is seen at once."""
    outputs = list(dict.fromkeys(repr(record.output[:_SHOWN_CHARS]) for record in records if record.output))
    return f", where its answers are such as {' and '.join(outputs[:2])}" if outputs else ""


def _expect_guesses(definition: MetricDefinition, records: Sequence[CaseRecord], bucket: str | None) -> float:
    """Return the share of cases that guessing gets right; 0 where nobody chooses, or what is counted are errors."""
    if not definition.is_choice or definition.better == "lower":
        return 0.0
    return CaseTable.of(records).expect_guesses(bucket)


def describe_large_tolerance(
    measurement: Measurement, definition: MetricDefinition, records: Sequence[CaseRecord]
) -> str | None:
    """Return that a tolerance lets a large share of what a weak reference knows be lost; None where it does not.

    Three points of 90 are little, and of 17 they are one right answer in six. Where the reference has more than half
    right, the tolerance itself says about as much. Arguments: see `check_loss_can_show`.
    """
    m = measurement
    if m.tolerance is None or definition.estimator != "proportion":
        return None
    guesses = _expect_guesses(definition, records, m.bucket)
    known = (m.reference if definition.better == "higher" else 1 - m.reference) - guesses
    if not 0 < known <= 0.5 or m.tolerance <= _LARGE_SHARE * known:
        return None
    return (
        f"{name_metric(m.metric, m.bucket)}: the reference is right in {round((known + guesses) * m.n):,} of {m.n:,} "
        f"cases{f', {round(guesses * m.n):,} of them by guessing' if guesses else ''}; the tolerance of "
        f"{format_tolerance(m.metric, m.tolerance)} lets {100 * m.tolerance / known:.0f} % of "
        f"{'the others' if guesses else 'these'} be lost"
    )
