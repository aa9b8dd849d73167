"""A gain beyond the tolerance that somebody accepts, with a reason: it passes, and every form prints the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.errors import EvidenceError
from pipeline.gate.checks import check_outcomes
from pipeline.gate.loosening import list_loosened
from pipeline.gate.verdicts import GatedTolerance, Judgement, build_policy
from pipeline.products.text.settings import TextProduct
from pipeline.records.record_files import read_record
from pipeline.report.explain import explain_release
from pipeline.report.github import render_summary
from pipeline.report.terminal import render_gate
from pipeline.settings.base import Tolerance
from tests.fakes.judging import compare_release, list_said, render_report
from tests.fakes.outcome_tables import run, write_outcomes
from tests.fakes.synthetic_records import Behaviour, make_params, write_tree

WHY = "the reference's template cut answers off = fixed since"
SHOWN = "gain accepted: outcomes/score: better by 25.00 points, more than the tolerance of 3 points: " + WHY


@pytest.fixture
def sides(tmp_path: Path) -> list[Path]:
    return [
        write_outcomes(tmp_path / f"{side}.csv", [0.0] * wrong + [1.0] * (400 - wrong))
        for side, wrong in (("a", 100), ("b", 0))
    ]


@pytest.mark.parametrize("name", ["score", "outcomes/score"])
def test_an_accepted_gain_passes_and_its_reason_is_printed(
    sides: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run("compare", *sides, capsys=capsys)[0] == 10  # without a reason it stays suspicious
    forms = {form: tmp_path / form for form in ("json", "html", "junit", "summary")}
    asked = [word for form, path in forms.items() for word in (f"--{form}", path)]
    code, said = run("compare", *sides, "--accept-gain", f"{name}={WHY}", *asked, capsys=capsys)
    assert code == 0 and said.count(SHOWN) == 1 and "suspicious" not in said, said
    verdict = read_record(forms["json"], Judgement).verdicts[0]
    assert verdict.outcome == "pass" and f"note: {SHOWN}" in list_said(verdict)
    assert SHOWN in forms["summary"].read_text().replace("\\", "")
    assert "gain accepted" in forms["html"].read_text()
    assert "proven: a gain of at least 21" in verdict.comparisons[0].sentence  # it spoke of a negative loss


@pytest.mark.parametrize(("lost", "code", "kind"), [(0, 10, "inconclusive"), (200, 20, "note")])
def test_a_suspicious_gain_is_listed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: int, code: int, kind: str
) -> None:
    """It decided, and was a note as well: the reasons had its sentence twice. Beside what fails it is a note alone."""
    sides = [
        write_outcomes(tmp_path / f"{side}.csv", [0.0] * wrong + [1.0] * (400 - wrong), other=other)
        for side, wrong, other in (("a", 100, ["1"] * 400), ("b", 0, ["0"] * lost + ["1"] * (400 - lost)))
    ]
    forms = {form: tmp_path / form for form in ("json", "html", "summary")}
    asked = [word for form, path in forms.items() for word in (f"--{form}", path)]
    found, said = run("compare", *sides, "--metric", "score", "--metric", "other", *asked, capsys=capsys)
    assert found == code and said.count("suspicious gain") == 1, said
    verdict = read_record(forms["json"], Judgement).verdicts[0]
    (gain,) = (c for c in verdict.comparisons if c.sentence.startswith("suspicious gain"))
    said_of_it = [line for line in list_said(verdict) if "suspicious gain" in line]
    assert said_of_it == [f"{kind}: outcomes/score: {gain.sentence}"]
    assert forms["summary"].read_text().count("suspicious gain") == 1
    assert "note: outcomes/score: suspicious gain" not in forms["html"].read_text()  # it stands in its own row


def test_a_policy_accepts_a_gain(sides: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = {
        "alpha": 0.05,
        "on_inconclusive": "block",
        "tolerances": {"outcomes/score": {"overall": 0.03, "accept_gain": WHY}},
    }
    (tmp_path / "policy.yaml").write_text(json.dumps({"gate": gate}))
    code, said = run("compare", *sides, "--policy", tmp_path / "policy.yaml", capsys=capsys)
    assert code == 0 and SHOWN in said
    code, said = run(
        "compare", *sides, "--policy", tmp_path / "policy.yaml", "--accept-gain", f"score={WHY}", capsys=capsys
    )
    assert code == 1 and "expected no accept_gain beside it" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("score", "--accept-gain: expected NAME=REASON, got 'score'"),
        ("score=", "--accept-gain score: expected a reason, a sentence of 10 characters or more, got ''"),
        ("score=          ", "expected a reason"),
        ("score=because", "expected a reason"),
        ("scroe=" + WHY, "--accept-gain scroe: no such metric is gated; those that are: outcomes/score"),
    ],
)
def test_a_gain_is_not_accepted_without_a_reason_or_of_another_metric(
    sides: list[Path], capsys: pytest.CaptureFixture[str], given: str, said: str
) -> None:
    code, text = run("compare", *sides, "--accept-gain", given, capsys=capsys)
    assert code == 1 and said in text, text


@pytest.mark.parametrize("why", ["", "   ", "          ", "because", None])
def test_a_setting_without_a_reason_accepts_nothing(why: str | None) -> None:
    if why is None:
        assert Tolerance(overall=0.1, accept_gain=None).accept_gain is None
    else:
        with pytest.raises(ValidationError, match="accept_gain"):
            Tolerance(overall=0.1, accept_gain=why)


def test_an_accepted_gain_excuses_no_loss_and_no_other_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["hard"] * 200 + ["easy"] * 800
    ours = write_outcomes(
        tmp_path / "a.csv", [1.0] * 200 + [0.0] * 400 + [1.0] * 400, buckets=where, other=["0"] * 500 + ["1"] * 500
    )
    theirs = write_outcomes(tmp_path / "b.csv", [0.0] * 100 + [1.0] * 900, buckets=where, other=["1"] * 1000)
    options = ["--metric", "score", "--bucket", "hard=0.05", "--accept-gain", f"score={WHY}"]
    code, said = run("compare", *[ours, theirs], *options, capsys=capsys)
    assert code == 20 and "outcomes/score [hard]" in said and "gain accepted: outcomes/score: " in said, said
    code, said = run(
        "compare",
        ours,
        theirs,
        "--metric",
        "score",
        "--metric",
        "other",
        "--accept-gain",
        f"score={WHY}",
        capsys=capsys,
    )
    assert code == 10 and "gain accepted: outcomes/score: " in said and "suspicious gain" in said, said


def test_a_gain_on_too_few_clusters_is_not_proven_by_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [write_outcomes(tmp_path / f"{side}.csv", [score] * 15 + [1.0] * 5) for side, score in (("a", 0), ("b", 1))]
    assert run("compare", *sides, "--accept-gain", f"score={WHY}", capsys=capsys)[0] == 10


def accept(params: TextProduct, why: str | None) -> TextProduct:
    metric = "workflows/task_completion_rate"
    tolerances = params.gate.tolerances | {
        metric: params.gate.tolerances[metric].model_copy(update={"accept_gain": why})
    }
    return params.model_copy(update={"gate": params.gate.model_copy(update={"tolerances": tolerances})})


def test_the_report_and_the_terminal_of_a_project_print_it(tmp_path: Path) -> None:
    write_tree(tmp_path / "build", {"better": Behaviour(gain={"workflows": 0.5})})
    params = make_params(["better"], ["better"], on_inconclusive="block")
    without = compare_release(params, tmp_path / "build").judgement
    assert without.verdicts[0].outcome == "inconclusive"
    compared = compare_release(accept(params, WHY), tmp_path / "build")
    judgement = compared.judgement
    assert judgement.verdicts[0].outcome == "pass" and judgement.outcome == "pass"
    shown = "gain accepted: workflows/task_completion_rate: better by "
    for text in (render_report(compared), render_gate(judgement), render_summary(judgement, explain_release(compared))):
        text = text.replace("\\", "")
        assert shown in text and WHY in text
    check_outcomes(judgement)
    edited = [
        c.model_copy(update={"outcome": "inconclusive"})
        if c.metric == "workflows/task_completion_rate" and c.bucket is None
        else c
        for c in judgement.verdicts[0].comparisons
    ]
    verdict = judgement.verdicts[0].model_copy(update={"comparisons": tuple(edited), "outcome": "inconclusive"})
    with pytest.raises(EvidenceError, match="contradicts"):
        check_outcomes(judgement.model_copy(update={"verdicts": (verdict,)}))


def test_an_accepted_gain_carries_its_own_reason_and_needs_no_other() -> None:
    params = make_params(["better"], ["better"])
    last, now = build_policy(params), build_policy(accept(params, WHY))
    assert list(list_loosened(last, now)) == []


def test_a_policy_of_an_older_release_is_read() -> None:
    assert GatedTolerance.model_validate({"overall": 0.1, "buckets": {}, "tier": "critical"}).accept_gain is None
