"""What `quantgate` says of itself: its version, an example of every format, and an output without jargon."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import pipeline.__main__ as command
from pipeline.outcomes.registry import READERS
from tests.fakes.outcome_tables import run, write_outcomes
from tests.paths import ROOT


def test_the_version_is_that_of_the_clone(capsys: pytest.CaptureFixture[str]) -> None:
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with pytest.raises(SystemExit) as ended:
        command.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"quantgate {expected}\n"


@pytest.mark.parametrize("pyproject", [None, '[project]\nname = "theirs"\nversion = "9"\n'])
def test_an_installed_command_says_the_version_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pyproject: str | None
) -> None:
    """What lies beside it then is somebody else's."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "pipeline", site / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    if pyproject:
        (site / "pyproject.toml").write_text(pyproject)
    info = site / "quantgate-7.8.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quantgate\nVersion: 7.8.9\n")
    child = subprocess.run(
        [sys.executable, "-P", "-m", "pipeline", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(site), "PATH": ""},
    )
    assert child.returncode == 0 and child.stdout == "quantgate 7.8.9\n", child.stderr


def test_a_copy_without_metadata_says_that_its_version_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(command, "_PYPROJECT", ROOT / "none.toml")
    monkeypatch.setattr(metadata, "version", find)
    assert command.find_version() == "unknown"


@pytest.mark.parametrize("words", [["--help"], ["compare", "--help"]], ids=["top", "compare"])
def test_help_has_an_example_of_every_format_and_each_is_understood(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(words)
    text = capsys.readouterr().out
    examples = [line.strip() for line in text.splitlines() if line.strip().startswith("quantgate compare ")]
    named = " ".join(examples)
    assert len(READERS) == 4  # a fifth needs an example, too
    assert "samples_*.jsonl" in text
    for part in (
        "runs/bf16",
        ".eval",
        ".csv",
        "build/agent/evaluations/",
        "--policy",
        "--better",
        "--cluster-by",
        "--accept-gain",
    ):
        assert part in named, part
    for example in examples:
        assert command._parse(shlex.split(example)[1:]).run is command.compare
    assert max(map(len, text.splitlines())) <= 120


def test_the_output_says_what_is_missed_and_leaves_swaps_of_labels_to_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody who reads a verdict for the first time knows what is swapped there."""
    for wrong, code in ((0, 0), (100, 20)):
        sides = [
            write_outcomes(tmp_path / f"{side}{wrong}.csv", [0.0] * lost + [1.0] * (1000 - lost))
            for side, lost in (("a", 0), ("b", wrong))
        ]
        page, summary = tmp_path / "page.html", tmp_path / "summary.md"
        found, said = run("compare", *sides, "--html", page, "--summary", summary, capsys=capsys)
        assert found == code and "swap" not in said, said
        assert ("this gate misses a true loss of" in said) is (code == 0)
        assert "swaps of the labels within clusters" in page.read_text()


def test_clusters_that_move_together_are_still_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning that asks for something stays where it is read."""
    scores = [float(i // 20 % 2) for i in range(1000)]
    sides = [
        write_outcomes(tmp_path / f"{side}.csv", [1.0 - s if flip else s for s in scores])
        for side, flip in (("a", False), ("b", True))
    ]
    said = run("compare", *sides, capsys=capsys)[1]
    assert "Neighbouring clusters move together in outcomes/score" in said and "swap" not in said, said
