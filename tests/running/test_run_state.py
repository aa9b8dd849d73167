"""How long a run still takes: by the last times of this machine, shared out among what works at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.running.last_times import LastTime, LastTimes
from pipeline.running.progress import Fact
from pipeline.running.run_state import Ending, Estimate, Phase
from pipeline.running.run_summary import format_summary
from tests.running.test_progress import Clock

STEPS = [f"{stage}@{name}" for name in "abc" for stage in ("optimize", "evaluate")]
TIMES = dict(zip(STEPS, [10, 100, 20, 60, 10, 30], strict=True))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_times(folder: Path, machine: str = "{}") -> LastTimes:
    (folder / "machine.json").write_text(machine)
    return LastTimes(folder / "last_times.json", folder / "machine.json")


def plan(
    folder: Path,
    clock: Clock,
    times: Mapping[str, float],
    *,
    num_jobs: int = 2,
    is_serial: bool = False,
    cases: int = 0,
) -> Phase:
    last = open_times(folder)
    for name, seconds in times.items():
        last.keep(name, LastTime(seconds, num_jobs, cases))
    return Phase("make", STEPS, num_jobs=num_jobs, last=last, clock=clock, is_serial=is_serial)


@pytest.mark.parametrize(
    ("num_jobs", "seconds"),
    [
        (1, 230),
        (2, 120),  # a: 110; b: 80, then c: 40
        (3, 110),
        (8, 110),
    ],
)
def test_before_it_begins_candidates_are_shared_out_in_their_order(
    tmp_path: Path, clock: Clock, num_jobs: int, seconds: float
) -> None:
    """The sum over the jobs would be 115 s for two, though a candidate can't be cut."""
    assert plan(tmp_path, clock, TIMES, num_jobs=num_jobs).predict() == Estimate(seconds, 0, 6)


def test_what_is_gone_counts_and_what_takes_longer_is_never_less_than_nothing(tmp_path: Path, clock: Clock) -> None:
    phase = plan(tmp_path, clock, TIMES)
    for name in ("optimize@a", "optimize@b"):
        phase.begin(name)
    clock.now += 4
    assert phase.predict().seconds == 116
    clock.now += 96
    assert phase.predict_step_s(phase.running[0]) == 0
    assert phase.predict().seconds == 100  # a: 100; b: 60, then c: 40
    for name in ("optimize@a", "optimize@b"):
        phase.end(name)
    phase.begin("evaluate@a")
    phase.drop("evaluate@b")
    assert (phase.num_done, phase.total, phase.predict().seconds) == (2, 5, 100)


def test_an_unknown_step_is_counted_and_makes_no_estimate_of_its_own(tmp_path: Path, clock: Clock) -> None:
    known = {name: seconds for name, seconds in TIMES.items() if not name.endswith("@b")}
    assert plan(tmp_path, clock, known).predict() == Estimate(110, 2, 4)
    (tmp_path / "new").mkdir()
    assert plan(tmp_path / "new", clock, {}).predict() == Estimate(0, 6, 0)


def test_cases_of_a_journal_take_no_time_again(tmp_path: Path, clock: Clock) -> None:
    phase = plan(tmp_path, clock, TIMES, cases=400)
    phase.begin("evaluate@a")
    phase.take(Fact("evaluate@a", "choices", "cases", 300, 400, 300))
    assert phase.predict_step_s(phase.running[0]) == pytest.approx(25)
    clock.now += 5
    assert phase.predict_step_s(phase.running[0]) == pytest.approx(20)


def test_an_eval_that_is_slow_this_time_is_believed(tmp_path: Path, clock: Clock) -> None:
    phase = plan(tmp_path, clock, TIMES)
    phase.begin("evaluate@a")
    phase.take(Fact("evaluate@a", "choices", "cases", 0, 400))
    clock.now += 90
    phase.take(Fact("evaluate@a", "choices", "cases", 100, 400))
    assert phase.predict_step_s(phase.running[0]) == pytest.approx(270), "not the ten seconds of the last run"


