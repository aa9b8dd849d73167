"""The properties of the gate for likelihoods, average precision, rates of which less is better, and absent evidence."""

from __future__ import annotations

import math
import random
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from pipeline.errors import EvidenceError
from pipeline.gate.decision import Measurement, judge_all
from pipeline.gate.detection import measure_precision
from pipeline.gate.measure import measure_metric
from pipeline.gate.pairing import PairedCases, align
from pipeline.gate.validity import is_without_output
from pipeline.products import list_known_metrics
from pipeline.records.detections import MatchTable
from pipeline.records.evaluations import CaseRecord
from tests.fakes.synthetic_detections import Change, make_pair
from tests.fakes.synthetic_records import make_cases

PERPLEXITY, COMPLETION = list_known_metrics()["perplexity_per_token"], list_known_metrics()["task_completion_rate"]
BURNT = list_known_metrics()["oversaturated_image_rate"]

# nat a token of the reference, and what the candidate adds to it; tokens
document = st.tuples(st.floats(0.5, 3.0), st.floats(-0.3, 0.3), st.integers(20, 400))
documents = st.lists(document, min_size=4, max_size=40)
cluster_sizes = st.sampled_from([1, 3])


def documents_of(rows: list[tuple[float, float, int]], size: int, side: int) -> list[CaseRecord]:
    """Return a record per document; the second side has what the candidate adds."""
    return [
        CaseRecord(
            case_id=f"d-{i}",
            input_digest=str(i),
            cluster=str(i // size),
            prompt="",
            output="",
            fingerprint="f",
            scores={"nll_nats": tokens * (nll + side * shift), "num_tokens": float(tokens)},
        )
        for i, (nll, shift, tokens) in enumerate(rows)
    ]


def measure_documents(reference: list[CaseRecord], candidate: list[CaseRecord], tolerance: float = 0.05) -> Measurement:
    return measure_metric(
        align(reference, candidate, where="w"), PERPLEXITY, None, eval_name="w", tolerance=tolerance, alpha=0.05
    )


def judge(measurement: Measurement) -> str:
    return judge_all({"a": [measurement]}, ["a"], alpha=0.05)["a"][0].outcome


@settings(max_examples=40, deadline=None)
@given(documents, cluster_sizes)
def test_swapping_the_labels_inverts_the_ratio_of_perplexities(rows: list[tuple[float, float, int]], size: int) -> None:
    sides = documents_of(rows, size, 0), documents_of(rows, size, 1)
    there, back = measure_documents(*sides), measure_documents(*sides[::-1])
    assert (1 + there.harm) * (1 + back.harm) == pytest.approx(1, rel=1e-9)
    # few clusters leave much room: the lower bound comes close to -1, and what is left of its digits says so much
    left, unit = 1 + back.low, float(np.finfo(float).eps)
    if left > 4 * unit:
        assert math.log(left) + math.log1p(there.high) == pytest.approx(0, abs=1e-9 + 4 * unit / left)
    else:
        assert there.high > 1 / (16 * unit)
    assert (there.p, there.p_gain) == pytest.approx((back.p_gain, back.p), abs=0.02)  # sampled beyond 14 clusters


@settings(max_examples=40, deadline=None)
@given(documents, cluster_sizes, st.randoms(use_true_random=False))
def test_the_order_of_documents_does_not_matter(
    rows: list[tuple[float, float, int]], size: int, rng: random.Random
) -> None:
    reference, candidate = documents_of(rows, size, 0), documents_of(rows, size, 1)
    expected = measure_documents(reference, candidate)
    found = measure_documents(rng.sample(reference, len(reference)), rng.sample(candidate, len(candidate)))
    assert (found.harm, found.low) == pytest.approx((expected.harm, expected.low), abs=1e-9)
    assert found.high == pytest.approx(expected.high, rel=1e-9, abs=1e-9)
    assert found.p == pytest.approx(expected.p, abs=1e-9) and judge(found) == judge(expected)


@settings(max_examples=40, deadline=None)
@given(documents, cluster_sizes, st.floats(0.001, 0.5))
def test_documents_that_all_lose_more_never_fare_better(
    rows: list[tuple[float, float, int]], size: int, more: float
) -> None:
    """A shift of every token moves the estimate by as much, and the bounds by more, as the room grows with the loss."""
    worse = [(nll, shift + more, tokens) for nll, shift, tokens in rows]
    before, after = (measure_documents(documents_of(r, size, 0), documents_of(r, size, 1)) for r in (rows, worse))
    moved = [math.log1p(getattr(after, side)) - math.log1p(getattr(before, side)) for side in ("harm", "low", "high")]
    assert moved[0] == pytest.approx(more, abs=1e-9)
    assert moved[1] <= more + 1e-9 and moved[2] >= more - 1e-9
    assert after.p <= before.p + 0.02
    assert judge(after) != "pass" or judge(before) == "pass" or before.harm < -0.05  # a suspicious gain is no pass


images = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=80)


def burn(pairs: list[tuple[bool, bool]], side: int) -> list[CaseRecord]:
    return [
        CaseRecord(
            case_id=f"i-{i}",
            input_digest=str(i),
            cluster=str(i),
            prompt="",
            output="",
            fingerprint="f",
            scores={"oversaturated": float(pair[side])},
        )
        for i, pair in enumerate(pairs)
    ]


