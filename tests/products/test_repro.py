"""`quantgate repro` without work: what DVC is asked to do, what is planned, and how it ends."""

from __future__ import annotations

import contextlib
import io
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pipeline.errors import QuantgateError, SettingsError
from pipeline.gate import compare
from pipeline.products import checking, judging, repro
from pipeline.products.inputs import WARNED
from pipeline.products.params import Params, load_params
from pipeline.products.prefetch import Share, choose_candidates
from pipeline.records.files import write_text
from pipeline.running.prefetched import Work
from pipeline.running.progress_view import View
from pipeline.running.run_state import Step
from pipeline.settings.base import Product
from stages import env
from tests.paths import ROOT

DUE = ["env", "optimize@people", "evaluate@people", "compare@people", "gate@people"]
WAITING = "--wait-for-lock repro"
DVC = """
import os, sys
from pipeline.running.progress import begin_step
assert os.environ["QUANTGATE_WARNED"], "warnings were said before all work"
for name in ("env", "gate@people"):
    begin_step(name)
print("Running", *sys.argv[1:], flush=True)
sys.exit(int(os.environ["DVC_CODE"]))
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Write down what is made ahead, and have a small program in place of DVC; the project is the shipped one."""
    params, made = load_params(ROOT / "params.yaml"), list[Any]()
    (tmp_path / "dvc.py").write_text(DVC)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("DVC_CODE", "0")
    monkeypatch.chdir(tmp_path)

    @contextlib.contextmanager
    def open_run(names: list[str], num_jobs: int | None) -> Iterator[Any]:
        console = Console(file=io.StringIO(), width=80)
        with View(tmp_path / "facts", console=console) as view:
            yield view, choose_candidates(params, names), Share(params, defaultdict(dict), num_jobs or 0, ())

    monkeypatch.setattr(repro, "load_params", lambda: params)
    monkeypatch.setattr(repro, "open_run", open_run)
    monkeypatch.setattr(repro, "list_due", lambda targets: DUE)
    monkeypatch.setattr(repro, "make_ahead", lambda view, candidates, share, judge: made.append(view.later))
    monkeypatch.setattr(judging, "digest_inputs_now", lambda work: "")
    monkeypatch.setattr(judging, "put_back", keep_optimised)
    monkeypatch.setattr(judging, "note_runs", lambda works: made.append([*works]))
    return made


def keep_optimised(work: Work, inputs: str) -> bool:
    """Say that a candidate was made, and not evaluated; both left something."""
    for folder in (work.seal.parent, work.folder):
        folder.mkdir(parents=True, exist_ok=True)
    work.seal.touch()
    return work.stage == "optimize"


