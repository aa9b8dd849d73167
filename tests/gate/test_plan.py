"""The plan: what it promises of a suite holds when the gate judges one, and impossible tolerances are named."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import SizeError
from pipeline.evalsets.cards import load_evalset
from pipeline.gate.plan import PlanRow, Sizes, SuiteSize, check_plan, list_impossible, plan_gate, read_last, render_plan
from pipeline.gate.statistics import proportion_bounds, tango_bounds
from pipeline.gate.suite_sizes import count_sizes, plan_product
from pipeline.gate.verdicts import Judgement
from pipeline.records.record_files import write_record
from tests.fakes.judging import compare_release
from tests.fakes.synthetic_detections import Change, make_detector_params, write_detector_tree
from tests.fakes.synthetic_records import Behaviour, make_params, write_tree
from tests.paths import ROOT

TOLERANCES = {"workflows/task_completion_rate": {"overall": 0.03}, "choices/accuracy": {"overall": 0.03}}
SUITES: dict[str, Sizes] = {"workflows": {None: SuiteSize(1_000, 1_000.0)}}


def plan(suites: Mapping[str, Sizes] = SUITES, last: Judgement | None = None, **gate: Any) -> list[PlanRow]:
    return plan_gate(make_params(["a"], ["a"], **({"tolerances": TOLERANCES} | gate)), suites, last)


def test_sizes_are_cases_and_the_equal_clusters_that_hide_as_much() -> None:
    sizes = count_sizes(["a", "a", "a", "b"], [["x"], ["x"], [], ["x"]])
    # of clusters of 3 and 1 the largest loss that nobody sees is 3 + 1 - 2 sqrt(0.05 * 3 * 1)
    shares = {None: 1 - math.sqrt(0.05 * 3) / 2, "x": 1 - 2 * math.sqrt(0.05 * 2) / 3}
    hiding = {name: math.log(0.05) / math.log1p(-share) for name, share in shares.items()}
    expected: dict[str | None, Any] = {
        None: (4, pytest.approx(hiding[None])),
        "x": (3, pytest.approx(hiding["x"])),
    }
    assert {name: (size.n, size.effective_clusters) for name, size in sizes.items()} == expected


def test_without_a_run_flips_are_assumed_and_unknown_suites_say_so() -> None:
    workflows, choices = plan()
    # 50 flips, of which 31 are losses one time in five
    assert workflows.provable == pytest.approx(
        tango_bounds(50 / 2 + 0.8416 * 50**0.5 / 2, 25 - 0.8416 * 50**0.5 / 2, 1_000, confidence=0.95, correction=0.5)[
            1
        ],
        abs=1e-4,
    )
    assert (workflows.source, choices.n, choices.source) == ("assumed", None, "needs a run")


def test_the_cases_that_it_asks_for_prove_the_tolerance() -> None:
    row = plan()[0]
    assert row.needed is not None and row.needed < 1_000
    enough = plan({"workflows": {None: SuiteSize(row.needed, float(row.needed))}})[0]
    fewer = plan({"workflows": {None: SuiteSize(row.needed - 5, row.needed - 5.0)}})[0]
    assert enough.provable is not None and fewer.provable is not None
    assert enough.provable <= 0.03 < fewer.provable


def test_flips_clusters_and_minutes_come_from_the_last_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "build", {"a": Behaviour({"workflows": 0.05})})
    judgement = compare_release(make_params(["a"], ["a"]), tmp_path / "build").judgement
    write_record(tmp_path / "reports/agent/verdict.json", judgement)
    row, choices = plan({}, read_last("agent", tmp_path))
    seen = next(c for c in judgement.verdicts[0].comparisons if c.metric == row.metric and c.bucket is None)
    assert seen.b is not None and seen.c is not None
    assert (row.n, row.flips) == (400, (seen.b + seen.c) / 400)
    assert choices.n == 400 and row.minutes == pytest.approx(judgement.verdicts[0].seconds["workflows"] / 60)
    (tmp_path / "reports/agent/verdict.json").write_text("{}")
    assert read_last("agent", tmp_path) is None


@pytest.mark.parametrize(
    ("name", "num_cases", "keeps_digest", "is_same"),
    [
        ("workflows", 1_200, True, True),
        ("workflows", 1_200, False, False),
        ("choices", 400, True, True),  # a task, of which lm-eval takes the digest itself
        ("choices", 399, True, False),
    ],
)
def test_a_run_of_other_cases_says_nothing_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_cases: int, keeps_digest: bool, is_same: bool
) -> None:
    """After a first run on the examples of `quantgate init` its flips were said to be those of one's own cases."""
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "build", {"a": Behaviour({"workflows": 0.05})}, num_cases=400)
    params = make_params(["a"], ["a"], tolerances=TOLERANCES)
    last = compare_release(params, tmp_path / "build").judgement
    write_record(tmp_path / "reports/agent/verdict.json", last)
    cases = load_evalset(ROOT / "evalsets" / name)
    cases = cases.model_copy(update={"cases": cases.cases[:num_cases]})
    if keeps_digest and name == "workflows":
        cases = cases.model_copy(update={"digest": last.cases[name]})
    (row,) = (row for row in plan_product(params, {name: cases}, tmp_path) if row.metric.startswith(name))
    assert row.n == num_cases
    assert row.source == ("last run of a" if is_same else "assumed (the last run had other cases)")
    assert (row.flips == 0.05, row.minutes is None) == (not is_same, not is_same)
    assert ("assumed flips are a guess" in render_plan([row])) == (not is_same)


