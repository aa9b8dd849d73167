"""The canary: which path is compared with which, what is a failure, and what a report says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.gate.checks import check_outcomes
from pipeline.records.canary import CanaryAnswer
from pipeline.records.evaluations import Evaluation
from pipeline.records.files import write_text
from pipeline.records.reasons import ReasonKind
from pipeline.records.record_files import read_record, write_record
from pipeline.records.speculation import SpeculationCounts
from pipeline.records.verdicts import Verdict
from pipeline.report.terminal import render_gate
from tests.fakes.judging import build_runs, compare_release, list_said
from tests.fakes.synthetic_records import (
    CALL,
    Behaviour,
    make_candidate,
    make_params,
    write_canary,
    write_candidate,
    write_tree,
)

WRONG = CALL.replace("bay-1", "bay-2")


def judge(
    root: Path,
    answers: dict[str, dict[int, str]],
    *,
    floor: dict[str, dict[int, str]] | None = None,
    same_weights: bool = True,
    exact: bool = False,
    num_prompts: int = 100,
) -> Verdict:
    """Judge a candidate that answers some prompts of the canary otherwise, against a reference that does so too."""
    build = root / "build"
    write_tree(build, {"a": Behaviour()}, num_cases=400)
    for name, said in (("reference", floor or {}), ("a", answers)):
        path = build / "evaluations" / name / "evaluation.json"
        evaluation = read_record(path, Evaluation)
        if name == "a" and same_weights:
            evaluation = take_weights(build, evaluation)
        file = write_canary(path.parent, said, num_prompts=num_prompts)
        write_record(path, evaluation.model_copy(update={"canary": file}))
    params = make_params(["a"], ["a"])
    canary = params.canary.model_copy(update={"num_prompts": num_prompts})
    params = params.model_copy(update={"canary": canary})
    changed = params.candidates["a"].model_copy(update={"exact": exact})
    params = params.model_copy(update={"candidates": params.candidates | {"a": changed}})
    judgement = compare_release(params, build).judgement
    check_outcomes(judgement)
    told = [line.split(maxsplit=1)[1] for line in render_gate(judgement).splitlines() if line.startswith("  ")]
    for reason in judgement.verdicts[0].reasons:
        if reason.kind in (ReasonKind.FAILED, ReasonKind.UNPROVEN):
            assert reason.text in told, "the terminal says it too"
    return judgement.verdicts[0]


def take_weights(build: Path, evaluation: Evaluation) -> Evaluation:
    """Turn candidate `a` into one with the reference's weights, which another path serves."""
    from tests.gate.test_compare import rewrite_records

    candidate = make_candidate("a").model_copy(update={"checkpoint": make_candidate("reference").checkpoint})
    write_candidate(build, candidate)
    for name in evaluation.evals:
        rewrite_records(
            build,
            "a",
            name,
            lambda records: [r.model_copy(update={"fingerprint": candidate.fingerprint}) for r in records],
        )
    path = build / "evaluations/a/evaluation.json"
    return read_record(path, Evaluation).model_copy(
        update={
            "served_by": candidate.facts,
            "fingerprint": candidate.fingerprint,
            "checkpoint_digest": candidate.checkpoint.digest,
        }
    )


def changed(*prompts: int) -> dict[int, str]:
    return dict.fromkeys(prompts, WRONG + "!")


def test_the_same_answers_pass_and_the_report_says_what_could_be_seen(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {})
    assert verdict.outcome == "pass" and verdict.canary is not None and verdict.canary.is_same_weights
    assert any("Canary: 0 of 100 greedy answers differ from the reference's path" in r for r in list_said(verdict))
    assert verdict.behaviour.keys() == {"alone", "loaded", "again"}


@pytest.mark.parametrize(("num_changed", "outcome"), [(2, "pass"), (3, "fail")])
def test_more_differences_than_a_floor_of_none_explains_fail(tmp_path: Path, num_changed: int, outcome: str) -> None:
    verdict = judge(tmp_path, {"loaded": changed(*range(num_changed))})
    assert verdict.outcome == outcome
    is_said = any(
        "canary answers differ from the reference's path" in r for r in list_said(verdict) if "fail: path" in r
    )
    assert is_said == (outcome == "fail")


def test_a_floor_of_its_own_is_no_fault_of_the_candidate(tmp_path: Path) -> None:
    """In bfloat16 the batch alone flips some answers: as many more are no evidence against a draft."""
    noisy = {"alone": changed(*range(50, 56))}
    verdict = judge(tmp_path, {"loaded": changed(*range(6)), "again": changed(*range(6))}, floor=noisy)
    assert verdict.outcome == "pass" and verdict.canary is not None
    assert (verdict.canary.floor, verdict.canary.num_diverged) == (6, 6)


@pytest.mark.parametrize("answers", [{"loaded": changed(4)}, {"alone": changed(4)}], ids=["deployed", "alone"])
def test_where_exactness_is_asked_for_one_answer_fails(tmp_path: Path, answers: dict[str, Any]) -> None:
    verdict = judge(tmp_path, answers, exact=True)
    assert verdict.outcome == "fail"
    assert any("exact is asked for, and answers changed" in r for r in list_said(verdict))


def test_other_weights_may_answer_otherwise(tmp_path: Path) -> None:
    verdict = judge(tmp_path, dict.fromkeys(("alone", "loaded", "again"), changed(*range(40))), same_weights=False)
    assert verdict.outcome == "pass" and verdict.canary is not None and not verdict.canary.is_same_weights


