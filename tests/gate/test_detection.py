"""A detector's AP through the gate: bounds, the test of a loss, and evidence that is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pipeline.gate.clusters import effective_clusters
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.influence import harm_by_image, share_of_objects
from pipeline.gate.resampling import bootstrap_bounds, draw_weights
from pipeline.gate.statistics import sign_flip_p, tango_bounds
from pipeline.numerics.average_precision import average_precision, coco_numbers
from pipeline.products.vision.detection_settings import DetectionEval, find_bucket_problems
from pipeline.records.detections import MatchTable, load_matches, save_matches
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import Evaluation
from pipeline.records.record_files import read_record, write_record
from pipeline.report.markdown_report import metrics_tree
from pipeline.report.plots import plot_harm
from tests.fakes.judging import compare_release, list_said, render_report
from tests.fakes.synthetic_detections import (
    Change,
    Detector,
    DetectorAuditor,
    make_detector_params,
    make_pair,
    write_detector_tree,
)
from tests.fakes.synthetic_records import rewrite_records

TOLERANCES: dict[str, dict[str, object]] = {
    "shelves/ap": {"overall": 0.03, "buckets": {"price_tags": 0.05}},
    "shelves/ap_small": {"overall": 0.05},
    "shelves/ap_large": {"overall": 0.05},
}


def test_draws_follow_from_the_clusters_and_not_from_their_names() -> None:
    """Catches: two candidates with the same images but other cluster numbers are resampled apart, and not paired."""
    clusters = np.array([4, 4, 0, 7, 7, 7])
    weights = draw_weights(clusters, num_resamples=50)
    assert np.array_equal(weights, draw_weights(np.array([0, 0, 1, 2, 2, 2]), num_resamples=50))
    assert (weights[0] == 1).all() and (weights[:, 0] == weights[:, 1]).all() and (weights[:, 3] == weights[:, 5]).all()
    assert (weights[:, 0] + weights[:, 2] + weights[:, 3] == 3).all()
    assert not np.array_equal(weights, draw_weights(clusters, num_resamples=50, seed=1))


def test_images_of_one_cluster_are_drawn_together() -> None:
    """Catches a bootstrap over images: every image twice would make the spread smaller by a third."""
    table, _ = make_pair(40, Change())
    twice = table.at(np.repeat(np.arange(40), 2))
    once = average_precision(table, draw_weights(np.arange(40), num_resamples=60))
    pairs = average_precision(twice, draw_weights(np.repeat(np.arange(40), 2), num_resamples=60))
    assert np.allclose(once, pairs, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(("lost", "n"), [(0, 133), (1, 133), (4, 300)])
def test_few_lost_images_have_about_the_bound_of_as_many_flips(lost: int, n: int) -> None:
    """Catches: an unchanged candidate proven on any number of images; a skewness of the wrong sign."""
    clusters = np.arange(n)
    draws = draw_weights(clusters) @ (clusters < lost) / n
    bounds = bootstrap_bounds(draws, n, lost=1.0, gained=1.0, confidence=0.95)
    assert bounds.harm == lost / n
    assert bounds.high == pytest.approx(tango_bounds(lost, 0, n, confidence=0.95)[1], rel=0.12)
    assert bounds.high <= stats.beta.ppf(0.95, lost + 1, n - lost) * 1.08  # Clopper and Pearson's
    swapped = bootstrap_bounds(-draws, n, lost=1.0, gained=1.0, confidence=0.95)
    assert (swapped.low, swapped.high) == pytest.approx((-bounds.high, -bounds.low))


def test_resamples_without_the_bucket_are_left_out_and_one_cluster_bounds_nothing() -> None:
    draws = np.array([0.1, np.nan, 0.1, 0.2, 0.0])
    assert bootstrap_bounds(draws, 2, lost=0.5, gained=0.5, confidence=0.95).high > 0.2
    with pytest.raises(ValueError, match="two clusters or more"):
        bootstrap_bounds(draws, 1.0, lost=0.5, gained=0.5, confidence=0.95)


@pytest.mark.parametrize("digits", [None, 1], ids=["", "ties"])
def test_the_parts_of_a_loss_change_sign_with_the_sides_and_add_up(digits: int | None) -> None:
    """Catches: an order of the sides among equal scores, which would make identical detectors differ; false alarms
    that cost nothing; classes that are weighed by their number of objects."""
    ours, theirs = make_pair(80, Change(score=0.05, drop=0.15), detector=Detector(digits=digits))
    harm = harm_by_image(ours, theirs)
    assert np.allclose(harm, -harm_by_image(theirs, ours), rtol=0, atol=1e-12)
    assert not harm_by_image(ours, ours).any()
    difference = (average_precision(ours) - average_precision(theirs))[0]
    if digits is None:  # else AP depends on which image of a tie comes first
        assert np.abs(harm.sum(axis=0).mean(axis=-1) - difference.mean(axis=-1)).max() < 0.01
    assert share_of_objects(ours).sum(axis=0) == pytest.approx(1)


def test_a_part_is_what_swapping_the_image_would_change() -> None:
    ours, theirs = make_pair(60, Change(score=0.05, drop=0.2))
    harm = harm_by_image(ours, theirs)[:, 0].mean(axis=-1)
    order = np.stack([np.arange(60), np.arange(60) + 60])
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(ours, name), getattr(theirs, name)])
        for name in ("classes", "scores", "matched", "ignored", "num_objects")
    }
    both = replace(
        ours,
        **arrays,
        offsets=np.concatenate([ours.offsets, theirs.offsets[1:] + ours.offsets[-1]]),
    )
    rng = np.random.default_rng(0)
    for _ in range(5):
        signs = rng.choice([0, 1], 60)
        mixed, rest = (
            average_precision(both.at(order[side, np.arange(60)]))[0, 0].mean() for side in (signs, 1 - signs)
        )
        assert mixed - rest == pytest.approx(((1 - 2 * signs) * harm).sum(), abs=0.006)


def simulate(by: Change, *, n: int, runs: int, population: int = 1500, swap: bool = False) -> tuple[float, list[Any]]:
    """Draw suites of n images from a population; return the true harm and of each suite (draws, parts, count, AP)."""
    ours, theirs = make_pair(population, by, detector=Detector(false_alarms=1.0), mean=3.0)
    true = float((average_precision(ours) - average_precision(theirs))[0, 0].mean())
    rng, found = np.random.default_rng(3), []
    for _ in range(runs):
        picked = rng.integers(0, population, n)
        a, b = ours.at(picked), theirs.at(picked)
        parts = harm_by_image(a, b)[:, 0].mean(axis=-1)
        if swap:
            found.append(parts * rng.choice([-1, 1], n))
            continue
        weights = draw_weights(np.arange(n), num_resamples=150)
        x, y = (average_precision(side, weights)[:, 0].mean(axis=-1) for side in (a, b))
        found.append((x - y, effective_clusters(share_of_objects(a)[:, 0], np.arange(n)), x[0], y[0]))
    return true, found


def test_a_candidate_on_the_tolerance_passes_no_more_often_than_alpha() -> None:
    """One image in sixteen is lost. Percentiles, the bound that the bootstrap is known for, pass it too often."""
    true, found = simulate(Change(blind=1 / 16), n=60, runs=150)
    passes = [
        bootstrap_bounds(draws, count, lost=x, gained=y, confidence=0.95).high <= true for draws, count, x, y in found
    ]
    percentiles = [np.nanquantile(draws[1:], 0.95) <= true for draws, *_ in found]
    limit = 0.05 + 2 * (0.05 * 0.95 / 150) ** 0.5
    assert np.mean(passes) <= limit < np.mean(percentiles)


def test_equal_detectors_are_told_apart_no_more_often_than_alpha() -> None:
    _, found = simulate(Change(score=0.1, box=0.05), n=40, runs=400, population=600, swap=True)
    p = np.array([sign_flip_p(parts, np.arange(40)) for parts in found])
    assert (p <= 0.05).mean() <= 0.05 + 2 * (0.05 * 0.95 / 400) ** 0.5
    assert (p <= 0.5).mean() == pytest.approx(0.5, abs=0.08)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two detectors beside the reference: the same but for rounding, and one that misses small things."""
    folder = tmp_path_factory.mktemp("detectors") / "build"
    changes = {"same": Change(), "small": Change(drop_small=0.5)}
    write_detector_tree(folder, changes, num_images=120, buckets=("night",))
    return folder