def test_a_judgement_of_before_it_kept_digests_is_known_by_its_number_of_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "build", {"a": Behaviour({"workflows": 0.05})}, num_cases=400)
    params = make_params(["a"], ["a"], tolerances=TOLERANCES)
    last = compare_release(params, tmp_path / "build").judgement.model_copy(update={"cases": {}})
    write_record(tmp_path / "reports/agent/verdict.json", last)
    cases = load_evalset(ROOT / "evalsets/workflows")
    for num_cases, source in ((400, "last run of a"), (401, "assumed (the last run had other cases)")):
        some = cases.model_copy(update={"cases": cases.cases[:num_cases]})
        assert plan_product(params, {"workflows": some}, tmp_path)[0].source == source


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (
            SuiteSize(60, 60.0),
            "gate.tolerances.workflows/task_completion_rate.overall: 3 points: 60 cases in 60 effective "
            "clusters can't prove it whatever the candidate: without a single flip the loss may be 5.79 points; ",
        ),
        (SuiteSize(600, 20.0), "its 600 cases weigh as much as 20 clusters of equal size"),
    ],
)
def test_an_impossible_tolerance_is_said_before_any_run(size: SuiteSize, said: str) -> None:
    params = make_params(["a"], ["a"], tolerances=TOLERANCES, on_inconclusive="block")
    rows = plan_gate(params, {"workflows": {None: size}}, None)
    with pytest.raises(SizeError) as caught:
        check_plan(params, rows)
    assert said in str(caught.value)
    assert "\nimpossible: " in render_plan(rows)
    lax = make_params(["a"], ["a"], tolerances=TOLERANCES, on_inconclusive="warn")
    spared = plan_gate(lax, {"workflows": {None: size}}, None)
    assert "\nimpossible, and stops no release: " in render_plan(spared)


@pytest.mark.parametrize(
    "change",
    [
        {"on_inconclusive": "warn"},
        {
            "on_inconclusive": "block",
            "tolerances": {"workflows/task_completion_rate": {"overall": 0.03, "tier": "supporting"}},
        },
    ],
)
def test_what_need_not_be_proven_is_a_warning(change: dict[str, Any]) -> None:
    params = make_params(["a"], ["a"], **({"tolerances": TOLERANCES} | change))
    assert len(check_plan(params, plan_gate(params, {"workflows": {None: SuiteSize(60, 60.0)}}, None))) == 1


