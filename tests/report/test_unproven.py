"""What says nothing reads as nothing: a release in which nothing was proven, and a product without any valid output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EvidenceError
from pipeline.gate.checks import check_outcomes
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.validity import is_without_output
from pipeline.gate.verdicts import blocking_verdicts
from pipeline.products.vision.settings import find_network_problems
from pipeline.records.reasons import Reason, ReasonKind
from pipeline.report.explanation_records import Explanation
from pipeline.report.github import render_annotations, render_summary
from pipeline.report.html import render_html
from pipeline.report.junit import render_junit
from pipeline.report.terminal import render_gate
from tests.fakes.judging import compare_release, list_said, render_report
from tests.fakes.synthetic_detections import Change
from tests.fakes.synthetic_networks import Way, make_network_product, write_detector
from tests.fakes.synthetic_records import Behaviour, make_params, write_tree
from tests.products.vision.test_report import edit_records

SAME = Change(score=0, box=0)
NOTHING = "nothing was proven: none of the 2 gated comparisons of same is shown to be within its tolerance"
SOME = "not all was proven: 1 of the 2 gated comparisons of same is not shown to be within its tolerance"


def judge(
    root: Path,
    num_images: int,
    *,
    tiers: tuple[str, str] = ("supporting", "supporting"),
    on_inconclusive: str = "block",
    finite: float = 1.0,
) -> ReleaseComparison:
    ways = {"same": Way(by=SAME)}
    tolerances = {
        "scenes/ap": {"overall": 0.05, "tier": tiers[0]},
        "scenes/finite_output_rate": {"overall": 0.05, "tier": tiers[1]},
    }
    product = make_network_product("detector", ways, tolerances)
    gate = product.gate.model_copy(update={"on_inconclusive": on_inconclusive})
    build = write_detector(root, product, ways, num_images=num_images)
    if finite < 1:
        edit_records(
            build / "evaluations/same",
            "scenes",
            lambda r: r.model_copy(update={"scores": r.scores | {"finite": finite}}),
        )
    compared = compare_release(product.model_copy(update={"gate": gate}), build)
    check_outcomes(compared.judgement)
    return compared


def render_all(compared: ReleaseComparison) -> dict[str, str]:
    judgement, explanation = compared.judgement, Explanation(candidates=())
    return {
        "terminal": render_gate(judgement),
        "report": render_report(compared),
        "summary": render_summary(judgement, explanation),
        "html": render_html(judgement, explanation, {}),
        "junit": render_junit(judgement),
        "annotations": "\n".join(render_annotations(judgement, "{}")),
    }


@pytest.mark.parametrize(
    "how", [{"on_inconclusive": "block"}, {"tiers": ("critical", "critical"), "on_inconclusive": "warn"}]
)
def test_a_release_in_which_nothing_was_proven_says_so_on_top(tmp_path: Path, how: dict[str, Any]) -> None:
    """Every comparison was open and the page said in green that nothing blocks."""
    compared = judge(tmp_path, 6, **how)
    assert not blocking_verdicts(compared.judgement)
    for name, text in render_all(compared).items():
        assert NOTHING in text.replace("`", "").replace("Nothing was", "nothing was"), name
    assert render_gate(compared.judgement).startswith("nothing was proven")
    report = render_report(compared)
    assert report.index("othing was proven") < report.index("| candidate |")


def test_a_release_in_which_all_was_proven_says_nothing(tmp_path: Path) -> None:
    compared = judge(tmp_path, 140)
    assert compared.judgement.verdicts[0].outcome == "pass"
    assert not any("was proven" in text for text in render_all(compared).values())


def test_what_was_proven_in_part_is_counted(tmp_path: Path) -> None:
    compared = judge(tmp_path, 64)
    assert [c.outcome for c in compared.judgement.verdicts[0].comparisons if c.tolerance] == ["pass", "inconclusive"]
    assert SOME in render_gate(compared.judgement)


@pytest.mark.parametrize("num_images", [2, 4])
def test_a_network_whose_every_output_is_nan_fails_however_few_there_are(tmp_path: Path, num_images: int) -> None:
    """4 of 4 were called "could be noise"."""
    compared = judge(tmp_path, num_images, finite=0.0, tiers=("advisory", "critical"))
    found = next(c for c in compared.judgement.verdicts[0].comparisons if c.metric == "scenes/finite_output_rate")
    assert found.outcome == "fail" and compared.judgement.verdicts[0].outcome == "fail"
    assert found.sentence.startswith("no valid output: 100.0 % became 0.0 %")
    passed = found.model_copy(update={"outcome": "inconclusive"})
    verdict = compared.judgement.verdicts[0]
    comparisons = tuple(passed if c is found else c for c in verdict.comparisons)
    edited = verdict.model_copy(update={"outcome": "inconclusive", "comparisons": comparisons, "reasons": ()})
    with pytest.raises(EvidenceError, match="contradicts"):
        check_outcomes(compared.judgement.model_copy(update={"verdicts": (edited,)}))


def test_a_detector_that_finds_nothing_at_all_fails_however_few_pictures_there_are(tmp_path: Path) -> None:
    ways = {"blind": Way(by=Change(score=0, box=0, drop=1.0))}
    product = make_network_product(
        "detector", ways, {"scenes/ap": {"overall": 0.05}, "scenes/finite_output_rate": {"overall": 0.05}}
    )
    verdict = compare_release(product, write_detector(tmp_path, product, ways, num_images=3)).judgement.verdicts[0]
    assert verdict.outcome == "fail"
    assert any("scenes/ap: no valid output" in reason for reason in list_said(verdict))


@pytest.mark.parametrize(
    ("metric", "bucket", "reference", "candidate", "expected"),
    [
        ("shots/sound_image_rate", None, 1.0, 0.0, True),
        ("shots/sound_image_rate", "night", 0.5, 0.0, True),
        ("shots/sound_image_rate", None, 1.0, 0.01, False),
        ("shots/sound_image_rate", None, 0.4, 0.0, False),
        ("shots/oversaturated_image_rate", None, 0.0, 1.0, True),
        ("shots/oversaturated_image_rate", None, 1.0, 0.0, False),
        ("shots/oversaturated_image_rate", None, 0.6, 1.0, False),
        ("scenes/ap", None, 0.7, 0.0, True),
        ("scenes/ap", "person", 0.7, 0.0, False),
        ("scenes/ap_small", None, 0.7, 0.0, False),
        ("tools/tool_call_accepted_rate", None, 1.0, 0.0, False),
    ],
)
def test_facts_about_outputs_are_told_from_answers_that_chance_may_turn(
    metric: str, bucket: str | None, reference: float, candidate: float, expected: bool
) -> None:
    """One wrong answer of one is chance; one NaN picture of one is none. An object of a rare kind may be missed."""
    assert is_without_output(metric, bucket, reference, candidate) is expected


def test_the_rate_of_sound_outputs_may_not_be_advisory() -> None:
    """It had to have a tolerance, and one that stops nothing was one."""
    product = make_network_product(
        "detector",
        {"same": Way()},
        {"scenes/ap": {"overall": 0.05}, "scenes/finite_output_rate": {"overall": 0.05, "tier": "advisory"}},
    )
    assert any("scenes/finite_output_rate" in problem for problem in find_network_problems(product))


@pytest.mark.parametrize(("outcome", "holds"), [("inconclusive", True), ("pass", False)])
def test_what_a_kind_calls_unproven_keeps_a_pass_from_being_one(tmp_path: Path, outcome: Any, holds: bool) -> None:
    """Any auditor may say so, and the gate must neither let it through nor take the verdict for an edited one."""
    write_tree(tmp_path / "build", {"a": Behaviour()}, num_cases=400)
    judgement = compare_release(make_params(["a"], ["a"], on_inconclusive="block"), tmp_path / "build").judgement
    check_outcomes(judgement)
    reason = Reason(kind=ReasonKind.UNPROVEN, text="stitches: no picture is cut into tiles")
    verdict = judgement.verdicts[0]
    edited = verdict.model_copy(update={"outcome": outcome, "reasons": (*verdict.reasons, reason)})
    judged = judgement.model_copy(update={"verdicts": (edited,)})
    if holds:
        check_outcomes(judged)
        assert blocking_verdicts(judged)
    else:
        with pytest.raises(EvidenceError, match="contradicts"):
            check_outcomes(judged)