def test_of_evals_side_by_side_the_slowest_says_how_long_it_takes(tmp_path: Path, clock: Clock) -> None:
    phase = plan(tmp_path, clock, {})
    phase.begin("evaluate@a")
    phase.take(Fact("evaluate@a", "workflows", "cases", 0, 400))
    phase.take(Fact("evaluate@a", "choices", "cases", 0, 400))
    clock.now += 90
    phase.take(Fact("evaluate@a", "workflows", "cases", 100, 400))
    phase.take(Fact("evaluate@a", "choices", "cases", 399, 400))
    (step,) = phase.running
    assert [fact.piece for fact, _ in step.find_work(clock.now)] == ["workflows", "choices"]
    assert phase.predict_step_s(step) == pytest.approx(270)
    phase.take(Fact("evaluate@a", "workflows", "cases", 400, 400))
    assert [fact.piece for fact, _ in step.find_work(clock.now)] == ["choices"], "what is done is not at work"
    phase.take(Fact("evaluate@a", "choices", "cases", 400, 400))
    assert [fact.piece for fact, _ in step.find_work(clock.now)] == ["choices"], "the last one, until the next begins"


def test_an_eval_that_waits_for_the_places_of_another_says_nothing_until_it_goes_on(
    tmp_path: Path, clock: Clock
) -> None:
    """Single calls begin at once, and go on when the last workflows have begun: their first rate is of no use."""
    phase = plan(tmp_path, clock, {})
    phase.begin("evaluate@a")
    for piece in ("calls", "workflows"):
        phase.take(Fact("evaluate@a", piece, "cases", 0, 400))
    clock.now += 1
    phase.take(Fact("evaluate@a", "calls", "cases", 4, 400))
    clock.now += 99
    phase.take(Fact("evaluate@a", "workflows", "cases", 200, 400))
    (step,) = phase.running
    assert [fact.piece for fact, _ in step.find_work(clock.now)] == ["workflows"]
    assert phase.predict_step_s(step) == pytest.approx(100), "of workflows alone, not three hours"
    phase.take(Fact("evaluate@a", "workflows", "cases", 400, 400))
    phase.take(Fact("evaluate@a", "calls", "cases", 4, 400))
    clock.now += 5
    phase.take(Fact("evaluate@a", "calls", "cases", 14, 400))
    clock.now += 20
    phase.take(Fact("evaluate@a", "calls", "cases", 104, 400))
    assert phase.predict_step_s(step) == pytest.approx(296 / 5), "by its rate since it went on"
    assert step.num_kept == 0


def test_the_first_of_many_cases_says_nothing(tmp_path: Path, clock: Clock) -> None:
    """256 workflows begin at once: after the first, of 1,200, it was "about 4.6 h left"; the whole took two minutes."""
    phase = plan(tmp_path, clock, {})
    phase.begin("evaluate@a")
    phase.take(Fact("evaluate@a", "workflows", "cases", 0, 1200))
    phase.take(Fact("evaluate@a", "calls", "cases", 0, 2000))
    (step,) = phase.running
    clock.now += 14
    phase.take(Fact("evaluate@a", "workflows", "cases", 1, 1200))
    phase.take(Fact("evaluate@a", "calls", "cases", 4, 2000))
    assert phase.predict_step_s(step) is None
    clock.now += 16
    phase.take(Fact("evaluate@a", "workflows", "cases", 75, 1200))
    assert phase.predict_step_s(step) == pytest.approx(30 * 1125 / 75), "of workflows alone"


def test_a_slow_eval_does_not_rest(tmp_path: Path, clock: Clock) -> None:
    phase = plan(tmp_path, clock, {})
    phase.begin("evaluate@a")
    phase.take(Fact("evaluate@a", "workflows", "cases", 0, 5))
    (step,) = phase.running
    for done in (1, 2, 3):
        clock.now += 60
        phase.take(Fact("evaluate@a", "workflows", "cases", done, 5))
        assert phase.predict_step_s(step) == pytest.approx(60 * (5 - done))


