"""DVC judges a product while others are worked on: what it is told, what is seen, and what is left to a later one.

A small program stands in the place of DVC.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EvidenceError
from pipeline.products import judging
from pipeline.products.judging import EarlyJudge
from pipeline.products.params import Params, load_params
from pipeline.products.prefetch_step import TURNS
from pipeline.running.environment import VISIBLE
from pipeline.running.progress_view import View
from pipeline.running.turns import have_machine_alone, share_machine
from tests.paths import ROOT

DUE = ["env", "optimize@int8", "evaluate@int8", "evaluate@agent", "compare@people", "gate@people", "compare@agent"]
DVC = """
import os, subprocess, sys, time
from pipeline.running.progress import begin_step, tell_cpu
print(*sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES", "all"), os.environ["QUANTGATE_WARNED"], flush=True)
begin_step("compare@people")
tell_cpu()
open("began", "w").close()
subprocess.run(["sleep", os.environ.get("DVC_SLEEP", "0")])
open("ended", "w").close()
code = int(os.environ.get("DVC_CODE", "0"))
sys.exit(code) if code >= 0 else os.kill(os.getpid(), -code)
"""


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(ROOT / "params.yaml")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Have the small program in place of DVC, and write down what it is to note; all of it can be."""
    (tmp_path / "dvc.py").write_text(DVC)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.chdir(tmp_path)
    names = list[Any]()

    def note(made: list[str], candidates: Any) -> list[str]:
        names.append(made)
        return made

    monkeypatch.setattr(judging, "note_made", note)
    return names


def judge(params: Params, due: list[str] = DUE, *, gpus: str | None = None) -> tuple[EarlyJudge, View]:
    """Judge the detector, in a phase of two steps."""
    people = params.products["people"]
    with View(Path("facts")) as view:
        early = EarlyJudge(view, due)
        steps = early.list_steps(people)
        phase = view.plan("candidates", ["evaluate@int8", *steps], num_jobs=2, of_dvc=steps)
        with view.open_phase(phase):
            phase.begin("evaluate@int8")
            phase.end("evaluate@int8")
            early.judge(people, gpus)
            assert not phase.waiting and not phase.running
    return early, view


def test_dvc_notes_the_candidates_and_runs_what_is_out_of_date_of_the_product(
    params: Params, noted: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    early, view = judge(params, gpus="1")
    assert noted == [["optimize@int8", "evaluate@int8"]]
    assert list(early.steps) == ["compare@people"] and not early.failed
    assert early.noted == noted[0], "nobody digests their weights once more"
    said = capfd.readouterr()
    assert said.out == "people: --wait-for-lock repro --quiet --single-item compare@people gate@people 1 1\n"
    assert "people: passed its gate: winograd-calibrated (reports/people/report.md" in said.err
    [phase] = view._phases
    assert phase.steps["compare@people"].outcome == "done" and phase.steps["compare@people"].cpu_s > 0


@pytest.mark.parametrize("code", ["255", "-9"])
def test_what_stops_a_product_is_said_at_once(
    params: Params, noted: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """That it was the gate, the last DVC says: a stage that ended well may be the last that had begun."""
    monkeypatch.setenv("DVC_CODE", code)
    early, view = judge(params)
    assert early.failed == ["people"] and not early.steps
    shown = capfd.readouterr()
    assert shown.out.endswith("gate@people all 1\n"), "without a share it sees all GPUs"
    assert "people: stopped, as said above; the others go on, and it is tried again after them" in shown.err
    assert view._phases[0].steps["compare@people"].outcome == "failed"


@pytest.mark.parametrize("how", ["in part", "not at all", "code in the making"])
def test_what_dvc_can_t_note_is_left_to_a_later_one(
    params: Params, noted: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def note(made: list[str], candidates: Any) -> list[str]:
        if how == "not at all":
            raise EvidenceError("another DVC works here")
        if how == "code in the making":
            raise SyntaxError("another DVC works here")
        return made[:-1]

    monkeypatch.setattr(judging, "note_made", note)
    early, _ = judge(params)
    assert not early.steps and not early.failed
    said = capfd.readouterr()
    assert not said.out and ("people: another DVC works here" in said.err) is (how != "in part")


def test_a_candidate_that_dvc_restored_is_not_noted_and_keeps_nobody_waiting(
    params: Params, noted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "note_made", lambda made, candidates: ["evaluate@int8"])
    early, _ = judge(params)
    assert early.steps


def test_a_product_of_servers_waits_and_so_does_one_without_new_candidates(params: Params, tmp_path: Path) -> None:
    with View(tmp_path / "facts") as view:
        early = EarlyJudge(view, [*DUE, "compare@upscaler"])
    assert {name: early.list_steps(product) for name, product in params.products.items()} == {
        "agent": [],
        "shots": [],
        "people": ["compare@people", "gate@people"],
        "upscaler": [],
    }


def test_whoever_wants_the_machine_alone_waits_for_it(
    params: Params, noted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a step would be timed beside the bootstrap of another product."""
    monkeypatch.setenv("DVC_SLEEP", "0.5")
    thread = threading.Thread(target=judge, args=(params,))
    thread.start()
    while not Path("began").exists():
        time.sleep(0.01)
    with share_machine(TURNS), have_machine_alone():
        assert Path("ended").exists(), "it was still at work"
    thread.join()


def test_ended_it_takes_the_stage_of_dvc_along_and_begins_nothing_more(
    params: Params, noted: list[Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stage that went on by itself would write a verdict into the next run."""
    monkeypatch.setenv("DVC_SLEEP", "600")
    people = params.products["people"]
    with View(Path("facts")) as view:
        early = EarlyJudge(view, DUE)
        with view.open_phase(view.plan("candidates", [])):
            thread = threading.Thread(target=early.judge, args=(people, None))
            thread.start()
            while not Path("began").exists():
                time.sleep(0.01)
            early.end()
            thread.join(60)
            assert not thread.is_alive() and not Path("ended").exists()
            Path("began").unlink()
            early.judge(people, None)
    assert not Path("began").exists() and not early.failed and not early.steps
    assert "people: " not in capfd.readouterr().err.replace("progress: people: ", "")
    assert view._phases[0].steps["compare@people"].outcome == "interrupted"
