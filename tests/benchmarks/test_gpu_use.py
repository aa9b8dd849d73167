"""Which GPUs a benchmark's nvidia-smi is asked about."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_use


@pytest.mark.parametrize(
    ("gpus", "asked"),
    [(("1",), ["--id=1"]), (("0", "1"), ["--id=0,1"]), (("MIG-7",), [])],
)
def test_it_is_asked_about_the_gpus_of_this_process(
    gpus: tuple[str, ...], asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a machine with two cards was called half as busy."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_use, "list_own_gpus", lambda: gpus)
    process = gpu_use.start_nvidia_smi(100)
    assert process is not None
    said = process.communicate()[0].splitlines()
    assert [word for word in said if word.startswith("--id")] == asked
    assert said[-2:] == ["-lms", "100"]


def test_a_process_without_a_gpu_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty CUDA_VISIBLE_DEVICES hides all cards, and a neighbour's was sampled."""
    monkeypatch.setattr(gpu_use, "list_own_gpus", lambda: ())
    monkeypatch.setattr("shutil.which", lambda _: "nvidia-smi")
    assert gpu_use.start_nvidia_smi(100) is None


@pytest.mark.parametrize(
    ("line", "use"),
    [("97, 1024\n", (97.0, 1024.0)), ("0, 0", (0.0, 0.0)), ("97, [N/A]", None), ("97", None), ("", None)],
)
def test_a_line_that_does_not_say_is_passed_over(line: str, use: tuple[float, float] | None) -> None:
    """A card without memory of its own ended a run with a traceback."""
    assert gpu_use.parse_use(line) == use
