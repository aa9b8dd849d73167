"""Files are written whole or not at all, and a disk that refuses is named with the file."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from pipeline.errors import EvidenceError
from pipeline.gate.verdicts import Judgement, build_policy
from pipeline.records.evaluations import BuiltCandidate, Evaluation
from pipeline.records.files import write_text
from pipeline.records.record_files import Record, format_json, read_record
from pipeline.report.plots import plot_harm
from tests.fakes.synthetic_records import make_params


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def draw(path: Path) -> None:
    policy = build_policy(make_params(["good"], ["good"]))
    plot_harm(
        Judgement(
            outcome="pass", blocked_by=(), policy=policy, reference_fingerprint="", reference_metrics=(), verdicts=()
        ),
        path,
    )


@pytest.mark.parametrize(
    ("write", "where"),
    [
        pytest.param(lambda path: write_text(path, "new"), (os, "fsync"), id="text"),
        pytest.param(lambda path: write_text(path, "new"), (os, "replace"), id="text-in-place"),
        pytest.param(draw, (Image.Image, "save"), id="plot"),
    ],
)
def test_a_full_disk_names_the_file_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None], where: tuple[object, str]
) -> None:
    path = tmp_path / "report"
    path.write_text("old")
    monkeypatch.setattr(*where, refuse)
    with pytest.raises(OSError) as caught:
        write(path)
    assert str(caught.value) == f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}: '{path}'"
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_can_not_be_written_is_named_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_open(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "open", refuse_to_open)  # rights do not bind root, who runs tests in containers
    with pytest.raises(PermissionError, match=r"Permission denied: '.*/report\.md'$"):
        write_text(tmp_path / "report.md", "new")


@pytest.mark.parametrize(("kind", "said"), [(Evaluation, "an Evaluation"), (BuiltCandidate, "a BuiltCandidate")])
def test_a_missing_record_is_named_in_english(tmp_path: Path, kind: type[Record], said: str) -> None:
    with pytest.raises(EvidenceError, match=f"expected {said}, found no file"):
        read_record(tmp_path / "record.json", kind)


def test_a_large_record_has_a_line_for_each_outer_entry_and_loses_nothing() -> None:
    value = {"a": [{"b": {"c": [1, 2.5, None]}, "d": "\u00e9 \n"}, {}], "e": [], "f": {"g": True}}
    text = format_json(value, levels=2)
    assert json.loads(text) == value
    assert text == (
        '{\n"a": [\n{"b": {"c": [1, 2.5, null]}, "d": "\u00e9 \\n"},\n{}\n],\n"e": [],\n"f": {\n"g": true\n}\n}'
    )
    with pytest.raises(ValueError, match="Out of range float"):
        format_json({"a": float("nan")}, levels=1)
