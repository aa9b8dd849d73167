"""A rate of which less is better, as of oversaturated images: its losses are cases that the candidate gained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import EvidenceError
from pipeline.gate.measure import measure_metric
from pipeline.gate.pairing import PairedCases
from pipeline.gate.tolerance_checks import check_loss_can_show, describe_large_tolerance
from pipeline.products import list_known_metrics
from pipeline.records.evaluations import CaseRecord
from pipeline.records.verdicts import Comparison
from pipeline.report.flips import worst_flips

METRIC = list_known_metrics()["oversaturated_image_rate"]
N = 200


def pair(reference: list[int], candidate: list[int]) -> PairedCases:
    """Return paired records of which the given positions are oversaturated."""
    before, after = [
        [
            CaseRecord(
                case_id=f"shot-{i}",
                input_digest=str(i),
                cluster=str(i),
                prompt="a ball",
                output=str(i),
                scores={"oversaturated": float(i in bad)},
                fingerprint="f",
            )
            for i in range(N)
        ]
        for bad in (reference, candidate)
    ]
    return PairedCases(before, after, candidate_order=np.arange(N), clusters=np.arange(N))


def test_what_only_the_candidate_burns_is_harm() -> None:
    m = measure_metric(pair([0], [0, 1, 2, 3]), METRIC, None, eval_name="shots", tolerance=0.02, alpha=0.05)
    assert (m.b, m.c) == (3, 0) and m.harm == pytest.approx(3 / N) and m.low < m.harm < m.high


def test_a_reference_that_burns_nothing_can_be_gated_and_one_that_burns_all_can_not() -> None:
    for bad, is_refused in (([], False), (list(range(N)), True)):
        m = measure_metric(pair(bad, bad), METRIC, None, eval_name="shots", tolerance=0.02, alpha=0.05)
        if is_refused:
            with pytest.raises(EvidenceError, match="the reference is right in 0 of 200 cases") as caught:
                check_loss_can_show(m, METRIC, [])
            assert "look at its weights and how it is run, as the others are NaN, infinite, black" in str(caught.value)
        else:
            check_loss_can_show(m, METRIC, [])


@pytest.mark.parametrize(("num_bad", "said"), [(160, ""), (161, "right in 39 of 200 cases; the tolerance of 2 points")])
def test_what_is_not_burnt_is_what_a_tolerance_is_a_share_of(num_bad: int, said: str) -> None:
    bad = list(range(num_bad))
    m = measure_metric(pair(bad, bad), METRIC, None, eval_name="shots", tolerance=0.02, alpha=0.05)
    told = describe_large_tolerance(m, METRIC, [])
    assert said in told if told else not said


def test_nobody_guesses_where_less_is_better() -> None:
    """Three of four bad ones are what guessing gets right one time in four: nothing was left to divide by."""
    choice, bad = replace(METRIC, is_choice=True), list(range(150))
    pairs = pair(bad, bad)
    records = [record.model_copy(update={"num_choices": 4}) for record in pairs.reference]
    m = measure_metric(pairs, choice, None, eval_name="shots", tolerance=0.03, alpha=0.05)
    check_loss_can_show(m, choice, records)
    told = describe_large_tolerance(m, choice, records)
    few = measure_metric(pair([0], [0]), choice, None, eval_name="shots", tolerance=0.03, alpha=0.05)
    check_loss_can_show(few, choice, records)  # one bad of 200 was taken for one right
    assert told is not None and "right in 50 of 200 cases; the tolerance of 3 points lets 12 % of these" in told


def test_a_burnt_image_is_shown_as_a_loss() -> None:
    pairs = pair([5], [7])
    m = measure_metric(pairs, METRIC, None, eval_name="shots", tolerance=0.02, alpha=0.05)
    failed = Comparison(
        metric="shots/oversaturated_image_rate",
        bucket=None,
        reference=m.reference,
        candidate=m.candidate,
        unit="",
        n=N,
        num_clusters=N,
        effective_clusters=N,
        b=1,
        c=1,
        harm=0.0,
        low=0.0,
        high=0.0,
        p=1.0,
        p_holm=1.0,
        tolerance=0.02,
        outcome="fail",
        sentence="",
    )
    assert [(f.case_id, f.kind) for f in worst_flips([failed], {"shots": pairs}, limit=2)] == [
        ("shot-7", "loss"),
        ("shot-5", "gain"),
    ]