def test_cases_of_the_last_run_stop_nothing_as_there_may_be_more_by_now(tmp_path: Path) -> None:
    """After a run of 32 example questions a tolerance that 200 of one's own would prove was refused before any work."""
    write_tree(tmp_path / "build", {"a": Behaviour()}, num_cases=32)
    params = make_params(["a"], ["a"], tolerances=TOLERANCES, on_inconclusive="block")
    last = compare_release(make_params(["a"], ["a"]), tmp_path / "build").judgement
    rows = plan_gate(params, {}, last)
    assert [row.n for row in rows] == [32, 32]
    assert check_plan(params, rows) == [] and "impossible" not in render_plan(rows)
    with pytest.raises(SizeError, match="32 cases in 32 effective clusters can't prove it"):
        check_plan(params, plan_gate(params, {"choices": {None: SuiteSize(32, 32.0)}}, last))


def test_a_bucket_by_objects_grows_with_the_pictures(tmp_path: Path) -> None:
    """Cases don't carry it, so the last run alone tells its size; what can't be proven in it was once let through."""
    write_detector_tree(tmp_path, {"same": Change(score=0, box=0)}, num_images=80)
    limits = {"shelves/ap": {"overall": 0.3, "buckets": {"price_tags": 0.3}}}
    last = compare_release(make_detector_params(["same"], limits), tmp_path).judgement
    high = next(c.high for c in last.verdicts[0].comparisons if c.bucket == "price_tags")
    tight = make_detector_params(["same"], {"shelves/ap": {"buckets": {"price_tags": 0.75 * high}}})
    rows = [plan_gate(tight, {"shelves": {None: SuiteSize(n, n / 2)}}, last)[0] for n in (80, 160)]
    assert [row.n for row in rows] == [80, 160] and [bool(row.problem) for row in rows] == [True, False]
    # how much the objects of other pictures weigh, only another run can tell: it must be let through
    (few,) = plan_gate(tight, {"shelves": {None: SuiteSize(20, 10)}}, last)
    assert "a loss is bounded from 30 on" in few.problem and check_plan(tight, [few]) == list_impossible([few])
    assert "\nunlikely, and stops no release: gate.tolerances.shelves/ap.buckets.price_tags" in render_plan([few])


def test_a_mean_that_proves_more_than_it_must_needs_fewer_cases(tmp_path: Path) -> None:
    write_tree(tmp_path / "build", {"a": Behaviour(nll_shift=0.01)})
    tolerances = {"prose/perplexity_per_token": {"overall": 0.5}}
    params = make_params(["a"], ["a"], tolerances=tolerances)
    (row,) = plan_gate(params, {}, compare_release(params, tmp_path / "build").judgement)
    assert row.provable is not None and row.needed is not None and row.n is not None and row.provable < 0.25
    assert row.needed < row.n


