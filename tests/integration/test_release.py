"""From records to a release, and what a clone without any of them says: DVC, stages and `.ci/gate` in a small project.

The project has synthetic records, the real stages from `compare` to `release`, and a stage `env` that runs every time.
What stands in for the evaluation is a stage that only checks that records are there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gate_edits import forge
from pipeline.gate.loosening import MANIFEST
from pipeline.records.record_files import read_record
from pipeline.release.manifest import Manifest
from pipeline.report.mlflow_runs.model_registry import RELEASED
from tests.fakes.release_project import BUILD, JUDGING, NAME, VERDICT, write_keys, write_project, write_stages
from tests.fakes.synthetic_records import PRODUCT, Behaviour, write_tree
from tests.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_OWN = ("DVC_", "GIT_", "GITHUB_", "MLFLOW_", "QUANTGATE_")  # of whoever runs the tests


@dataclass(frozen=True)
class Project:
    """A folder under git and DVC."""

    root: Path
    site: Path

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, with the library of this repository."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_OWN)}
        kept |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
            "DVC_NO_ANALYTICS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")])),
            "DVC_SITE_CACHE_DIR": str(self.site),
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        return subprocess.run(
            command,
            cwd=self.root,
            env=kept | environment,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def git(self, *words: str) -> None:
        done = self.run("git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words)
        assert done.returncode == 0, done.stdout

    def repro(self, **environment: str) -> tuple[int, list[str], str]:
        """Run `dvc repro`; return its exit code, the stages that ran, and what was said."""
        done = self.run("python", "-m", "dvc", "repro", **environment)
        return done.returncode, re.findall(r"^Running stage '(.+)':$", done.stdout, re.MULTILINE), done.stdout

    def clone(self, target: Path) -> Project:
        """Clone what is committed, without what DVC keeps."""
        self.git("clone", "-q", str(self.root), str(target))
        return Project(target, self.site)

    def gate(self) -> tuple[int, str, str]:
        """Run what CI runs; return the exit code, what was said, and the text of the comment."""
        done = self.run(".ci/gate", "gate.md")
        return done.returncode, done.stdout, (self.root / "gate.md").read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project in which nothing has run."""
    folder = tmp_path_factory.mktemp("release")
    root = folder / "project"
    write_project(root)
    shutil.rmtree(root / "reports")
    (root / BUILD / "gate.ok").unlink()
    (root / ".gitignore").write_text("/build/\n/mlflow.db*\n/.mlflow.lock\n/mlartifacts/\n/gate.md\n")
    shutil.copytree(ROOT / ".ci", root / ".ci")
    write_stages(root)
    project = Project(root, folder / "site")
    project.git("init", "-q")
    assert project.run("python", "-m", "dvc", "init", "-q").returncode == 0
    return project


@pytest.fixture(scope="module")
def released(project: Project) -> tuple[int, list[str], str]:
    """The first run, signed and committed."""
    private, _ = write_keys(project.site.parent, "owner")
    done = project.repro(QUANTGATE_SIGNING_KEY=str(private))
    project.git("add", "-A")
    project.git("commit", "-qm", "release")
    return done