def test_other_weights_with_drafts_are_compared_with_themselves_without(tmp_path: Path) -> None:
    plain = {"plain alone": changed(), "plain loaded": changed()}
    verdict = judge(tmp_path, {"loaded": changed(*range(10)), **plain}, same_weights=False)
    assert verdict.outcome == "fail" and verdict.canary is not None
    assert verdict.canary.baseline == "its own path without drafts"


def test_a_flip_is_shown_with_its_kind_its_token_and_its_margin(tmp_path: Path) -> None:
    canary = judge(tmp_path, {"loaded": {3: WRONG}}).canary
    assert canary is not None
    assert canary.kinds == {"argument value": 1}
    (flip,) = canary.flips
    assert (flip.case_id, flip.token, flip.margin) == ("calls/3", 1, 0.05)
    assert (canary.num_tokens, canary.num_tokens_at_risk) == (300, 0), "in float32 a margin of 0.05 nat is safe"
    assert canary.session_rate == pytest.approx(1 - 0.99**5)


def test_a_canary_that_would_notice_nothing_proves_no_pass(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {}, num_prompts=8)
    assert verdict.outcome == "inconclusive"
    assert any("inconclusive: canary: 8 prompts with a floor of 0 notice a path" in r for r in list_said(verdict))


def test_a_path_that_breaks_under_load_fails_whatever_its_weights(tmp_path: Path) -> None:
    verdict = judge(tmp_path, {"alone": changed(*range(40))}, same_weights=False)
    assert verdict.outcome == "fail"
    assert any("40 of 100 canary answers differ between its own runs" in r for r in list_said(verdict))


def test_drafts_are_also_compared_with_the_same_server_without_them(tmp_path: Path) -> None:
    plain = {"plain alone": changed(*range(40)), "plain loaded": changed(*range(40))}
    verdict = judge(tmp_path, plain)
    assert verdict.outcome == "fail" and verdict.canary is not None
    assert verdict.canary.baseline == "its own path without drafts"


def test_where_one_side_has_no_token_ids_texts_are_compared(tmp_path: Path) -> None:
    ids, text = CanaryAnswer(text=CALL, token_ids=(1, 2)), CanaryAnswer(text=CALL)
    assert ids.is_same(text) and text.is_same(ids)
    assert not ids.is_same(CanaryAnswer(text=CALL, token_ids=(1, 3))), "two tokens may spell one text"


def forget(folder: Path) -> None:
    path = folder / "evaluation.json"
    write_record(path, read_record(path, Evaluation).model_copy(update={"canary": None}))


def edit(folder: Path) -> None:
    write_text(folder / "canary.jsonl", (folder / "canary.jsonl").read_text().replace("bay-1", "bay-3", 1))


def ask_others(folder: Path) -> None:
    path = folder / "evaluation.json"
    canary = write_canary(folder, {}, num_prompts=9)
    write_record(path, read_record(path, Evaluation).model_copy(update={"canary": canary}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (forget, "expected a canary, as workflows generates text, found none"),
        (edit, "expected the canary as it was written, found another"),
        (ask_others, "canary of the candidate: expected 100 prompts, as params.yaml asks, got 9"),
    ],
)
def test_a_canary_that_is_not_fit_is_refused(tmp_path: Path, spoil: Any, said: str) -> None:
    build = tmp_path / "build"
    write_tree(build, {"a": Behaviour()}, num_cases=400)
    spoil(build / "evaluations/a")
    verdict = compare_release(make_params(["a"], ["a"]), build).judgement.verdicts[0]
    assert verdict.outcome == "refused" and any(said in reason for reason in list_said(verdict)), list_said(verdict)


def test_other_hardware_on_the_two_sides_is_refused(tmp_path: Path) -> None:
    build = tmp_path / "build"
    write_tree(build, {"a": Behaviour()}, num_cases=400)
    for name, device in (("reference", "cpu x86_64"), ("a", "NVIDIA L4")):
        path = build / "evaluations" / name / "evaluation.json"
        evaluation = read_record(path, Evaluation)
        facts = evaluation.served_by | {"hardware": {"device": device}}
        write_record(path, evaluation.model_copy(update={"served_by": facts}))
    reasons = list_said(compare_release(make_params(["a"], ["a"]), build).judgement.verdicts[0])
    assert any("fingerprint: expected" in reason for reason in reasons), "facts are sealed by the fingerprint"


def test_mlflow_shows_what_the_path_changed_and_what_drafts_came_to(tmp_path: Path) -> None:
    build = tmp_path / "build"
    write_tree(build, {"a": Behaviour()}, num_cases=60)
    path = build / "evaluations/a/evaluation.json"
    counts = SpeculationCounts(
        method="draft_model",
        num_tokens=2,
        num_target_forwards=100,
        num_completion_tokens=230,
        num_drafted=200,
        accepted_by_position=(80, 50),
    )
    canary = write_canary(path.parent, {"loaded": changed(1, 2, 3)})
    update = {"speculation": counts, "canary": canary}
    write_record(path, read_record(path, Evaluation).model_copy(update=update))
    _, run = build_runs(compare_release(make_params(["a"], ["a"]), build).judgement, build)
    shown = {name.removeprefix("path/"): value for name, value in run.metrics.items() if name.startswith("path/")}
    assert shown == {
        "canary_diverged_percent": 3.0,
        "acceptance_percent": 65.0,
        "acceptance_length": 1.3,
        "target_forwards_per_token": pytest.approx(100 / 230),
    }
