"""A category is judged whether or not anybody thought of it, and ids that no category has are refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import EngineError, EvidenceError
from pipeline.gate.checks import check_outcomes
from pipeline.gate.compare import ReleaseComparison
from pipeline.numerics.average_precision import average_precision
from pipeline.products.vision.detecting import build_categories, judge_results
from pipeline.products.vision.detection_settings import DetectionEval
from pipeline.records.detections import MatchTable
from pipeline.report.terminal import render_gate
from tests.fakes.judging import compare_release, list_said, render_report
from tests.fakes.synthetic_categories import NUM_CATEGORIES, PERSON, Results, lose, make_cases, write_categories_tree
from tests.fakes.synthetic_detections import DetectorAuditor, DetectorParams, make_detector_params

SETTINGS = DetectionEval(kind="detection", evalset="evalsets/shelves")
AP = {"shelves/ap": {"overall": 0.02}}


def judge_by(build: Path, name: str, tolerances: dict[str, Any]) -> ReleaseComparison:
    data = make_detector_params([name], tolerances).model_dump() | {"evals": {"shelves": SETTINGS.model_dump()}}
    return compare_release(DetectorParams.model_validate(data), build, DetectorAuditor())


@cache
def judge(build: Path, name: str) -> ReleaseComparison:
    return judge_by(build, name, AP)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector without one person."""
    folder = tmp_path_factory.mktemp("categories") / "build"
    write_categories_tree(folder, {"blind": lose(PERSON)}, SETTINGS)
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of three categories, and one that is the reference."""
    folder = tmp_path_factory.mktemp("few") / "build"
    cases = make_cases(np.random.default_rng(5), 3)
    write_categories_tree(folder, {"blind": lose(PERSON), "same": list}, SETTINGS, cases=cases)
    return folder


def test_a_whole_class_that_is_lost_fails_and_is_named_first(build: Path) -> None:
    """201 of 734 objects gone, 1/80 of AP: it passed, and no line of the report had the word."""
    compared = judge(build, "blind")
    verdict = compared.judgement.verdicts[0]
    outcomes = {c.bucket: c for c in verdict.comparisons if c.metric == "shelves/ap"}
    assert outcomes[None].outcome == "pass" and 0.005 < outcomes[None].harm < 0.0125
    assert outcomes["person"].candidate == 0 and outcomes["person"].outcome == "fail"
    assert verdict.outcome == "fail" and list_said(verdict)[0].startswith("aggregate flat, person objects down: blind ")
    assert "shelves/ap [person] falls from" in list_said(verdict)[0]
    check_outcomes(compared.judgement)
    report = render_report(compared)
    assert "person" in report.split("| candidate |")[0] and "Images that lost most of shelves/ap [person]" in report
    assert "person objects down" in render_gate(compared.judgement)


def test_each_category_of_eighty_is_resampled_once(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tables were kept than two sides of eighty have: each metric, and each look, resampled all anew."""
    resampled: list[MatchTable] = []

    def count(table: MatchTable, weights: Any) -> Any:
        resampled.append(table)
        return average_precision(table, weights)

    monkeypatch.setattr("pipeline.gate.detection.average_precision", count)
    judge_by(build, "blind", AP)
    assert len(resampled) == 2 * NUM_CATEGORIES, "that of all is made of theirs"


def test_a_detector_that_lost_nothing_passes_though_no_category_is_proven(few: Path) -> None:
    """A category of forty objects can't prove points: demanding it would leave every release open."""
    verdict = judge_by(few, "same", {"shelves/ap": {"overall": 0.01}}).judgement.verdicts[0]
    person = next(c for c in verdict.comparisons if (c.metric, c.bucket) == ("shelves/ap", "person"))
    assert (person.outcome, person.tier, person.tolerance) == ("inconclusive", "watched", 0.01)
    assert verdict.outcome == "pass"
    assert not any(reason.startswith(("fail", "inconclusive")) for reason in list_said(verdict))


def test_a_category_in_few_clusters_is_named_as_not_judged(build: Path) -> None:
    verdict = judge(build, "blind").judgement.verdicts[0]
    note = next(reason for reason in list_said(verdict) if "are not judged" in reason)
    assert "as fewer than 10 clusters hold them: thing " in note and "person" not in note


