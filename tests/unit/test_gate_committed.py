"""What CI asks beyond the verdict: the branch a pull request goes to, the owner's key. DVC and stages: test_release."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.params import load_params
from scripts import gate_committed
from tests.release_project import VERDICT, bundle_project, judge_project, write_keys, write_project

ACCURACY = "choices/accuracy"
KEY = f"tolerances.{ACCURACY}.overall"


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Git in an empty folder, whatever repository the tests themselves are run from."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words], check=True,
                       capture_output=True)  # fmt: skip

    run("init", "-q")
    return run


@pytest.fixture
def released(git, tmp_path):
    """A project whose release is on the branch `origin/main`."""
    write_project(tmp_path)
    bundle_project(tmp_path)
    git("add", "params.yaml", "release")
    git("commit", "-qm", "release")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    return tmp_path


def release_with(root: Path, *, overall: float, loosened: dict[str, object]) -> None:
    """Release under a tolerance, and with reasons, as a pull request may."""
    params = json.loads((root / "params.yaml").read_text())
    params["gate"]["tolerances"][ACCURACY]["overall"] = overall
    params["gate"]["loosened"] = loosened
    (root / "params.yaml").write_text(json.dumps(params))
    judge_project(root)
    bundle_project(root)


def check_base(base: str = "main") -> gate_committed.Check:
    return gate_committed.check_base(load_params(Path("params.yaml")), base)


def test_a_release_in_the_pull_request_itself_excuses_no_looser_setting(released):
    """Loosen with a reason, release, remove the reason: its own manifest then says that nothing changed."""
    assert check_base().is_right, check_base().said
    reason = {KEY: {"was": 0.15, "now": 0.3, "why": "the product asks for less since June"}}
    release_with(released, overall=0.3, loosened=reason)
    assert check_base().is_right, check_base().said
    release_with(released, overall=0.3, loosened={})
    found = check_base()
    assert not found.is_right and "\n" not in found.said
    assert f"expected {KEY!r} with a reason, as it was 0.15 at the last release (origin/main:release" in found.said


def test_a_release_that_was_deleted_or_a_branch_that_is_not_there_is_no_first_release(released):
    shutil.rmtree(released / "release")
    found = check_base()
    assert not found.is_right and found.said.startswith("release/text/manifest.json: origin/main has it, and here")
    found = check_base("next")
    assert not found.is_right and "origin/next: expected the branch" in found.said


def test_before_a_first_release_nothing_is_compared(git, tmp_path):
    write_project(tmp_path)
    git("add", "params.yaml")
    git("commit", "-qm", "settings")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    bundle_project(tmp_path)
    assert check_base().is_right


def test_a_pull_request_can_not_change_the_key_that_releases_are_checked_with(released, git):
    (released / "release.pub").write_text("key of the owner\n")
    git("add", "release.pub")
    git("commit", "-qm", "key")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert check_base().is_right, check_base().said
    (released / "release.pub").write_text("another\n")
    assert "release.pub: expected the key that main has, found another" in check_base().said
    (released / "release.pub").unlink()
    found = check_base()
    assert not found.is_right and "found none" in found.said


@pytest.mark.parametrize(("change", "key"), [
    (lambda manifest: manifest["reference"].update(weights_digest="0" * 64), "reference.weights"),
    (lambda manifest: manifest["evalsets"]["choices"].update(digest="0" * 64), "evals.choices.cases"),
])  # fmt: skip
def test_a_worse_reference_or_easier_cases_under_the_old_name_need_a_reason(released, change, key):
    path = released / "release/text/manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    found = check_base()
    assert not found.is_right and f"expected {key!r} with a reason" in found.said


def test_where_a_key_is_kept_the_release_must_be_signed_by_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    private, public = write_keys(tmp_path, "owner")
    bundle_project(tmp_path)
    assert VERDICT.is_file() and gate_committed.check_release("text").is_right
    public.rename("release.pub")
    found = gate_committed.check_release("text")
    assert not found.is_right and "expected a signature, as a public key is given" in found.said
    bundle_project(tmp_path, private_key=private)
    found = gate_committed.check_release("text")
    assert found.is_right and "signed by the owner of release.pub" in found.said