def judge(
    build: Path, names: Sequence[str] = ("same",), tolerances: dict[str, dict[str, object]] | None = None
) -> ReleaseComparison:
    params = make_detector_params(list(names), tolerances or TOLERANCES)
    return compare_release(params, build, DetectorAuditor())


def test_a_loss_of_small_objects_fails_where_they_are_and_nowhere_else(build: Path, tmp_path: Path) -> None:
    compared = judge(build, ("same", "small"))
    same, small = compared.judgement.verdicts
    assert (same.outcome, small.outcome) == ("pass", "fail")
    assert "note: shelves/ap [specks]: the bucket is empty" in " ".join(list_said(same))  # and nothing gates it
    outcomes = {(c.metric, c.bucket): c.outcome for c in small.comparisons}
    assert outcomes["shelves/ap_small", None] == outcomes["shelves/ap", "price_tags"] == "fail"
    assert outcomes["shelves/ap_large", None] == "pass" and outcomes["shelves/ap_large", "night"] == "reported"
    report = render_report(compared)
    assert "Images that lost most of shelves/ap_small, objects found on average over the IoU thresholds:" in report
    assert "Images that lost most of shelves/ap [price_tags], objects found" in report and "points" in report
    plot_harm(compared.judgement, tmp_path / "harm.png")
    tree = metrics_tree(small.metrics, compared.judgement.policy)["shelves"]
    assert tree["n"] == 120 and tree["ap_small"] < tree["ap by bucket"]["price_tags"] + 0.2


