"""Which modules count as the user's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.products.text.evals.imports import list_modules


@pytest.mark.parametrize("is_installed", [False, True])
def test_packages_beside_a_record_of_an_installation_are_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    """With lm-eval on PYTHONPATH the digest of a task was another one, and its release was refused as loosened."""
    site, task = tmp_path / "site", tmp_path / "task"
    for folder in (site, task):
        folder.mkdir()
    (site / "library.py").write_text("import helper\n")
    (site / "helper.py").write_text("")
    (task / "utils.py").write_text("import library\n")
    if is_installed:
        (site / "library-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(site))
    found = {path.name for path in list_modules([task / "utils.py"])}
    assert found == ({"utils.py"} if is_installed else {"utils.py", "library.py", "helper.py"})
    assert str(site) in sys.path
