"""The stages compare and gate: exit codes, the marker of a pass, and what a person reads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stages.compare
import stages.gate
from pipeline.errors import EvidenceError, SettingsError
from pipeline.gate.verdicts import Judgement
from pipeline.products.params import Params
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.step_settings import SpeculativeStep
from pipeline.records.digests import digest_checkpoint, digest_file
from pipeline.records.evaluations import BuiltCandidate, Evaluation
from pipeline.records.files import write_text
from pipeline.records.fingerprints import fingerprint
from pipeline.records.record_files import read_record, write_record
from pipeline.records.speculation import SpeculativeConfig
from pipeline.records.verdicts import Comparison, Verdict
from pipeline.report.explanation_records import Explanation
from tests.fakes.judging import compare_release
from tests.fakes.release_project import BUILD, BUNDLE
from tests.fakes.release_project import VERDICT as VERDICT_PATH
from tests.fakes.synthetic_records import (
    PRODUCT,
    WEIGHTS,
    Behaviour,
    make_params,
    rewrite_records,
    write_tree,
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Judgement]:
    """A folder with a judged release: one candidate that passes, one that fails."""
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / BUILD, {"good": Behaviour(), "bad": Behaviour({"workflows": 0.2})})

    def judge(*release: str, **gate: Any) -> Judgement:
        product = make_params(["good", "bad"], release, **gate)
        monkeypatch.setattr(stages.gate, "load_params", lambda: Params({PRODUCT: product}))
        compared = compare_release(product, tmp_path / BUILD)
        write_record(VERDICT_PATH, compared.judgement)
        return compared.judgement

    return judge


def run_gate() -> tuple[int, Path]:
    return stages.gate.main([PRODUCT]), BUILD / stages.gate.MARKER


def test_gate_passes_and_writes_its_marker(
    project: Callable[..., Judgement], capsys: pytest.CaptureFixture[str]
) -> None:
    project("good")
    code, marker = run_gate()
    assert code == 0
    written = json.loads(marker.read_text())
    assert written["verdict_sha256"] == digest_file(VERDICT_PATH)
    assert written["release"]["good"]["outcome"] == "pass"
    assert "PASS" in capsys.readouterr().out


def test_gate_blocks_names_the_cause_and_removes_a_stale_marker(
    project: Callable[..., Judgement], capsys: pytest.CaptureFixture[str]
) -> None:
    project("good")
    run_gate()
    project("good", "bad")
    code, marker = run_gate()
    said = capsys.readouterr().out
    assert code == 1 and not marker.exists()
    assert "workflows/task_completion_rate" in said and "of n 400" in said and "reports/agent/report.md" in said


@pytest.mark.parametrize(("policy", "code"), [("warn", 0), ("block", 1)])
def test_policy_decides_what_inconclusive_does(project: Callable[..., Judgement], policy: str, code: int) -> None:
    tight = {"workflows/task_completion_rate": {"overall": 0.0001}}
    judgement = project("good", on_inconclusive=policy, tolerances=tight)
    assert judgement.verdicts[0].outcome == "inconclusive"
    code_seen, marker = run_gate()
    assert code_seen == code
    assert code or json.loads(marker.read_text())["release"]["good"]["outcome"] == "inconclusive"


def test_warn_lets_no_loss_through_that_was_seen_beyond_its_tolerance(
    project: Callable[..., Judgement], tmp_path: Path
) -> None:
    """Else a tiny alpha with `warn` lets anything pass, as nothing is ever proven."""
    write_tree(tmp_path / "other", {"bad": Behaviour({"workflows": 0.08})}, num_cases=100)
    judgement = compare_release(
        make_params(["bad"], ["bad"], on_inconclusive="warn", alpha=0.001), tmp_path / "other"
    ).judgement
    assert judgement.verdicts[0].outcome == "inconclusive"
    assert judgement.verdicts[0].comparisons[0].harm > 0.02
    assert judgement.blocked_by == ("bad",)


TOLERANCES = {name: t.model_dump() for name, t in make_params(["good"], ["good"]).gate.tolerances.items()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"release": ["bad"]}, "release ['good'], params.yaml says ['bad']"),
        ({"gate": {"alpha": 0.1}}, "alpha 0.05, params.yaml says 0.1"),
        (
            {"gate": {"tolerances": TOLERANCES | {"calls/tool_call_exact_match": {"overall": 0.3}}}},
            "tolerances.calls/tool_call_exact_match.overall 0.02, params.yaml says 0.3",
        ),
        (
            {"gate": {"tolerances": {"prose/perplexity_per_token": {"overall": 0.02}}}},
            "tolerances.workflows/task_completion_rate {'overall': 0.02, 'buckets': {'constraint_retention': 0.06}, "
            "'tier': 'critical', 'accept_gain': None}, params.yaml says nothing",
        ),
        (
            {"gate": {"tolerances": TOLERANCES | {"choices/accuracy": {"overall": 0.03, "buckets": {"easy": 0.1}}}}},
            "tolerances.choices/accuracy.buckets.easy nothing, params.yaml says 0.1",
        ),
        ({"gate": {"on_inconclusive": "block"}}, "on_inconclusive 'warn', params.yaml says 'block'"),
    ],
)
def test_gate_refuses_a_judgement_under_other_settings(
    project: Callable[..., Judgement], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], named: str
) -> None:
    """A verdict.json from a laxer params.yaml must not let a release through."""
    project("good")
    asked = make_params(["good", "bad"], change.get("release", ["good"]), **change.get("gate", {}))
    monkeypatch.setattr(stages.gate, "load_params", lambda: Params({PRODUCT: asked}))
    with pytest.raises(EvidenceError) as caught:
        run_gate()
    assert str(caught.value) == f"{VERDICT_PATH}: judged with {named}; run `dvc repro` to judge again"


def test_gate_refuses_weights_that_were_swapped_under_their_record(
    project: Callable[..., Judgement], tmp_path: Path
) -> None:
    project("good")
    (tmp_path / BUILD / "candidates/good/checkpoint" / WEIGHTS).write_text("other weights")
    remedy = r"remove .*candidates/good and run `dvc repro` so that it is built"  # DVC may not see the change
    with pytest.raises(EvidenceError, match=f"expected the checkpoint that was judged.*found other files.*{remedy}"):
        run_gate()


def test_gate_refuses_a_draft_model_that_was_swapped_under_its_record(
    project: Callable[..., Judgement], tmp_path: Path
) -> None:
    judgement = project("good")
    draft = tmp_path / "draft/model.safetensors"
    write_text(draft, "draft")
    path = tmp_path / BUILD / "candidates/good/candidate.json"
    speculative = SpeculativeConfig(
        method="draft_model", num_tokens=2, draft_path="draft", draft_digest=digest_checkpoint(draft.parent)
    )
    write_record(path, read_record(path, BuiltCandidate).model_copy(update={"speculative": speculative}))
    product = stages.gate.load_params().products[PRODUCT]
    assert isinstance(product, TextProduct)
    after = read_candidate(tmp_path / BUILD, "good", product)
    judged = [
        v.model_copy(update={"facts": after.facts, "fingerprint": after.fingerprint}) if v.candidate == "good" else v
        for v in judgement.verdicts
    ]
    write_record(VERDICT_PATH, judgement.model_copy(update={"verdicts": tuple(judged)}))
    assert run_gate()[0] == 0
    draft.write_text("another draft")
    with pytest.raises(EvidenceError, match="draft: expected the checkpoint that was judged.*found other files"):
        run_gate()


def test_gate_refuses_a_judgement_under_another_min_acceptance(
    project: Callable[..., Judgement], monkeypatch: pytest.MonkeyPatch
) -> None:
    project("good")
    asked = stages.gate.load_params().products[PRODUCT]
    step = SpeculativeStep(kind="speculative", method="prompt_lookup", num_speculative_tokens=2, min_acceptance=0.5)
    good = asked.candidates["good"].model_copy(update={"steps": [step]})
    asked = asked.model_copy(update={"candidates": asked.candidates | {"good": good}})
    monkeypatch.setattr(stages.gate, "load_params", lambda: Params({PRODUCT: asked}))
    with pytest.raises(EvidenceError, match="judged with min_acceptance.good nothing, params.yaml says 0.5"):
        run_gate()


def test_gate_refuses_a_pass_that_its_own_numbers_contradict(project: Callable[..., Judgement]) -> None:
    judgement = project("bad")
    bad = next(v for v in judgement.verdicts if v.candidate == "bad")
    edited = tuple(bad.model_copy(update={"outcome": "pass"}) if v is bad else v for v in judgement.verdicts)
    write_record(VERDICT_PATH, judgement.model_copy(update={"verdicts": edited, "outcome": "pass", "blocked_by": ()}))
    with pytest.raises(EvidenceError, match="bad: the verdict contradicts the numbers or the policy beside it"):
        run_gate()


def forge(change: Callable[[Comparison], dict[str, Any]]) -> Callable[[Verdict], Verdict]:
    """Return an edit of a verdict that makes each failing comparison pass in one way."""

    def edit(verdict: Verdict) -> Verdict:
        comparisons = [
            c.model_copy(update=change(c)) if c.outcome in ("fail", "inconclusive") else c for c in verdict.comparisons
        ]
        return verdict.model_copy(update={"outcome": "pass", "reasons": (), "comparisons": tuple(comparisons)})

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(
            lambda v: v.model_copy(
                update={
                    "outcome": "pass",
                    "reasons": (),
                    "comparisons": tuple(c for c in v.comparisons if c.outcome not in ("fail", "inconclusive")),
                }
            ),
            id="deleted",
        ),
        pytest.param(forge(lambda c: {"tolerance": 0.9, "outcome": "pass"}), id="another-tolerance"),
        pytest.param(forge(lambda c: {"tolerance": None, "outcome": "reported"}), id="not-gated"),
        pytest.param(forge(lambda c: {"high": 0.0, "outcome": "pass"}), id="bound-below-the-harm"),
        pytest.param(
            forge(lambda c: {"low": -1.0, "harm": 0.0, "high": 0.0, "outcome": "pass"}), id="harm-without-flips"
        ),
    ],
)
def test_gate_refuses_a_verdict_that_was_edited_into_a_pass(
    project: Callable[..., Judgement], edit: Callable[[Verdict], Verdict]
) -> None:
    judgement = project("bad")
    verdicts = tuple(edit(v) if v.candidate == "bad" else v for v in judgement.verdicts)
    write_record(VERDICT_PATH, judgement.model_copy(update={"verdicts": verdicts, "outcome": "pass", "blocked_by": ()}))
    with pytest.raises(EvidenceError, match="bad: .* contradicts the numbers or the policy beside it"):
        run_gate()


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"canary": None}, id="no-canary"),
        pytest.param({"facts": {}, "fingerprint": fingerprint({})}, id="no-facts"),
    ],
)
def test_gate_refuses_a_pass_without_what_it_must_rest_on(
    project: Callable[..., Judgement], edit: dict[str, Any]
) -> None:
    judgement = project("good")
    verdicts = tuple(v.model_copy(update=edit) if v.candidate == "good" else v for v in judgement.verdicts)
    write_record(VERDICT_PATH, judgement.model_copy(update={"verdicts": verdicts}))
    with pytest.raises(EvidenceError, match="good: .*(contradicts the numbers|expected facts about checkpoint)"):
        run_gate()


def test_a_bound_below_the_tolerance_on_few_clusters_is_no_forgery(
    project: Callable[..., Judgement], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gate once called an honest run edited when 25 documents bounded a loss."""
    for name in ("reference", "good", "bad"):
        rewrite_records(tmp_path / BUILD, name, "prose", lambda records: records[:25])
    judgement = project(
        "good", on_inconclusive="warn", tolerances=TOLERANCES | {"prose/perplexity_per_token": {"overall": 0.05}}
    )
    prose = next(c for c in judgement.verdicts[0].comparisons if c.metric == "prose/perplexity_per_token")
    assert prose.high <= 0.05 and prose.outcome == "inconclusive"
    assert run_gate()[0] == 0
    assert "too few to bound a loss" in capsys.readouterr().out


