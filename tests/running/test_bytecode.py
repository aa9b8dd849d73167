"""A word where the libraries keep no bytecode, with what helps there."""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from pipeline.running.bytecode import list_bytecode_problems


@pytest.mark.parametrize(
    ("is_forbidden", "variable", "is_writable", "is_kept", "remedy"),
    [
        (True, "1", True, False, "; unset PYTHONDONTWRITEBYTECODE, or run `"),
        (True, "", True, False, "; start Python without -B, or run `"),
        (False, "", False, False, ", so let its owner run `"),
        (True, "1", False, False, ", so let its owner run `"),
        (False, "", True, False, ""),
        (True, "1", True, True, ""),
        (False, "", False, True, ""),
    ],
)
def test_libraries_that_each_process_compiles_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_forbidden: bool,
    variable: str,
    is_writable: bool,
    is_kept: bool,
    remedy: str,
) -> None:
    folder = tmp_path / "with a space"
    source = folder / "weighty" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.touch()
    if is_kept:
        kept = Path(cache_from_source(str(source)))
        kept.parent.mkdir()
        kept.touch()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", is_forbidden)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", variable)
    monkeypatch.setattr(os, "access", lambda *_: is_writable)
    said = list_bytecode_problems("weighty")
    command = f"{remedy}python -m compileall -q '{folder}'` once"
    assert [line.endswith(command) for line in said] == ([True] if remedy else [])


def test_a_library_that_is_not_there_keeps_no_bytecode() -> None:
    assert list_bytecode_problems("no_such_library") == []