def test_candidates_are_made_ahead_and_then_dvc_runs_to_the_release(
    asked: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert repro.repro(["people"], 2) == 0
    assert asked[0].num_unknown == 1, "people is judged in the first phase, if all of it can be noted"
    assert asked[1:] == [["optimize@people"]], "what is not whole is left to its stage"
    assert [path.name for path in Path("build/people/prefetched/optimize").iterdir()] == []
    assert sorted(path.name for path in Path("build/people/prefetched/evaluate").iterdir()) == ["people", "people.json"]
    shown = capfd.readouterr()
    assert shown.out.splitlines()[:-1] == [f"Running {WAITING} release@people"]
    assert "gate 0.0" in shown.err and "failed" not in shown.err


@pytest.mark.parametrize("code", [1, 255])
def test_the_exit_code_is_that_of_dvc_and_the_stage_at_work_is_named(
    asked: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """CI takes a failing gate from it."""
    monkeypatch.setenv("DVC_CODE", str(code))
    assert repro.repro([], 2) == code
    assert "failed: gate@people" in capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("judged", ["blocked", "refused"])
def test_the_verdict_that_stopped_a_run_stands_below_all_that_dvc_says(
    asked: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, judged: str
) -> None:
    """DVC's hints and the list of what ran had pushed it off the screen."""
    monkeypatch.setenv("DVC_CODE", "255")
    judgement = json.loads((ROOT / "reports/people/verdict.json").read_text())
    for verdict in judgement["verdicts"]:
        verdict["outcome"] = "fail" if judged == "blocked" else "pass"
    write_text(Path("reports/people/verdict.json"), json.dumps(judgement))
    assert repro.repro([], 2) == 255
    said = capfd.readouterr().out.split("people: stopped by its gate", 1)[1].splitlines()
    if judged == "blocked":
        assert "FAIL" in said[3] and "look closer:" in said and "reports/people/report.md" in "".join(said[-4:])
    else:
        assert said == [", as said above (reports/people/report.md)"], "no pass"
    assert "agent" not in "".join(said), "a gate that was not reached has no verdict"


@pytest.mark.parametrize("due", [["env"], ["env", "gate@people"], ["gate@people"], []])
def test_dvc_runs_where_any_stage_is_out_of_date(
    asked: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, due: list[str]
) -> None:
    monkeypatch.setattr(repro, "list_due", lambda targets: due)
    assert repro.repro(["people"], 2) == 0
    shown = capfd.readouterr()
    is_run = "gate@people" in due
    assert (f"Running {WAITING}" in shown.out, "nothing is out of date" in shown.err) == (is_run, not is_run)
    assert shown.out.splitlines()[-1].startswith(f"people: passed its gate{'' if is_run else ' before'}: ")


def test_the_verdicts_of_a_run_that_passes_are_its_last_lines(
    asked: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """DVC prints no verdict of a gate that it does not run again."""
    assert repro.repro([], 2) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[1] == "agent: passed its gate before: awq-long-g32 (reports/agent/report.md, build/agent/report.html)"
    just_run = "people: passed its gate: winograd-calibrated (reports/people/report.md, build/people/report.html)"
    assert just_run in said


def test_what_was_noted_early_is_not_noted_again(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights were digested once more."""
    ahead = [name for name in DUE if name.startswith(("optimize", "evaluate"))]
    monkeypatch.setattr(repro, "make_ahead", lambda view, candidates, share, judge: judge.noted.extend(ahead[:1]))
    monkeypatch.setattr(repro, "note_made", lambda names, candidates: asked.append(names))
    assert repro.repro(["people"], 2) == 0
    assert asked == [ahead[1:]]


def test_a_gate_that_failed_early_keeps_no_other_product_from_its_verdict(
    asked: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC ends at the first gate that fails."""

    def make_ahead(view: View, candidates: Any, share: Share, judge: judging.EarlyJudge) -> None:
        judge.failed.append("people")
        judge.steps["gate@upscaler"] = Step("gate@upscaler", 1, 0.0, outcome="done")

    monkeypatch.setattr(repro, "make_ahead", make_ahead)
    monkeypatch.setattr(repro, "list_due", lambda targets: [*DUE, "gate@upscaler", "gate@shots"])
    monkeypatch.setenv("DVC_CODE", "255")
    assert repro.repro([], 2) == 255
    said = capfd.readouterr().out.splitlines()
    runs = [line for line in said if line.startswith("Running")]
    assert runs == [f"Running {WAITING} release@agent release@shots release@upscaler", f"Running {WAITING}"]
    ends = [line.partition(" (")[0] for line in said if "its gate" in line]
    assert ends == [
        "agent: passed its gate before: awq-long-g32",
        "shots: the run ended before its gate; `python -m pipeline repro shots` goes on with it alone",
        "upscaler: passed its gate: tiled-hann",
        "people: stopped by its gate, as said above",
    ], "one that was not reached is not said to have passed"


@pytest.mark.parametrize(("code", "said"), [("255", "stopped by its gate, as said above"), ("0", "passed its gate")])
def test_the_last_dvc_has_the_last_word_on_what_was_judged_early(
    asked: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    """A tolerance was edited meanwhile, or a stage had failed for lack of memory."""

    def make_ahead(view: View, candidates: Any, share: Share, judge: judging.EarlyJudge) -> None:
        if code == "0":
            judge.failed.append("people")
        else:
            judge.steps["gate@people"] = Step("gate@people", 1, 0.0, outcome="done")

    monkeypatch.setattr(repro, "make_ahead", make_ahead)
    monkeypatch.setenv("DVC_CODE", code)
    assert repro.repro(["people"], 2) == int(code)
    ends = [line for line in capfd.readouterr().out.splitlines() if "its gate" in line]
    assert len(ends) == 1 and ends[0].startswith(f"people: {said}")


def test_where_a_candidate_failed_the_verdicts_that_came_early_are_said_last(
    asked: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_ahead(view: View, candidates: Any, share: Share, judge: judging.EarlyJudge) -> None:
        judge.steps["gate@upscaler"] = Step("gate@upscaler", 1, 0.0, outcome="done")
        judge.failed.append("shots")
        raise QuantgateError("int8: failed, as said above")

    monkeypatch.setattr(repro, "make_ahead", make_ahead)
    monkeypatch.setattr(repro, "list_due", lambda targets: [*DUE, "gate@upscaler", "gate@shots"])
    with pytest.raises(QuantgateError, match="int8: failed"):
        repro.repro(["shots", "people", "upscaler"], 2)
    said = [line.partition(" (")[0] for line in capfd.readouterr().err.splitlines() if not line.startswith("progress")]
    assert said[:3] == [
        "people: the run ended before its gate; `python -m pipeline repro people` goes on with it alone",
        "upscaler: passed its gate: tiled-hann",
        "shots: stopped, as said above",
    ]


@pytest.mark.parametrize(("names", "num_runs"), [(["people"], 0), (["people", "shots"], 1), ([], 1)])
def test_a_product_whose_reference_is_unfit_keeps_no_other_from_its_verdict_and_does_not_go_on(
    asked: list[Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    num_runs: int,
) -> None:
    """A run of it alone would end at the same reference; DVC would first make all of its candidates."""

    def make_ahead(view: View, candidates: dict[str, Product], share: Share, judge: judging.EarlyJudge) -> None:
        assert judge.find_unfit(candidates["people"]) == ["right in 0 of 200 cases"]

    monkeypatch.setattr(compare, "find_unfit", lambda *_: ["right in 0 of 200 cases"])
    monkeypatch.setattr(repro, "make_ahead", make_ahead)
    assert repro.repro(names, 2) == 1
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == "people: stopped before its other candidates, as its reference is unfit, as said above"
    runs = [line.removeprefix(f"Running {WAITING} ").split() for line in said if line.startswith("Running")]
    assert len(runs) == num_runs
    assert all(targets and "release@people" not in targets for targets in runs)


def test_a_release_that_is_let_through_without_a_pass_is_not_said_to_have_passed(
    asked: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    judgement = json.loads((ROOT / "reports/agent/verdict.json").read_text())
    for verdict in judgement["verdicts"]:
        verdict["outcome"] = "inconclusive"
    write_text(Path("reports/agent/verdict.json"), json.dumps(judgement))
    assert repro.repro([], 2) == 0
    assert "agent: let through by its gate before: awq-long-g32 (inconclusive)" in capfd.readouterr().out


@pytest.fixture
def quiet_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stage `env` look at nothing and write nothing."""
    for name in ("write_if_changed", "digest_inputs", "read_libraries"):
        monkeypatch.setattr(env, name, lambda *_, **__: None)
    for name in ("make_missing", "prove_gpus", "list_texts"):
        monkeypatch.setattr(checking, name, lambda *_, **__: None)
    for name in ("list_held_gpus", "check_gates"):
        monkeypatch.setattr(checking, name, lambda *_: [])
    monkeypatch.setattr(env, "load_params", lambda: Params({}))
    monkeypatch.setattr(env, "read_machine", lambda: SimpleNamespace(model_dump=dict))
    monkeypatch.setattr(checking, "list_gpu_problems", lambda *_: ["something"])
    monkeypatch.delenv(WARNED, raising=False)


@pytest.mark.parametrize("is_known", [False, True])
def test_warnings_are_said_once_a_run(
    is_known: bool, quiet_env: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stage `env` runs ahead of all work, and DVC runs it again."""
    if is_known:
        monkeypatch.setenv(WARNED, "1")
    assert env.main([]) == 0
    assert ("warning: something" in capsys.readouterr().err) is not is_known


def test_a_warning_names_its_product(
    quiet_env: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of all products come, whichever one was asked for."""
    people = load_params(ROOT / "params.yaml").products["people"]
    located = "products.people.evals.scenes: few"
    monkeypatch.setattr(env, "load_params", lambda: Params({"people": people}))
    monkeypatch.setattr(
        checking, "KINDS", {"vision": SimpleNamespace(check=lambda *_, **__: ["candidates: slow", located])}
    )
    assert env.main([]) == 0
    said = [line.partition("warning: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == ["something", "people: candidates: slow", located]


def test_what_is_left_is_part_of_the_time_that_is_left(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repro, "list_due", lambda targets: [*DUE, "evaluate@agent", "compare@agent", "gate@agent"])
    assert repro.repro([], 2) == 0
    assert asked[0].num_unknown == 3, "a product of servers is judged last"


def test_where_nothing_is_gained_ahead_dvc_does_all(asked: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert repro.repro([], None) == 0 and not asked
    assert f"Running {WAITING}" in capfd.readouterr().out.splitlines()


def test_a_candidate_is_no_product(asked: list[Any]) -> None:
    with pytest.raises(SettingsError, match="tiled"):
        repro.repro(["tiled"], 2)
    assert not asked