def test_gate_refuses_a_record_that_points_at_other_weights(project: Callable[..., Judgement], tmp_path: Path) -> None:
    project("good")
    path = tmp_path / BUILD / "candidates/good/candidate.json"
    shutil.copytree(path.with_name("checkpoint"), tmp_path / "elsewhere")
    path.with_name("checkpoint").joinpath(WEIGHTS).write_text("bad weights")
    built = read_record(path, BuiltCandidate)
    checkpoint = built.checkpoint.model_copy(update={"path": "elsewhere"})
    write_record(path, built.model_copy(update={"checkpoint": checkpoint}))
    with pytest.raises(EvidenceError, match="expected the checkpoint 'build/agent/candidates/good/checkpoint'"):
        run_gate()


def test_gate_says_which_evals_nothing_gates(
    project: Callable[..., Judgement], capsys: pytest.CaptureFixture[str]
) -> None:
    project("good", tolerances={"calls/tool_call_exact_match": {"overall": 0.02}}, tripwires={})
    run_gate()
    assert "not gated, as no tolerance is set: workflows, choices, prose" in capsys.readouterr().out


def test_gate_refuses_a_candidate_rebuilt_after_it_was_judged(
    project: Callable[..., Judgement], tmp_path: Path
) -> None:
    project("good")
    path = tmp_path / BUILD / "candidates/good/candidate.json"
    built = read_record(path, BuiltCandidate)
    write_record(path, built.model_copy(update={"libraries": {"torch": "3"}}))
    with pytest.raises(EvidenceError, match="libraries.torch: judged with .2.13.0., what would ship has .3."):
        run_gate()


