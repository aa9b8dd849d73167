"""`make setup`: what it installs when it runs once more. A fake uv writes down what it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

CUDA = "https://download.pytorch.org/whl/cu130"
FAKE_UV = """\
#!/bin/sh
echo "$*" >> "$ASKED"
if [ "$1" = venv ]; then
    for last in "$@"; do :; done
    mkdir -p "$last/bin" && ln -s "$(command -v python3)" "$last/bin/python"
fi
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What the script reads of a clone, and uv."""
    folder = tmp_path / "project"
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin/uv"
    uv.write_text(FAKE_UV)
    uv.chmod(0o755)
    return folder


def set_up(project: Path, **variables: str) -> str:
    """Run the script; return what was asked of uv."""
    asked = project / "asked.txt"
    asked.unlink(missing_ok=True)
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "QUANTGATE_"))}
    given |= {"PATH": f"{project.parent / 'bin'}:{given['PATH']}", "ASKED": str(asked)} | variables
    subprocess.run([project / "scripts/setup.sh"], env=given, check=True, capture_output=True)
    return asked.read_text() if asked.is_file() else ""


def test_torch_for_gpus_stays_when_the_next_command_does_not_name_its_index(project: Path) -> None:
    """`make plan` behind it removed the environment, and put torch for CPUs in its place."""
    assert CUDA in set_up(project, QUANTGATE_TORCH_INDEX=CUDA)
    assert set_up(project) == ""
    with (project / "constraints.txt").open("a") as file:
        file.write("# edited\n")
    assert CUDA in set_up(project), "made anew, it is of the same index"
    assert "whl/cpu" in set_up(project, QUANTGATE_TORCH_INDEX="https://download.pytorch.org/whl/cpu")
    assert set_up(project) == ""
