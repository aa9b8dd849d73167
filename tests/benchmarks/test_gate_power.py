"""The power simulation measures with the gate's numbers, and its draws are of the world that they claim."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from statsmodels.stats.proportion import proportions_ztest

from benchmarks.gate_power import (
    World,
    draw_clustered,
    draw_counts,
    is_z_significant,
    measure_counts,
    simulate,
    sum_share,
)
from pipeline.gate.measure import measure_metric
from pipeline.gate.pairing import align
from pipeline.products import list_known_metrics
from tests.fakes.synthetic_records import make_flips


@pytest.mark.parametrize(("b", "c", "n"), [(0, 0, 133), (24, 8, 340), (6, 20, 340)])
def test_counts_are_measured_as_records_are(b: int, c: int, n: int) -> None:
    """Catches a simulation of another rule than the one that decides."""
    pairs = align(*make_flips(b, c, n, right=n - 30), where="w")
    expected = measure_metric(
        pairs, list_known_metrics()["task_completion_rate"], None, eval_name="w", tolerance=0.03, alpha=0.05
    )
    found, shown = measure_counts(b, c, n, 0.03), {"reference", "candidate", "more_cases"}  # words, no decision
    for name in {field.name for field in dataclasses.fields(found)} - shown - {"sums", "weights", "tail"}:
        assert getattr(found, name) == getattr(expected, name), name
    assert sorted(found.sums) == sorted(expected.sums) and np.array_equal(found.weights, expected.weights)


def test_draws_have_the_flips_and_the_drop_of_their_world() -> None:
    world = World(1_000, 0.10, 0.03)
    counts, times = zip(*draw_counts(world, 4_000, np.random.default_rng(0)), strict=True)
    rows = np.repeat(list(counts), list(times), axis=0)
    b, c, both, neither = rows.mean(axis=0) / 1_000
    assert (b + c, b - c) == pytest.approx((0.10, 0.03), abs=0.002)
    assert (both + b, neither + c) == pytest.approx((0.81, 0.19), abs=0.002)
    d, clusters = draw_clustered(World(90_000, 0.10, 0.03), 3, 1.0, np.random.default_rng(0))
    assert d.mean() == pytest.approx(0.03, abs=0.01) and np.abs(d).mean() == pytest.approx(0.10, abs=0.01)
    assert all(len(set(d[clusters == i])) == 1 for i in range(50))


def test_what_the_field_does_is_counted_on_the_same_draws() -> None:
    """At 0 flips no rule fails; where all that flips is lost, 10 of 81 points, all of them do."""
    calm = simulate(World(2_000, 0.0, 0.0), 50, np.random.default_rng(0))
    assert calm == {
        "pass 0.03": 50,
        "pass 0.02": 50,
        "drop 0.03": 0,
        "drop 0.02": 0,
        "relative": 0,
        "recovery": 0,
        "z": 0,
    }
    worst = simulate(World(2_000, 0.10, 0.10), 50, np.random.default_rng(0))
    assert worst == dict.fromkeys(("fail 0.03", "fail 0.02", "drop 0.03", "drop 0.02", "relative", "recovery", "z"), 50)
    assert not World(340, 0.03, 0.05).is_possible


def test_the_z_test_is_one_sided_and_knows_the_direction() -> None:
    assert is_z_significant(276, 257, 340) and not is_z_significant(257, 276, 340)
    assert proportions_ztest([276, 257], [340, 340])[1] > 0.05  # on two sides it would not be


@pytest.mark.parametrize(("n", "outcome", "drop"), [(60, "pass", 0.03), (133, "fail", 0.0)])
def test_sums_over_all_outcomes_agree_with_draws(n: int, outcome: str, drop: float) -> None:
    world, draws = World(n, 0.10, drop), 20_000
    expected = sum_share(world, outcome, 0.03)
    drawn = simulate(world, draws, np.random.default_rng(0))[f"{outcome} 0.03"] / draws
    assert 0.02 < expected < 0.08 and drawn == pytest.approx(expected, abs=4 * (expected / draws) ** 0.5)
    assert sum(sum_share(world, said, 0.03) for said in ("pass", "fail", "inconclusive")) == pytest.approx(1, abs=1e-6)