def test_a_precision_that_not_even_the_same_detections_prove_is_said_before_the_next_run(tmp_path: Path) -> None:
    """Catches: a tolerance below what any candidate can prove is met again after hours, as inconclusive."""
    write_detector_tree(tmp_path, {"same": Change(score=0, box=0)}, num_images=80)
    last = compare_release(make_detector_params(["same"], {"shelves/ap": {"overall": 0.3}}), tmp_path).judgement
    high = last.verdicts[0].comparisons[0].high
    sizes: Sizes = {None: SuiteSize(80, 40.0)}
    rows = [
        plan_gate(make_detector_params(["same"], {"shelves/ap": {"overall": high + step}}), {"shelves": sizes}, last)[0]
        for step in (-1e-4, 1e-4)
    ]
    assert [row.least for row in rows] == pytest.approx([high, high])
    assert rows[0].problem.startswith("80 images don't prove it, by the last run of same: without any change the loss ")
    assert rows[0].needed is not None and rows[0].needed > 80 and not rows[1].problem
    product = make_detector_params(["same"], {"shelves/ap": {"overall": high - 1e-4}})
    assert check_plan(product, rows) == list_impossible(rows[:1]), "a better reference may prove it: it must get a run"
    (larger,) = plan_gate(
        make_detector_params(["same"], {"shelves/ap": {"overall": high - 1e-4}}),
        {"shelves": {None: SuiteSize(160, 80.0)}},
        last,
    )
    assert larger.least == pytest.approx(high / 2, rel=0.02) and not larger.problem


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--help"], 0, "PRODUCT"),
        (["agent", "texts"], 1, "expected agent or"),
    ],
)
def test_its_command_tells_what_it_takes_before_any_plan(argv: list[str], code: int, said: str) -> None:
    child = subprocess.run([sys.executable, "scripts/plan.py", *argv], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == code and said in child.stdout + child.stderr and "cases in all" not in child.stdout


def test_the_chance_that_a_lossless_candidate_is_proven_is_the_gates(tmp_path: Path) -> None:
    """Catches a plan whose chance is of another bound: flips are drawn, half of them losses on average, and judged."""
    rng = np.random.default_rng(5)
    for sizes, tolerance in (([1] * 1_000, 0.025), ([4] * 250, 0.04)):
        n, clusters = sum(sizes), np.repeat(np.arange(len(sizes)), sizes)
        row = plan(
            {"workflows": {None: SuiteSize(n, float(len(sizes)))}},
            tolerances={"workflows/task_completion_rate": {"overall": tolerance}},
        )[0]
        shared = len(sizes) < n  # without a run, cases of a cluster are taken to flip together
        passes = 0
        for _ in range(1_500):
            drawn = rng.random(len(sizes))
            d = np.where(drawn < 0.025, 1.0, np.where(drawn < 0.05, -1.0, 0.0))[clusters if shared else np.arange(n)]
            passes += proportion_bounds(d, clusters, confidence=0.95).high <= tolerance
        assert row.power == pytest.approx(passes / 1_500, abs=0.06)


def test_a_perplexity_that_is_all_room_is_proven_whenever_there_are_documents_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room for a document lost is no spread: taken for one, a release that always passes had 64 %."""
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "build", {"a": Behaviour()})
    params = make_params(["a"], ["a"])
    last = compare_release(params, tmp_path / "build").judgement
    row = next(row for row in plan_gate(params, {}, last) if row.metric == "prose/perplexity_per_token")
    seen = next(c for c in last.verdicts[0].comparisons if c.metric == row.metric)
    assert row.power == 1.0 and row.provable == row.least == pytest.approx(seen.high - seen.harm, rel=0.05)


def test_the_cases_of_a_plan_and_of_a_verdict_say_what_they_are_for() -> None:
    """Of one bucket a report asked for 79 more cases and the plan for 257, and neither said by which question."""
    (head, *_, last) = render_plan(plan(on_inconclusive="warn")).splitlines()
    assert "  cases in all  " in head
    assert last == "can prove, cases in all: for a candidate without a loss, which then passes four times in five"


def test_a_release_is_said_to_pass_as_often_as_all_of_its_metrics() -> None:
    rows = plan(
        {"workflows": {None: SuiteSize(1_000, 1_000.0)}, "choices": {None: SuiteSize(1_000, 1_000.0)}},
        on_inconclusive="block",
    )
    powers = [row.power or 0.0 for row in rows]
    said = render_plan(rows).splitlines()[-1]
    assert f"passes all 2 that must be proven {100 * powers[0] * powers[1]:.0f} % of the time" in said
    assert "release:" not in render_plan(plan(on_inconclusive="warn"))


def test_metrics_that_need_a_run_are_not_counted_as_passed() -> None:
    """Of 15 that must be proven, 12 of them known, "all 12 that must be proven" was said."""
    rows = plan({"workflows": {None: SuiteSize(1_000, 1_000.0)}}, on_inconclusive="block")
    assert [row.power is None for row in rows] == [False, True]
    said = render_plan(rows).splitlines()[-1]
    assert "passes 1 of the 2 that must be proven" in said and "nobody knows of the others before a run" in said