def test_a_loss_of_one_category_fails_where_it_is_though_the_mean_hides_it(tmp_path: Path) -> None:
    """Catches a category's AP over all classes, or over its images alone."""
    write_detector_tree(tmp_path, {"rare": Change(drop_rare=0.4)}, num_images=240)
    compared = judge(tmp_path, ("rare",), {"shelves/ap": {"overall": 0.1, "buckets": {"bottles": 0.05}}})
    verdict = compared.judgement.verdicts[0]
    outcomes = {c.bucket: c for c in verdict.comparisons if c.metric == "shelves/ap" and c.bucket in (None, "bottles")}
    whole, bottles = outcomes[None], outcomes["bottles"]
    assert (whole.outcome, bottles.outcome, verdict.outcome) == ("pass", "fail", "fail")
    assert whole.harm == pytest.approx(bottles.harm / 3, abs=0.01)  # the mean over three categories
    report = render_report(compared)
    assert f"ggregate flat, bottles objects down: rare moves shelves/ap by {-100 * whole.harm:.2f} points" in report
    assert "Images that lost most of shelves/ap [bottles], objects found" in report


def test_a_headline_of_a_flat_average_is_about_an_average_that_passes(tmp_path: Path) -> None:
    """It set the AP that was left open against a bucket of AP at 0.5, whose average had failed."""
    write_detector_tree(tmp_path, {"rare": Change(drop_rare=0.4)}, num_images=240)
    tolerances: dict[str, dict[str, object]] = {
        "shelves/ap": {"overall": 0.1},
        "shelves/ap_50": {"overall": 0.06, "buckets": {"bottles": 0.05}},
    }
    verdict = judge(tmp_path, ("rare",), tolerances).judgement.verdicts[0]
    assert verdict.outcome == "fail" and not any("aggregate flat" in reason for reason in list_said(verdict))