def test_gate_refuses_when_the_judged_candidate_is_gone(project: Callable[..., Judgement], tmp_path: Path) -> None:
    """DVC takes a candidate away when making it again failed: the old verdict must not let it ship."""
    project("good")
    shutil.rmtree(tmp_path / BUILD / "candidates/good")
    with pytest.raises(EvidenceError, match="expected the candidate that was judged.*found none"):
        run_gate()


def test_gate_refuses_other_cases_than_at_the_last_release(project: Callable[..., Judgement], tmp_path: Path) -> None:
    """The cases of a suite may be made easier in place: no setting moves."""
    judgement = project("good")
    evaluation = read_record(tmp_path / BUILD / "evaluations/reference/evaluation.json", Evaluation)
    manifest = {
        "policy": judgement.policy.model_dump(mode="json"),
        "evalsets": {"workflows": {"digest": "0" * 64}},
        "reference": {"weights_digest": evaluation.checkpoint_digest},
    }
    write_text(tmp_path / BUNDLE / "manifest.json", json.dumps(manifest))
    with pytest.raises(SettingsError, match="expected 'evals.workflows.cases' with a reason, as it was 000000000000"):
        run_gate()


def test_gate_works_in_a_clone_without_build_and_refuses_without_a_verdict(
    project: Callable[..., Judgement], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project("bad")
    shutil.rmtree(tmp_path / "build")
    assert run_gate()[0] == 1
    assert "build/agent/candidates is not here" in capsys.readouterr().out
    VERDICT_PATH.unlink()
    with pytest.raises(EvidenceError, match="found no file"):
        run_gate()


def test_a_released_name_without_verdict_is_refused(project: Callable[..., Judgement]) -> None:
    judgement = project("good", "bad")
    write_record(VERDICT_PATH, judgement.model_copy(update={"verdicts": judgement.verdicts[:1]}))
    with pytest.raises(EvidenceError, match="no verdict"):
        run_gate()


def test_gate_imports_neither_numpy_nor_plots() -> None:
    code = "import sys, stages.gate; sys.exit(any(m in sys.modules for m in ('numpy', 'scipy', 'matplotlib', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_compare_stage_writes_everything_twice_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tree(tmp_path / BUILD, {"good": Behaviour(), "bad": Behaviour({"workflows": 0.2, "prose": 0.0})})
    monkeypatch.chdir(tmp_path)
    product = make_params(["good", "bad"], ["good"])
    monkeypatch.setattr(stages.compare, "load_params", lambda: Params({PRODUCT: product}))
    (tmp_path / "metrics/agent").mkdir(parents=True)
    (tmp_path / "metrics/agent/gone.json").write_text("{}")  # of a candidate that is no more
    assert stages.compare.main([PRODUCT]) == 0
    reports = ("verdict.json", "report.md", "harm.png", "completion.png")
    names = [
        *(f"reports/agent/{name}" for name in reports),
        *(f"metrics/agent/{name}.json" for name in ("reference", "good", "bad")),
    ]
    assert sorted(p.name for p in (tmp_path / "metrics/agent").iterdir()) == ["bad.json", "good.json", "reference.json"]
    first = {name: digest_file(tmp_path / name) for name in names}
    stages.compare.main([PRODUCT])
    assert first == {name: digest_file(tmp_path / name) for name in names}
    tree = json.loads((tmp_path / "metrics/agent/good.json").read_text())
    assert tree["workflows"]["task_completion_rate by bucket"]["constraint_retention"] > 0.5
    assert "null" not in (tmp_path / "metrics/agent/good.json").read_text()
    assert read_record(VERDICT_PATH, Judgement).verdicts[1].outcome == "fail"


def test_github_is_told_where_its_runner_says_so(
    project: Callable[..., Judgement],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Elsewhere a line that starts with "::" would be noise."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    project("good", "bad")
    run_gate()
    assert "::error" not in capsys.readouterr().out
    summary = tmp_path / "summary.md"
    for name, value in (
        ("GITHUB_ACTIONS", "true"),
        ("GITHUB_STEP_SUMMARY", str(summary)),
        ("GITHUB_WORKSPACE", str(tmp_path.parent)),
    ):
        monkeypatch.setenv(name, value)
    write_text(
        Path("params.yaml"),
        "products:\n  agent:\n    gate:\n      tolerances: {workflows/task_completion_rate: {overall: 0.02}}\n",
    )
    write_record(VERDICT_PATH.with_name("explanation.json"), Explanation(candidates=()))
    summary.write_text("from another step\n")
    assert run_gate()[0] == 1
    said = capsys.readouterr().out
    assert f"::error file={tmp_path.name}/params.yaml,line=4,title=bad%3A fail::workflows/task_completion_rate" in said
    written = summary.read_text()
    assert written.startswith("from another step\n## Gate: agent\n") and "**Blocked** by `bad`" in written


def _drop_comparisons(verdict: dict[str, Any]) -> None:
    verdict["comparisons"] = []


def _drop_what_failed(verdict: dict[str, Any]) -> None:
    verdict["comparisons"] = [c for c in verdict["comparisons"] if c["outcome"] != "fail"]


def _report_what_failed(verdict: dict[str, Any]) -> None:
    for comparison in verdict["comparisons"]:
        comparison["outcome"] = "reported" if comparison["outcome"] == "fail" else comparison["outcome"]


def _refuse(verdict: dict[str, Any]) -> None:
    verdict["reasons"] = ["refused: stale", "fail: path: x"]


@pytest.mark.parametrize(
    "edit", [lambda verdict: None, _drop_comparisons, _drop_what_failed, _report_what_failed, _refuse]
)
def test_gate_refuses_a_fail_that_was_edited_into_inconclusive(
    project: Callable[..., Judgement], edit: Callable[[dict[str, Any]], None]
) -> None:
    """With `warn`, and with supporting metrics, what is inconclusive may ship: it must be what the numbers say."""
    project("bad")
    judgement = json.loads(VERDICT_PATH.read_text())
    (bad,) = [verdict for verdict in judgement["verdicts"] if verdict["candidate"] == "bad"]
    bad["outcome"] = "inconclusive"
    edit(bad)
    VERDICT_PATH.write_text(json.dumps(judgement))
    with pytest.raises(EvidenceError, match="contradicts the numbers or the policy beside it"):
        run_gate()
    assert not (BUILD / stages.gate.MARKER).exists()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "expected the name of one product, got ''"),
        (["agent", "other"], "expected the name of one product, got 'agent other'"),
        (["other"], "products: expected agent, got 'other'"),
    ],
)
def test_gate_judges_no_product_that_was_not_named(
    project: Callable[..., Judgement], names: list[str], said: str
) -> None:
    project("good")
    with pytest.raises(SettingsError) as caught:
        stages.gate.main(names)
    assert str(caught.value) == said and not (BUILD / stages.gate.MARKER).exists()