@pytest.fixture(scope="module")
def clone(project: Project, released: Any, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A clone of the release: no records, no weights."""
    return project.clone(tmp_path_factory.mktemp("clone") / "project")


def test_a_pass_ends_in_a_signed_bundle_and_a_registered_version(project: Project, released: Any) -> None:
    code, ran, said = released
    assert code == 0 and ran == ["env", "evaluate", *(f"{stage}@{PRODUCT}" for stage in JUDGING)], said
    assert "release/agent: signed" in said and f"'quantgate {PRODUCT} {NAME}' version 1 is {RELEASED!r}, new" in said
    manifest = read_record(project.root / "release/agent" / MANIFEST, Manifest)
    assert [(side.candidate, side.outcome) for side in manifest.release] == [(NAME, "pass")]
    listed = project.run("git", "ls-files", "release", "build").stdout
    assert "release/agent/SHA256SUMS" in listed and "build/" not in listed


def test_a_clone_verifies_the_bundle_without_the_weights(project: Project, clone: Project) -> None:
    assert not (clone.root / "build").exists()
    public = str(project.site.parent / "owner.pub")
    done = clone.run("python", "-m", "scripts.verify", "release/agent", "--public-key", public)
    assert done.returncode == 0 and "release/agent: verified" in done.stdout, done.stdout
    (clone.root / "release/agent/params.yaml").write_text("{}")
    done = clone.run("python", "-m", "scripts.verify", "release/agent", "--public-key", public)
    clone.git("checkout", "-q", ".")
    assert done.returncode == 1 and "DIFFERS" in done.stdout and "params.yaml" in done.stdout


def test_ci_passes_a_clone_of_a_release_that_passed(clone: Project) -> None:
    # as a runner of other libraries leaves it, which DVC would write anew
    lock = (clone.root / "dvc.lock").read_text().replace("schema: ", "schema:  ")
    (clone.root / "dvc.lock").write_text(lock)
    code, said, comment = clone.gate()
    assert code == 0, said
    assert (clone.root / "dvc.lock").read_text() == lock
    assert "quantgate: pass" in comment and "BLOCKED" not in said
    assert [line for line in said.splitlines() if line.startswith("pass")] == [
        "pass     results belong to this code and these settings",
        "pass     agent: gate",
        "pass     agent: release",
    ]


def test_ci_misses_no_committed_file_that_was_deleted(clone: Project) -> None:
    """DVC lets reports and bundles be missing; what is not there proves nothing."""
    (clone.root / VERDICT).unlink()
    code, said, _ = clone.gate()
    clone.git("checkout", "-q", ".")
    assert code == 1 and "BLOCKED  agent: gate" in said and "found no file" in said


def test_ci_evaluates_nothing_and_names_what_would_have_to_run(clone: Project) -> None:
    """A pull request that changes a case and commits no new results has proved nothing."""
    (clone.root / "cases.txt").write_text("2")
    shutil.rmtree(clone.root / "release")
    code, said, comment = clone.gate()
    clone.git("checkout", "-q", ".")
    assert code == 1 and "out of date: evaluate, compare@agent, gate@agent, release@agent\n" in said
    assert "out of date: evaluate, compare@agent" in comment and "evaluate: cases.txt modified\n" in said
    assert "pass     agent: gate" in said and "BLOCKED  agent: release" in said, "a bundle that is gone proves nothing"


def write_code(clone: Project, **digests: str) -> None:
    """Write what stage env will find: other code of some stages."""
    inputs = {stage: {PRODUCT: {"code": digests.get(stage, "1")}} for stage in JUDGING}
    (clone.root / "inputs.json").write_text(json.dumps(inputs))


def test_ci_names_the_stages_whose_code_was_changed(clone: Project) -> None:
    """Results of other code than the pull request's are none of it."""
    write_code(clone, compare="2")
    code, said, _ = clone.gate()
    clone.git("checkout", "-q", ".")
    assert code == 1 and "out of date: compare@agent, gate@agent, release@agent\n" in said, said


def test_ci_misses_none_of_several_stages_that_can_not_run_here(clone: Project) -> None:
    """Where data is missing DVC says so of all of them in one sentence, of another form than of one."""
    write_code(clone, compare="2", release="2")
    code, said, comment = clone.gate()
    clone.git("checkout", "-q", ".")
    assert code == 1 and "out of date: compare@agent, gate@agent, release@agent\n" in said, said
    assert "compare@agent: build/env/inputs.json: compare.agent modified" in said and "blocked by results" in comment


def test_ci_compares_the_recipe_with_the_release_where_dvc_lock_says_that_nothing_changed(clone: Project) -> None:
    """As after a merge that kept one side's dvc.lock and the other's params.yaml."""
    params = json.loads((clone.root / "params.yaml").read_text())
    params["candidates"][NAME]["steps"][0]["group_size"] = 64
    (clone.root / "params.yaml").write_text(json.dumps(params))
    forge(clone.root)
    code, said, _ = clone.gate()
    clone.git("checkout", "-q", ".")
    assert "pass     results belong" in said and "pass     agent: gate" in said, said
    assert code == 1 and "BLOCKED  agent: release" in said and f"candidates.{NAME}.steps.0.group_size: " in said, said


def test_a_fail_releases_nothing_and_ci_fails_on_its_clone(project: Project, released: Any, tmp_path: Path) -> None:
    before = (project.root / "release/agent/SHA256SUMS").read_bytes()
    shutil.rmtree(project.root / BUILD / "evaluations")
    write_tree(project.root / BUILD, {NAME: Behaviour({"workflows": 0.5})}, num_cases=80)
    (project.root / "cases.txt").write_text("3")
    code, ran, said = project.repro()
    assert code != 0 and ran[-1] == "gate@agent" and "FAIL" in said, said
    assert (project.root / "release/agent/SHA256SUMS").read_bytes() == before
    project.git("add", "-A")
    project.git("commit", "-qm", "regressed")
    code, said, comment = project.clone(tmp_path / "clone").gate()
    assert code == 1 and "BLOCKED  agent: gate" in said and "FAIL" in said, said
    assert "blocked by agent: gate" in comment and "workflows/task_completion_rate" in comment
