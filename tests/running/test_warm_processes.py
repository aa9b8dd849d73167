"""Tasks in copies of one process: what a copy begins with, what it leaves, how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.running.warm_processes import LOST, WarmProcess
from tests.fakes import warm_tasks
from tests.fakes.processes import is_running, wait_for_end


@pytest.fixture
def warm() -> Iterator[WarmProcess]:
    with WarmProcess(warm_tasks.prepare) as process:
        yield process


def test_each_task_begins_with_the_imports_and_with_nothing_of_another(capfd: pytest.CaptureFixture[str]) -> None:
    """A thread count, a seed or a session that is left over would change the next candidate's bytes."""
    with WarmProcess(warm_tasks.prepare) as warm:
        assert [warm.run(word, warm_tasks.show_state, word) for word in "abc"] == [0, 0, 0]
    assert capfd.readouterr().out.splitlines() == [f"{word}: prepared unset" for word in "abc"]


def test_each_line_begins_with_the_label_of_its_task(capfd: pytest.CaptureFixture[str]) -> None:
    with WarmProcess(warm_tasks.prepare) as warm:
        assert warm.run("int4", warm_tasks.print_lines, "") == 0
    assert capfd.readouterr().out.splitlines() == ["int4: one", "int4: two", "int4: three", "int4: four"]


def test_a_line_that_can_not_be_shown_keeps_no_task_waiting() -> None:
    """A terminal of another encoding, or a reader that has gone: the run hung."""

    def refuse(line: str) -> None:
        line.encode("ascii")
        shown.append(line)

    shown: list[str] = []
    with WarmProcess(warm_tasks.prepare, show=refuse) as warm, ThreadPoolExecutor(1) as pool:
        try:
            assert pool.submit(warm.run, "grün", warm_tasks.print_lines, "").result(timeout=10) == 0
            assert pool.submit(warm.run, "b", warm_tasks.print_lines, "").result(timeout=10) == 0
        finally:
            for future in warm._waiting.values():
                future.set_result(LOST)  # what the pool waits for
    assert shown == ["b: one", "b: two", "b: three", "b: four"]


def test_a_task_may_print_what_its_terminal_can_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results were lost for a letter in a line about them."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with WarmProcess(warm_tasks.prepare) as warm:
        assert warm.run("a", warm_tasks.print_word, "grün") == 0


def test_what_a_user_can_act_on_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with WarmProcess(warm_tasks.prepare) as warm:
        assert [warm.run(label, warm_tasks.fail, word) for label, word in (("a", "user"), ("b", "ours"))] == [1, 1]
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "a: serving: expected x"
    assert lines[1] == "b: Traceback (most recent call last):" and lines[-1] == "b: ZeroDivisionError: a mistake"


def test_a_task_that_is_killed_costs_no_other(warm: WarmProcess) -> None:
    assert warm.run("a", warm_tasks.end_by_signal, "") == -9
    assert warm.run("b", warm_tasks.show_state, "b") == 0
    assert not warm.is_gone


def test_a_group_that_is_asked_to_end_is_not_said_to_lack_memory(warm: WarmProcess) -> None:
    """The warm process leaves the ending to whoever started it: its own death would look like a kill of all tasks."""
    assert warm.run("a", warm_tasks.end_on_request, "") == -15
    assert not warm.is_gone


def test_imports_that_fail_are_for_the_task_to_meet(warm: WarmProcess) -> None:
    """It says which candidate needs the library, and other candidates may not."""
    assert warm.run("a", warm_tasks.show_state, "broken") == 0


def test_tasks_run_side_by_side(warm: WarmProcess, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        codes = list(threads.map(lambda label: warm.run(label, warm_tasks.meet, "", tmp_path, 3), "abc"))
    assert codes == [0, 0, 0]


def test_tasks_end_with_the_warm_process(warm: WarmProcess, tmp_path: Path) -> None:
    """One that goes on would hold its candidate's lock, and write beside the next run."""
    assert warm.run("a", warm_tasks.kill_parent_and_wait, "", tmp_path / "pid") == LOST
    assert warm.is_gone
    assert warm.run("b", warm_tasks.show_state, "b") == LOST
    pid = int((tmp_path / "pid").read_text())
    wait_for_end(pid)
    assert not is_running(pid)