def test_work_that_comes_in_bursts_does_not_rest(tmp_path: Path, clock: Clock) -> None:
    """As chunks of lm-eval's requests on a slow machine."""
    phase = plan(tmp_path, clock, {})
    phase.begin("evaluate@a")
    phase.take(Fact("evaluate@a", "choices", "requests", 0, 1000))
    (step,) = phase.running
    for done in (64, 128, 192, 256):
        clock.now += 30
        phase.take(Fact("evaluate@a", "choices", "requests", done, 1000))
        assert phase.predict_step_s(step) == pytest.approx((1000 - done) * 30 / 64)


def test_an_eval_that_goes_on_once_and_stands_still_says_nothing_again(tmp_path: Path, clock: Clock) -> None:
    phase = plan(tmp_path, clock, {})
    phase.begin("evaluate@a")
    for piece in ("calls", "workflows"):
        phase.take(Fact("evaluate@a", piece, "cases", 0, 4000))
    (step,) = phase.running
    clock.now += 1
    phase.take(Fact("evaluate@a", "calls", "cases", 4, 4000))
    clock.now += 99
    phase.take(Fact("evaluate@a", "calls", "cases", 5, 4000))
    clock.now += 300
    phase.take(Fact("evaluate@a", "workflows", "cases", 2000, 4000))
    assert phase.predict_step_s(step) == pytest.approx(400), "of workflows"


def test_with_half_of_the_machine_a_step_takes_twice_as_long() -> None:
    alone = LastTime(60.0, 1, 0)
    assert (alone.predict_s(1), alone.predict_s(2)) == (60, 120)
    assert LastTime(60.0, 2, 0).predict_s(1) == 30


def test_times_are_kept_of_steps_that_did_all_of_their_work(tmp_path: Path, clock: Clock) -> None:
    """Half an evaluation would make the next estimate half of what it takes."""
    phase = plan(tmp_path, clock, {}, num_jobs=1)
    for name in STEPS[:5]:
        phase.begin(name)
    phase.take(Fact(STEPS[1], "choices", "cases", 400, 400, 1))
    phase.take(Fact(STEPS[2], is_taken=True))
    phase.take(Fact(STEPS[4], "choices", "cases", 400, 400))
    clock.now += 7
    for name in STEPS[:5]:
        phase.end(name, "failed" if name == STEPS[3] else "done")
    last = open_times(tmp_path)
    assert [last.find(name) for name in STEPS[:4]] == [LastTime(7, 1, 0), None, None, None]
    assert last.find(STEPS[4]) == LastTime(7, 1, 400)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', '{"MACHINE": 1}', '{"MACHINE": {"optimize@a": {"s": 1}}}'])
def test_times_that_can_t_be_read_are_none_and_new_ones_are_kept(tmp_path: Path, text: str) -> None:
    open_times(tmp_path).keep("x", LastTime(1, 1, 1))
    path = tmp_path / "last_times.json"
    [machine] = json.loads(path.read_text())
    path.write_text(text.replace("MACHINE", machine))
    last = open_times(tmp_path)
    assert last.find("optimize@a") is None
    last.keep("optimize@a", LastTime(1, 1, 1))
    assert open_times(tmp_path).find("optimize@a") == LastTime(1, 1, 1)


def test_another_machine_has_its_own_times(tmp_path: Path) -> None:
    open_times(tmp_path, '{"cpu": "a"}').keep("x", LastTime(1, 1, 1))
    assert open_times(tmp_path, '{"cpu": "b"}').find("x") is None
    open_times(tmp_path, '{"cpu": "b"}').keep("x", LastTime(2, 1, 1))
    assert open_times(tmp_path, '{"cpu": "a"}').find("x") == LastTime(1, 1, 1)


