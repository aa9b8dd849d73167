"""Properties that the gate must hold for any records, searched by hypothesis."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import EvidenceError
from pipeline.gate.decision import judge_all
from pipeline.gate.measure import measure_metric
from pipeline.gate.pairing import align
from pipeline.products import list_known_metrics
from pipeline.records.evaluations import CaseRecord
from pipeline.records.verdicts import Comparison
from tests.fakes.synthetic_records import make_cases

COMPLETION = list_known_metrics()["task_completion_rate"]
RANK = {"pass": 0, "inconclusive": 1, "fail": 2}

outcomes = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=120)
cluster_sizes = st.sampled_from([1, 2, 5])
tolerances = st.sampled_from([0.01, 0.05, 0.2])


def judge(reference: list[CaseRecord], candidate: list[CaseRecord], tolerance: float) -> Comparison:
    measured = measure_metric(
        align(reference, candidate, where="w"), COMPLETION, None, eval_name="w", tolerance=tolerance, alpha=0.05
    )
    return judge_all({"a": [measured]}, ["a"], alpha=0.05)["a"][0]


def cases_of(pairs: list[tuple[bool, bool]], size: int) -> tuple[list[CaseRecord], list[CaseRecord]]:
    ours, theirs = (make_cases([int(pair[side]) for pair in pairs], cluster_size=size) for side in (0, 1))
    return ours, theirs


@settings(max_examples=150, deadline=None)
@given(outcomes, cluster_sizes, tolerances)
def test_one_more_loss_never_turns_a_fail_into_a_pass(
    pairs: list[tuple[bool, bool]], size: int, tolerance: float
) -> None:
    before = judge(*cases_of(pairs, size), tolerance)
    kept = [i for i, (ours, theirs) in enumerate(pairs) if ours and theirs]
    if before.outcome == "fail" and kept:
        worse = [(True, False) if i == kept[0] else pair for i, pair in enumerate(pairs)]
        assert judge(*cases_of(worse, size), tolerance).outcome != "pass"


@settings(max_examples=150, deadline=None)
@given(outcomes, tolerances)
def test_one_more_loss_never_helps_where_cases_are_independent(
    pairs: list[tuple[bool, bool]], tolerance: float
) -> None:
    before = judge(*cases_of(pairs, 1), tolerance)
    for i, (ours, theirs) in enumerate(pairs):
        if ours and theirs:
            worse = [*pairs[:i], (True, False), *pairs[i + 1 :]]
            after = judge(*cases_of(worse, 1), tolerance)
            assert RANK[after.outcome] >= RANK[before.outcome]
            assert after.high >= before.high and after.low >= before.low
            break


@settings(max_examples=100, deadline=None)
@given(outcomes, cluster_sizes, st.randoms(use_true_random=False))
def test_the_order_of_cases_does_not_matter(pairs: list[tuple[bool, bool]], size: int, rng: random.Random) -> None:
    reference, candidate = cases_of(pairs, size)
    expected = judge(reference, candidate, 0.05)
    shuffled = judge(rng.sample(reference, len(reference)), rng.sample(candidate, len(candidate)), 0.05)
    assert (shuffled.outcome, shuffled.b, shuffled.c, shuffled.harm, shuffled.p) == (
        expected.outcome,
        expected.b,
        expected.c,
        expected.harm,
        expected.p,
    )
    assert (shuffled.low, shuffled.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(outcomes, cluster_sizes)
def test_swapping_the_labels_flips_the_sign(pairs: list[tuple[bool, bool]], size: int) -> None:
    reference, candidate = cases_of(pairs, size)
    there, back = judge(reference, candidate, 0.05), judge(candidate, reference, 0.05)
    assert (back.harm, back.b, back.c) == (-there.harm, there.c, there.b)
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(outcomes, cluster_sizes, tolerances)
def test_the_bounds_hold_the_estimate_and_never_pass_what_was_seen_beyond(
    pairs: list[tuple[bool, bool]], size: int, tolerance: float
) -> None:
    comparison = judge(*cases_of(pairs, size), tolerance)
    assert -1 <= comparison.low <= comparison.harm <= comparison.high <= 1
    assert comparison.outcome != "pass" or comparison.harm <= tolerance


@settings(max_examples=50, deadline=None)
@given(outcomes, st.integers(0, 10**6), st.booleans())
def test_a_duplicated_case_is_refused(pairs: list[tuple[bool, bool]], seed: int, on_reference: bool) -> None:
    reference, candidate = cases_of(pairs, 1)
    side = reference if on_reference else candidate
    side.append(side[random.Random(seed).randrange(len(side))])
    with pytest.raises(EvidenceError, match="twice"):
        align(reference, candidate, where="w")


@settings(max_examples=50, deadline=None)
@given(outcomes, st.integers(0, 10**6), st.booleans())
def test_a_missing_case_is_refused(pairs: list[tuple[bool, bool]], seed: int, on_reference: bool) -> None:
    reference, candidate = cases_of(pairs, 1)
    side = reference if on_reference else candidate
    lost = side.pop(random.Random(seed).randrange(len(side)))
    with pytest.raises(EvidenceError, match=f"no partner, first '{lost.case_id}'"):
        align(reference, candidate, where="w")


@settings(max_examples=50, deadline=None)
@given(outcomes, st.integers(0, 10**6))
def test_a_missing_score_never_passes(pairs: list[tuple[bool, bool]], seed: int) -> None:
    reference, candidate = cases_of(pairs, 1)
    i = random.Random(seed).randrange(len(candidate))
    candidate[i] = candidate[i].model_copy(update={"scores": {}})
    with pytest.raises(EvidenceError, match="has no score 'completed'"):
        judge(reference, candidate, 0.2)
