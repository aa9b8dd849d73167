"""Defects of what is committed: a small release under DVC, and a clone of it that `.ci/gate` is asked about.

The stages of the project itself do not run: the release is one of synthetic records, whose stages are the repository's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gate_edits import forge
from tests.certify.kill_table import Observed
from tests.certify.kill_trial import Trial, run_in
from tests.fakes.release_project import BUILD, NAME, bundle_project, write_project, write_stages
from tests.fakes.synthetic_records import PRODUCT
from tests.paths import ROOT

_OWN = ("DVC_", "GIT_", "GITHUB_", "QUANTGATE_")  # of whoever runs this
# stands beside `compare`: where the records are not, neither can run, and nothing is behind it
_MEASURE: dict[str, Any] = {
    "cmd": f"ls {BUILD}/candidates > build/measured.txt",
    "deps": [f"{BUILD}/candidates"],
    "params": [{"build/env/inputs.json": ["measure"]}],
    "outs": ["build/measured.txt"],
}
_NOT_CLONED = ("build", "cache", "tmp")


def committed(edit: Callable[[Path], None]) -> Callable[[Trial], Observed]:
    """Return what edits a clone of the release and gates it."""

    def plant(trial: Trial) -> Observed:
        clone = trial.root / "clone"
        shutil.copytree(Path(make_release().name), clone, ignore=shutil.ignore_patterns(*_NOT_CLONED))
        edit(clone)
        return gate(clone)

    return plant


@cache
def make_release() -> tempfile.TemporaryDirectory[str]:
    """Make a release that passes, once a process; dvc.lock has what its stages left."""
    kept: tempfile.TemporaryDirectory[str] = tempfile.TemporaryDirectory(prefix="quantgate-release-")
    root = Path(kept.name)
    write_project(root)
    write_stages(root)
    edit_json(root / "dvc.yaml", lambda file: file["stages"].update(measure=_MEASURE))
    edit_code("measure")(root)
    run(root, "sh", "-c", json.loads((root / "dvc.yaml").read_text())["stages"]["env"]["cmd"])
    run(root, "sh", "-c", _MEASURE["cmd"])
    for stage in ("compare", "gate"):
        code, _, said = run_in(root, stage, PRODUCT)
        assert code == 0, said
    bundle_project(root)
    for words in (["init", "--no-scm", "-q"], ["commit", "--force", "-q"]):
        done = run(root, sys.executable, "-m", "dvc", *words)
        assert done.returncode == 0, done.stdout
    return kept


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a project, with the library of this repository."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_OWN)}
    kept |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DVC_NO_ANALYTICS": "1",
    }
    return subprocess.run(
        command, cwd=root, env=kept, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def gate(clone: Path) -> Observed:
    """Gate a clone as `.ci/gate` does; the reasons are the lines of what blocks."""
    done = run(clone, sys.executable, "-m", "scripts.gate_committed")
    if done.returncode == 0:
        return Observed("pass", "", (), 0.0, "")
    blocked = re.findall(r"^BLOCKED  .*\n((?:    .*\n)+)", f"{done.stdout}\n", re.MULTILINE)
    lines = [line.strip() for said in blocked for line in said.splitlines()]
    return Observed("refused" if lines else "error", ".ci/gate", tuple(lines or done.stdout.splitlines()[-1:]), 0.0, "")


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of a file of JSON, which params.yaml and dvc.yaml are here."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_recipe(clone: Path) -> None:
    """Ask for another group size of the released candidate's weights."""
    edit_json(clone / "params.yaml", lambda params: params["candidates"][NAME]["steps"][0].update(group_size=64))


def edit_and_forge(clone: Path) -> None:
    """Edit the recipe, and write into dvc.lock that every stage ran on it."""
    edit_recipe(clone)
    forge(clone)


def edit_and_freeze(clone: Path) -> None:
    """Edit the recipe, and freeze the stages that it would make stale."""
    edit_recipe(clone)
    edit_json(
        clone / "dvc.yaml",
        lambda file: [file["stages"][name]["do"].update(frozen=True) for name in ("compare", "gate", "release")],
    )


def edit_code(*stages: str) -> Callable[[Path], None]:
    """Return what gives some stages the digest of code that none had before."""

    def change(inputs: dict[str, Any]) -> None:
        for stage in stages:
            watched = inputs.setdefault(stage, {}).setdefault(PRODUCT, {})
            watched["code"] = f"{watched.get('code')} edited"

    return lambda root: edit_json(root / "inputs.json", change)