def test_stages_of_dvc_begin_by_themselves_and_those_between_are_passed_over(tmp_path: Path, clock: Clock) -> None:
    """DVC skips a stage whose inputs came out as they were, and nobody says so."""
    last = open_times(tmp_path)
    last.keep("compare@p", LastTime(30, 1, 0))
    names = ["env", "optimize@a", "evaluate@a", "compare@p", "gate@p"]
    phase = Phase("dvc", names, num_jobs=1, last=last, clock=clock, is_serial=True)
    assert phase.predict() == Estimate(30, 4, 1)
    phase.take(Fact("env"))
    clock.now += 1
    phase.take(Fact("optimize@a"))
    phase.take(Fact("optimize@a", is_taken=True))
    clock.now += 3
    phase.take(Fact("compare@p"))
    phase.take(Fact("compare@p", cpu_s=2.5))
    phase.take(Fact("", "choices", "cases", 1, 2))
    assert [step.name for step in phase.running] == ["compare@p"] and phase.running[0].number == 4
    assert (phase.num_done, phase.total) == (3, 5) and phase.predict() == Estimate(30, 1, 1)
    assert last.find("optimize@a") is None, "of a result that was taken over"
    phase.close("failed")
    assert list(format_summary([phase], 130, 7)) == [
        "what ran, in seconds (of CPU time):",
        "  project  env 1.0",
        "  p        compare 0.0 (2.5)",
        "  in all   env 1.0, compare 0.0 (2.5)",
        "reused: 1 results made ahead",
        "failed: compare@p",
        "took 2 min 10 s, and 7 s of CPU time",
    ]


def test_the_steps_of_a_product_follow_each_other_beside_those_of_candidates(tmp_path: Path, clock: Clock) -> None:
    """They say that they begin, and nobody says that they end."""
    names = ["evaluate@a", "compare@p", "gate@p", "release@p"]
    last = open_times(tmp_path)
    phase = Phase("make", names, num_jobs=2, last=last, clock=clock, of_dvc=names[1:])
    for name in ("evaluate@a", "compare@p"):
        phase.take(Fact(name))
    clock.now += 5
    phase.take(Fact("gate@p"))
    clock.now += 1
    assert [step.name for step in phase.running] == ["evaluate@a", "gate@p"] and phase.steps["compare@p"].seconds == 5
    begun = phase.finish(names[1:], "failed")
    assert list(begun) == ["compare@p", "gate@p"]
    assert [step.name for step in phase.running] == ["evaluate@a"] and phase.waiting == []
    assert [phase.steps[name].outcome for name in ("compare@p", "gate@p")] == ["done", "failed"]
    phase.finish(names[1:])
    assert phase.steps["gate@p"].outcome == "failed", "it had ended"
    assert last.find("compare@p") == LastTime(5, 1, 0), "whatever works beside it"
    again = Phase("make", names, num_jobs=8, last=last, clock=clock, of_dvc=names[1:])
    assert again.predict().seconds == 5


def test_a_step_that_failed_and_then_did_not_is_no_failure_of_the_run(tmp_path: Path, clock: Clock) -> None:
    phases = [Phase(title, ["gate@p"], num_jobs=1, last=open_times(tmp_path), clock=clock) for title in ("make", "dvc")]
    hows: tuple[Ending, ...] = ("failed", "done")
    for phase, how in zip(phases, hows, strict=True):
        phase.begin("gate@p")
        phase.close(how)
    assert not [line for line in format_summary(phases, 9, 7) if line.startswith("failed")]
    phases[1].steps["gate@p"].outcome = "failed"
    assert "failed: gate@p" in list(format_summary(phases, 9, 7))


def test_the_summary_says_what_was_reused(tmp_path: Path, clock: Clock) -> None:
    phase = plan(tmp_path, clock, {})
    phase.reused.append("3 of 5 candidates, as they were or by DVC's cache")
    for name in STEPS[:3]:
        phase.begin(name)
    phase.take(Fact(STEPS[0], is_taken=True))
    phase.take(Fact(STEPS[1], "choices", "cases", 1500, 1500, 1200))
    phase.take(Fact(STEPS[1], cpu_s=8.0))
    phase.take(Fact(STEPS[2], cpu_s=1.5))
    clock.now += 9
    for name in STEPS[:3]:
        phase.end(name)
    assert list(format_summary([phase], 9, 7)) == [
        "what ran, in seconds (of CPU time):",
        "  a       evaluate 9.0 (8.0) with 1,200 of 1,500 kept",
        "  b       optimize 9.0 (1.5)",
        "  in all  evaluate 9.0 (8.0), optimize 9.0 (1.5)",
        "reused: 3 of 5 candidates, as they were or by DVC's cache; 1 results of an earlier prefetch; "
        "1,200 cases that were finished before",
        "took 9 s, and 7 s of CPU time",
    ]