def test_a_category_with_a_tolerance_of_its_own_is_not_watched(few: Path) -> None:
    """Catches one that is judged by two tolerances; an advisory one stops nothing, so there it is watched still."""
    own = {"shelves/ap": {"overall": 0.02, "buckets": {"person": 0.1}}}
    found = {c.bucket: c for c in judge_by(few, "same", own).judgement.verdicts[0].comparisons if c.tolerance}
    assert (found["person"].tier, found["person"].tolerance) == ("critical", 0.1)
    shown = AP | {"shelves/ap_50": {"buckets": {"person": 0.1}, "tier": "advisory"}}
    compared = judge_by(few, "blind", shown)
    assert compared.judgement.verdicts[0].outcome == "fail"
    check_outcomes(compared.judgement)


def test_a_fail_of_what_is_watched_is_none_that_passes_by_an_edit(build: Path) -> None:
    judgement = judge(build, "blind").judgement
    (verdict,) = judgement.verdicts
    open_ = tuple(
        c.model_copy(update={"outcome": "inconclusive"}) if c.bucket == "person" and c.tolerance else c
        for c in verdict.comparisons
    )
    other = tuple(
        c.model_copy(update={"tolerance": 0.9, "outcome": "pass"}) if c.bucket == "person" and c.tolerance else c
        for c in verdict.comparisons
    )
    for comparisons in (verdict.comparisons, open_, other):
        edited = verdict.model_copy(update={"outcome": "pass", "reasons": (), "comparisons": comparisons})
        with pytest.raises(EvidenceError, match="contradicts"):
            check_outcomes(judgement.model_copy(update={"verdicts": (edited,)}))


def shift(results: Results) -> Results:
    """Return results and, counted from 0 as COCO's 80 contiguous ids are, those of people again."""
    return results + [r | {"category_id": 0} for r in results if r["category_id"] == PERSON]


def test_ids_that_no_category_has_are_counted_and_refused(tmp_path: Path) -> None:
    """They were left out without a word, and so was all that a wrong table of ids lost."""
    write_categories_tree(tmp_path, {"shifted": shift}, SETTINGS, cases=make_cases(np.random.default_rng(5))[:60])
    verdict = judge(tmp_path, "shifted").judgement.verdicts[0]
    refused = next(reason for reason in list_said(verdict) if "category_id" in reason)
    assert verdict.outcome == "refused" and refused.startswith("refused: shelves: ")
    assert "detections of shifted on" in refused and "of 60 pictures, first 'p" in refused


def test_a_category_of_the_card_without_an_object_may_be_found() -> None:
    """A detector knows more than a suite shows: that is no shifted id."""
    cases = make_cases(np.random.default_rng(5))[:1]
    result = [{"bbox": [0, 0, 1, 1], "score": 0.5, "category_id": 99}]
    for names, count in (({}, 1.0), ({"kite": 99}, 0.0)):
        categories = build_categories(cases, names, SETTINGS)
        _, scores = judge_results(
            cases[0], result, is_finite=True, settings=SETTINGS, categories=categories, is_reference=True
        )
        assert scores["unknown_categories"] == count


@pytest.mark.parametrize("number", [-1, 2**31, 2**70])
def test_an_id_that_none_can_be_is_one_line(number: int) -> None:
    cases = make_cases(np.random.default_rng(5))[:1]
    result = [{"bbox": [0, 0, 1, 1], "score": 0.5, "category_id": number}]
    categories = build_categories(cases, {}, SETTINGS)
    with pytest.raises(EngineError, match="category_id is 0 or more"):
        judge_results(cases[0], result, is_finite=True, settings=SETTINGS, categories=categories, is_reference=True)


def test_names_come_from_the_settings_then_the_card_then_the_number() -> None:
    cases = make_cases(np.random.default_rng(5))
    own = SETTINGS.model_copy(update={"categories": {"people": PERSON}})
    categories = build_categories(cases, {"person": PERSON, "cat": 2}, own)
    assert {"people", "cat", "category 3"} <= categories.buckets.keys() and "person" not in categories.buckets
    assert len(categories.buckets) == 80
    alone = build_categories([c for c in cases if {a.category_id for a in c.annotations} == {PERSON}], {}, SETTINGS)
    assert alone.buckets == {}, "a single category is the whole"