def test_metrics_carry_an_interval_and_empty_buckets_have_none(build: Path) -> None:
    metrics = {(m.name, m.bucket): m for m in judge(build).judgement.reference_metrics}
    assert ("shelves/ap", "specks") not in metrics and ("shelves/ap_small", "price_tags") not in metrics
    for (name, _), metric in metrics.items():
        assert metric.low is not None and metric.high is not None
        assert 0 <= metric.low < metric.value < metric.high <= 1 or name == "shelves/finite_output_rate"


def test_each_metric_is_coco_s_number_of_its_name(build: Path) -> None:
    """Catches a metric at another threshold or of another area."""
    expected = coco_numbers(load_matches(build / "evaluations/reference/shelves.npz", num_images=120))
    metrics = {
        m.name: m.value
        for m in judge(build).judgement.reference_metrics
        if m.bucket is None and m.name != "shelves/finite_output_rate"
    }
    assert metrics == {f"shelves/{name}": value for name, value in expected.items() if name.startswith("ap")}


def test_an_unchanged_detector_is_proven_as_far_as_the_suite_is_large(tmp_path: Path) -> None:
    """A bootstrap of what does not differ has bounds of width 0, on 2 images as on 2,000."""
    write_detector_tree(tmp_path, {"same": Change(score=0, box=0)}, num_images=80)
    comparison = judge(tmp_path).judgement.verdicts[0].comparisons[0]
    assert comparison.harm == 0 and comparison.p == comparison.p_holm == 1
    assert comparison.high == pytest.approx(2.8 * comparison.reference / comparison.effective_clusters, rel=0.05)
    assert comparison.low == -comparison.high


def test_an_empty_bucket_is_refused_by_name_where_it_is_gated(build: Path) -> None:
    """-1 of both sides, as COCO writes it, would be a harm of 0."""
    verdict = judge(build, tolerances={"shelves/ap": {"buckets": {"specks": 0.02}}}).judgement.verdicts[0]
    assert verdict.outcome == "refused"
    assert list_said(verdict)[0] == (
        "refused: shelves/ap [specks]: the bucket is empty; no such object on 120 images "
        "has an area of 0 to 4 square pixels"
    )


def test_a_bucket_that_nobody_has_is_refused(build: Path) -> None:
    verdict = judge(build, tolerances={"shelves/ap": {"buckets": {"dusk": 0.02}}}).judgement.verdicts[0]
    assert "refused: shelves/ap [dusk]: the bucket is empty; no case carries it" in list_said(verdict)


def test_a_reference_that_finds_less_than_the_tolerance_proves_nothing(build: Path) -> None:
    reasons = list_said(judge(build, tolerances={"shelves/ap": {"overall": 0.9}}).judgement.verdicts[0])
    assert "a loss above the tolerance of 0.9 can't show" in reasons[0]
    # a box of two corners fits few annotations, and the evalset is blameless
    assert "can't show; look at what the adapter returns, and at the evalset; boxes are left, top, width" in reasons[0]


def test_the_order_of_the_records_changes_nothing(tmp_path: Path) -> None:
    """Catches a table that is paired by place and not with its cases."""
    write_detector_tree(tmp_path, {"same": Change(drop=0.1)}, num_images=80)
    before = judge(tmp_path).judgement.verdicts[0].comparisons
    order = np.random.default_rng(0).permutation(80)
    edit_table(tmp_path, "same", lambda table: table.at(order))
    rewrite_records(tmp_path, "same", "shelves", lambda records: [records[i] for i in order])
    after = judge(tmp_path).judgement.verdicts[0].comparisons
    assert [(c.harm, c.high, c.p) for c in after] == [(c.harm, c.high, c.p) for c in before]