@settings(max_examples=40, deadline=None)
@given(images)
def test_a_rate_of_which_less_is_better_is_the_mirror_of_one_of_which_more_is(pairs: list[tuple[bool, bool]]) -> None:
    """What is burnt counts as what is not completed: the same b, c, bounds and outcome."""
    burnt = measure_metric(
        align(burn(pairs, 0), burn(pairs, 1), where="w"), BURNT, None, eval_name="w", tolerance=0.05, alpha=0.05
    )
    sides = (make_cases([1 - int(pair[side]) for pair in pairs]) for side in (0, 1))
    completed = measure_metric(align(*sides, where="w"), COMPLETION, None, eval_name="w", tolerance=0.05, alpha=0.05)
    assert (burnt.b, burnt.c, burnt.harm, burnt.low, burnt.high, burnt.p) == (
        completed.b,
        completed.c,
        completed.harm,
        completed.low,
        completed.high,
        completed.p,
    )
    is_nothing_valid = is_without_output("w/oversaturated_image_rate", None, burnt.reference, burnt.candidate)
    assert judge(burnt) == ("fail" if is_nothing_valid else judge(completed))


@settings(max_examples=30, deadline=None)
@given(documents, st.sampled_from([0.0, -1.0]), st.integers(0, 10**6))
def test_work_that_is_none_or_unequal_is_refused(
    rows: list[tuple[float, float, int]], tokens: float, seed: int
) -> None:
    reference, candidate = documents_of(rows, 1, 0), documents_of(rows, 1, 1)
    i = random.Random(seed).randrange(len(rows))
    for wrong, said in ((tokens, "expected 'num_tokens' above 0"), (rows[i][2] + 1.0, "unequal work")):
        scores = candidate[i].scores | {"num_tokens": wrong}
        changed = [*candidate[:i], candidate[i].model_copy(update={"scores": scores}), *candidate[i + 1 :]]
        with pytest.raises(EvidenceError, match=said):
            measure_documents(reference, changed)


@settings(max_examples=30, deadline=None)
@given(documents, st.sampled_from([math.nan, math.inf, -math.inf, 1e308]), st.integers(0, 10**6), st.booleans())
def test_a_number_that_is_none_never_passes(
    rows: list[tuple[float, float, int]], number: float, seed: int, is_validated: bool
) -> None:
    """No record can be made of it, and one that was made all the same can't be measured."""
    reference, candidate = documents_of(rows, 1, 0), documents_of(rows, 1, 1)
    i = random.Random(seed).randrange(len(rows))
    scores = candidate[i].scores | {"nll_nats": number}
    if is_validated and not math.isfinite(number):
        with pytest.raises(ValidationError):
            CaseRecord(**candidate[i].model_dump() | {"scores": scores})
        return
    candidate[i] = candidate[i].model_copy(update={"scores": scores})
    with pytest.raises(EvidenceError, match=r"finite numbers|can't be compared"):
        measure_documents(reference, candidate)


@settings(max_examples=20, deadline=None)
@given(documents, st.sampled_from(["accuracy", "b/ucket", ""]), st.booleans())
def test_a_gated_bucket_that_is_not_there_never_passes(
    rows: list[tuple[float, float, int]], bucket: str, is_precision: bool
) -> None:
    """Nothing lost in no case is no evidence, whatever the metric."""
    with pytest.raises(EvidenceError, match="the bucket is empty; no case carries it"):
        if is_precision:
            measure_precision(
                pair_detectors(0), list_known_metrics()["ap"], bucket, eval_name="w", tolerance=0.02, alpha=0.05
            )
        else:
            pairs = align(documents_of(rows, 1, 0), documents_of(rows, 1, 1), where="w")
            measure_metric(pairs, PERPLEXITY, bucket, eval_name="w", tolerance=0.02, alpha=0.05)


@lru_cache
def detect_twice(seed: int) -> tuple[MatchTable, MatchTable]:
    return make_pair(40, Change(score=0.05, drop=0.1), seed=seed)


def pair_detectors(seed: int, order: NDArray[np.int64] | None = None, is_swapped: bool = False) -> PairedCases:
    """Return 40 images of two detectors, in clusters of two."""
    order = np.arange(40) if order is None else order
    tables = [table.at(order) for table in detect_twice(seed)]
    records = [
        CaseRecord(
            case_id=f"i-{i}",
            input_digest=str(i),
            cluster=str(i // 2),
            prompt="",
            output="",
            fingerprint="f",
            scores={"finite": 1.0},
        )
        for i in order
    ]
    clusters = align(records, records, where="w").clusters
    return PairedCases(records, records, np.arange(40), clusters, (tables[is_swapped], tables[not is_swapped]))


def measure_ap(pairs: PairedCases) -> Measurement:
    return measure_precision(pairs, list_known_metrics()["ap"], None, eval_name="w", tolerance=0.02, alpha=0.05)


def test_swapping_the_labels_mirrors_average_precision() -> None:
    there, back = measure_ap(pair_detectors(0)), measure_ap(pair_detectors(0, is_swapped=True))
    assert (back.harm, back.low, back.high) == pytest.approx((-there.harm, -there.high, -there.low), abs=1e-12)
    assert (back.p, back.p_gain) == pytest.approx((there.p_gain, there.p), abs=0.02)


def test_the_order_of_images_changes_neither_average_precision_nor_its_chance() -> None:
    """The draws follow the order of clusters, so bounds move with it, by about their own error."""
    expected = measure_ap(pair_detectors(1))
    found = measure_ap(pair_detectors(1, np.random.default_rng(1).permutation(40)))
    assert (found.harm, found.p) == pytest.approx((expected.harm, expected.p), abs=1e-9)
    assert found.high - found.harm == pytest.approx(expected.high - expected.harm, rel=0.15)
