"""What `make demo` judges, and what README says of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pipeline.__main__ import main
from tests.paths import ROOT


def test_the_shipped_records_fail_where_the_averages_stay_flat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    script = (ROOT / "scripts/demo.sh").read_text()
    options = re.search(r"^set -- (.*?)--html demo.html$", script, re.MULTILINE | re.DOTALL)
    assert options is not None
    page = tmp_path / "demo.html"
    assert main(["compare", *shlex.split(options[1].replace("\\\n", " ")), "--html", str(page)]) == 20
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    shown = re.findall(
        r"^  (pass|fail) +(\S.*?)  +([\d.]+ % -> [\d.]+ %)$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(shown) == 3
    for verdict, name, change in shown:
        at = lines.index(next(line for line in lines if re.fullmatch(rf"{verdict} +{re.escape(name)}", line)))
        assert lines[at + 1].startswith(change)
    assert page.stat().st_size > 10_000