def edit_table(build: Path, name: str, edit: Callable[[MatchTable], MatchTable], *, seal: bool = True) -> None:
    """Change one side's table, and its digest in the index."""
    folder = build / "evaluations" / name
    table = edit(load_matches(folder / "shelves.npz", num_images=80))
    save_matches(folder / "shelves.npz", table)
    evaluation = read_record(folder / "evaluation.json", Evaluation)
    digest = digest_file(folder / "shelves.npz") if seal else None
    file = evaluation.evals["shelves"].model_copy(update={"arrays_sha256": digest})
    write_record(folder / "evaluation.json", evaluation.model_copy(update={"evals": {"shelves": file}}))


def add_object(table: MatchTable) -> MatchTable:
    counts = table.num_objects.copy()
    counts[3, 0, 1] += 1
    return replace(table, num_objects=counts)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        pytest.param(lambda t: t.at(np.roll(np.arange(80), 1)), "as its record says", id="other-order"),
        pytest.param(add_object, "unequal work: the objects of case 'shelf-003' differ", id="other-objects"),
        pytest.param(lambda t: t.at(np.arange(79)), "expected finite detections of 80 images", id="image-missing"),
        pytest.param(
            lambda t: replace(t, areas={**t.areas, "small": (0.0, 1000.0)}),
            "were matched in other areas",
            id="other-areas",
        ),
        pytest.param(
            lambda t: replace(t, categories={"bottles": 1}),
            "were matched in other areas or categories",
            id="other-categories",
        ),
        pytest.param(lambda t: replace(t, scores=t.scores * np.nan), "expected finite detections", id="nan"),
        pytest.param(lambda t: replace(t, classes=t.classes + 1), "expected finite detections", id="unknown-class"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(
    tmp_path: Path, edit: Callable[[MatchTable], MatchTable], said: str
) -> None:
    write_detector_tree(tmp_path, {"same": Change()}, num_images=80)
    edit_table(tmp_path, "same", edit)
    verdict = judge(tmp_path).judgement.verdicts[0]
    assert verdict.outcome == "refused" and any(said in reason for reason in list_said(verdict)), list_said(verdict)


def test_a_table_without_a_seal_or_a_file_is_refused(tmp_path: Path) -> None:
    write_detector_tree(tmp_path, {"same": Change()}, num_images=80)
    edit_table(tmp_path, "same", lambda table: table, seal=False)
    assert "expected matched detections and their sha256" in list_said(judge(tmp_path).judgement.verdicts[0])[0]
    edit_table(tmp_path, "same", lambda table: table)
    (tmp_path / "evaluations/same/shelves.npz").unlink()
    assert "shelves.npz: expected arrays, found no file" in list_said(judge(tmp_path).judgement.verdicts[0])[0]


def test_a_bucket_of_images_may_not_be_called_like_one_of_areas(tmp_path: Path) -> None:
    write_detector_tree(tmp_path, {"same": Change()}, num_images=80, buckets=("small",))
    assert "'small' is a bucket of images and one of objects" in list_said(judge(tmp_path).judgement.verdicts[0])[0]


@pytest.mark.parametrize(
    ("categories", "key"),
    [
        ({"price_tags": 1}, "categories.price_tags"),
        ({"small": 1}, "categories.small"),
        ({"50": 1}, "categories.50"),
        ({"a": 1, "b": 1}, "categories.b"),
        ({"a": 1, "b": 2}, None),
    ],
)
def test_categories_of_the_settings(categories: dict[str, int], key: str | None) -> None:
    settings = DetectionEval(kind="detection", evalset="e", areas={"price_tags": [0.0, 9.0]}, categories=categories)
    assert [problem.partition(":")[0] for problem in find_bucket_problems(settings)] == ([key] if key else [])


def test_areas_of_the_settings() -> None:
    settings = DetectionEval(kind="detection", evalset="e", areas={"small": [0.0, 10.0], "big": [20.0, 10.0]})
    assert [problem.partition(":")[0] for problem in find_bucket_problems(settings)] == ["areas.small", "areas.big"]
    settings = DetectionEval(kind="detection", evalset="e", areas={"75": [0.0, 10.0]})
    assert find_bucket_problems(settings) == [
        "areas.75: expected another name than those of scores at one IoU (50, 75); rename it"
    ]
