"""No search for garbage while libraries are imported, and the usual one afterwards; a word where none keep bytecode."""

from __future__ import annotations

import gc
import os
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from pipeline.running.importing import list_bytecode_problems, pause_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_afterwards_as_it_was_also_after_a_failure(enabled: bool) -> None:
    def fail() -> None:
        with pause_collection():
            assert not gc.isenabled()
            raise ImportError

    frozen, was_enabled = gc.get_freeze_count(), gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError):
            fail()
        assert gc.isenabled() is enabled and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize(
    ("is_forbidden", "is_writable", "is_kept", "remedy"),
    [
        (True, True, False, "unset PYTHONDONTWRITEBYTECODE"),
        (False, False, False, "let this user write to "),
        (False, True, False, ""),
        (True, True, True, ""),
        (False, False, True, ""),
    ],
)
def test_libraries_that_each_process_compiles_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_forbidden: bool,
    is_writable: bool,
    is_kept: bool,
    remedy: str,
) -> None:
    source = tmp_path / "weighty" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    if is_kept:
        kept = Path(cache_from_source(str(source)))
        kept.parent.mkdir()
        kept.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", is_forbidden)
    monkeypatch.setattr(os, "access", lambda *_: is_writable)
    said = list_bytecode_problems("weighty")
    assert [remedy in line and f"compileall -q {tmp_path}" in line for line in said] == ([True] if remedy else [])


def test_a_library_that_is_not_there_keeps_no_bytecode() -> None:
    assert list_bytecode_problems("no_such_library") == []
