"""`scripts/side_by_side.py`: a `dvc repro` a candidate, several at once. A stand-in for DVC says what it was asked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.errors import QuantgateError, SettingsError
from pipeline.products.params import load_params
from scripts import side_by_side

# each call leaves a file while it runs, so that one can wait for another
DVC = """
import sys, time
from pathlib import Path
stages, folder = sys.argv[1:], Path({folder!r})
print(*stages)
(folder / stages[0]).touch()
if {meets!r} and stages[0] != "env":
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    print("met" if len(list(folder.iterdir())) >= 3 else "alone")
sys.exit(stages[0] in {failing!r})
"""


@pytest.fixture
def candidates() -> list[str]:
    return list(load_params().products["people"].candidates)


def use_stand_in(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, failing: tuple[str, ...] = (), meets: bool = False
) -> None:
    script = DVC.format(folder=str(folder), failing=failing, meets=meets)
    monkeypatch.setattr(side_by_side, "DVC", (sys.executable, "-c", script))


def test_every_candidate_is_made_after_the_environment_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], candidates: list[str]
) -> None:
    use_stand_in(monkeypatch, tmp_path)
    assert side_by_side.main(["2", "people"]) == 0
    first, *lines = capfd.readouterr().out.splitlines()
    assert first == "env"
    assert sorted(lines) == sorted(f"{name}: optimize@{name} evaluate@{name}" for name in candidates)


def test_as_many_as_asked_run_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    use_stand_in(monkeypatch, tmp_path, meets=True)
    assert side_by_side.main(["2", "people"]) == 0
    said = capfd.readouterr().out
    assert "met" in said
    assert "alone" not in said


def test_where_one_fails_the_others_go_on_and_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], candidates: list[str]
) -> None:
    use_stand_in(monkeypatch, tmp_path, failing=(f"optimize@{candidates[0]}",))
    with pytest.raises(QuantgateError, match=rf"^{candidates[0]}: failed, as said above; what finished is kept$"):
        side_by_side.main(["1", "people"])
    assert f"optimize@{candidates[-1]}" in capfd.readouterr().out


def test_nothing_is_made_where_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    use_stand_in(monkeypatch, tmp_path, failing=("env",))
    assert side_by_side.main(["1", "people"]) == 1
    assert capfd.readouterr().out == "env\n"


@pytest.mark.parametrize("argv", [[], ["0"], ["-2"], ["four"], ["1.5"]])
def test_a_number_that_is_none_is_one_line(argv: list[str]) -> None:
    with pytest.raises(SettingsError, match="^JOBS: expected how many candidates to make at once, such as 4, got "):
        side_by_side.main(argv)
