"""The stages compare and gate: exit codes, the marker of a pass, and what a person reads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

import stages.compare
import stages.gate
from pipeline.digests import digest_file
from pipeline.errors import EvidenceError
from pipeline.gate.compare import compare_release
from pipeline.gate.verdicts import VERDICT_PATH, Judgement
from pipeline.records import Candidate, read_record, write_record
from tests.synthetic_records import Behaviour, make_params, write_tree


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a judged release: one candidate that passes, one that fails."""
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "build", {"good": Behaviour(), "bad": Behaviour({"workflows": 0.2})})

    def judge(*release, **gate):
        compared = compare_release(make_params(["good", "bad"], release, **gate), tmp_path / "build")
        write_record(VERDICT_PATH, compared.judgement)
        return compared.judgement

    return judge


def run_gate():
    return stages.gate.main([]), stages.gate.MARKER


def test_gate_passes_and_writes_its_marker(project, capsys):
    project("good")
    code, marker = run_gate()
    assert code == 0
    assert json.loads(marker.read_text())["verdict_sha256"] == digest_file(VERDICT_PATH)
    assert "PASS" in capsys.readouterr().out


def test_gate_blocks_names_the_cause_and_removes_a_stale_marker(project, capsys):
    project("good")
    run_gate()
    project("good", "bad")
    code, marker = run_gate()
    said = capsys.readouterr().out
    assert code == 1 and not marker.exists()
    assert "workflows/task_completion_rate" in said and "of n 400" in said and "reports/report.md" in said


@pytest.mark.parametrize(("policy", "code"), [("warn", 0), ("block", 1)])
def test_policy_decides_what_inconclusive_does(project, policy, code):
    tight = {"workflows/task_completion_rate": {"overall": 0.0001}}
    judgement = project("good", on_inconclusive=policy, tolerances=tight)
    assert judgement.verdicts[0].outcome == "inconclusive"
    assert run_gate()[0] == code


def test_gate_refuses_a_candidate_rebuilt_after_it_was_judged(project, tmp_path):
    project("good")
    path = tmp_path / "build/candidates/good/candidate.json"
    candidate = read_record(path, Candidate)
    write_record(path, candidate.model_copy(update={"libraries": {"torch": "3"}}))
    with pytest.raises(EvidenceError, match="expected the candidate that was judged"):
        run_gate()


def test_gate_refuses_when_the_judged_candidate_is_gone(project, tmp_path):
    """DVC takes a candidate away when making it again failed: the old verdict must not let it ship."""
    project("good")
    shutil.rmtree(tmp_path / "build/candidates/good")
    with pytest.raises(EvidenceError, match="expected the candidate that was judged.*found none"):
        run_gate()


def test_a_reference_with_steps_is_refused_for_everybody(project, tmp_path):
    """Naming the damaged candidate as its own reference must not let it pass."""
    path = tmp_path / "build/candidates/reference/candidate.json"
    candidate = read_record(path, Candidate)
    write_record(path, candidate.model_copy(update={"steps": ({"kind": "gptq"},)}))
    judgement = project("reference", "good")
    assert {v.outcome for v in judgement.verdicts if v.is_release} == {"refused"}
    assert run_gate()[0] == 1


def test_gate_works_in_a_clone_without_build_and_refuses_without_a_verdict(project, tmp_path):
    project("bad")
    shutil.rmtree(tmp_path / "build")
    assert run_gate()[0] == 1
    VERDICT_PATH.unlink()
    with pytest.raises(EvidenceError, match="found no file"):
        run_gate()


def test_a_released_name_without_verdict_is_refused(project):
    judgement = project("good")
    write_record(VERDICT_PATH, judgement.model_copy(update={"release": ("good", "ghost")}))
    with pytest.raises(EvidenceError, match="no verdict"):
        run_gate()


def test_gate_imports_neither_numpy_nor_plots():
    code = "import sys, stages.gate; sys.exit(any(m in sys.modules for m in ('numpy', 'scipy', 'matplotlib', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_compare_stage_writes_everything_twice_alike(tmp_path, monkeypatch):
    write_tree(tmp_path / "build", {"good": Behaviour(), "bad": Behaviour({"workflows": 0.2, "prose": 0.0})})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages.compare, "load_params", lambda: make_params(["good", "bad"], ["good"]))
    assert stages.compare.main([]) == 0
    names = ["reports/verdict.json", "reports/report.md", "reports/harm.png", "reports/completion.png",
             "metrics/reference.json", "metrics/good.json", "metrics/bad.json"]
    first = {name: digest_file(tmp_path / name) for name in names}
    stages.compare.main([])
    assert first == {name: digest_file(tmp_path / name) for name in names}
    tree = json.loads((tmp_path / "metrics/good.json").read_text())
    assert tree["workflows"]["buckets"]["constraint_retention"]["task_completion_rate"] > 0.5
    assert "null" not in (tmp_path / "metrics/good.json").read_text()
    assert read_record(VERDICT_PATH, Judgement).verdicts[1].outcome == "fail"
