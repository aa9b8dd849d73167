"""What CI asks beyond the verdict: the branch a pull request goes to, the owner's key. DVC and stages: test_release."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo

from pipeline.products.params import load_params
from pipeline.products.prefetch import lock_project
from pipeline.records.record_files import read_record
from pipeline.release.manifest import Manifest
from pipeline.release.recipe import find_other_material
from scripts import gate_committed
from tests.fakes.release_project import (
    BUNDLE,
    JUDGING,
    NAME,
    VERDICT,
    bundle_project,
    judge_project,
    load_product,
    write_keys,
    write_project,
)
from tests.fakes.synthetic_records import PRODUCT

ACCURACY = "choices/accuracy"
KEY = f"tolerances.{ACCURACY}.overall"
ASKED = f"products.{PRODUCT}"  # where its settings stand in params.yaml


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Git in an empty folder, whatever repository the tests themselves are run from."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words], check=True, capture_output=True
        )

    run("init", "-q")
    return run


@pytest.fixture
def released(git: Callable[..., None], tmp_path: Path) -> Path:
    """A project whose release is on the branch `origin/main`."""
    write_project(tmp_path)
    bundle_project(tmp_path)
    git("add", "params.yaml", "release")
    git("commit", "-qm", "release")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    return tmp_path


def release_with(root: Path, *, overall: float, loosened: dict[str, dict[str, object]]) -> None:
    """Release under a tolerance, and with reasons, as a pull request may."""
    params = json.loads((root / "params.yaml").read_text())
    gate = params["products"][PRODUCT]["gate"]
    gate["tolerances"][ACCURACY]["overall"] = overall
    gate["loosened"] = loosened
    (root / "params.yaml").write_text(json.dumps(params))
    judge_project(root)
    bundle_project(root)


def check_base(base: str = "main") -> gate_committed.Check:
    return gate_committed.check_base(load_params(Path("params.yaml")), base)


def check_release() -> gate_committed.Check:
    return gate_committed.check_release(load_product(Path()))


def test_a_release_in_the_pull_request_itself_excuses_no_looser_setting(released: Path) -> None:
    """Loosen with a reason, release, remove the reason: its own manifest then says that nothing changed."""
    assert check_base().is_right, check_base().said
    reason = {KEY: {"was": 0.15, "now": 0.3, "why": "the product asks for less since June"}}
    release_with(released, overall=0.3, loosened=reason)
    assert check_base().is_right, check_base().said
    release_with(released, overall=0.3, loosened={})
    found = check_base()
    assert not found.is_right and "\n" not in found.said
    assert f"expected {KEY!r} with a reason, as it was 0.15 at the last release (origin/main:release" in found.said


def test_a_release_that_was_deleted_or_a_branch_that_is_not_there_is_no_first_release(released: Path) -> None:
    shutil.rmtree(released / "release")
    found = check_base()
    assert not found.is_right and found.said.startswith(f"{BUNDLE}/manifest.json: origin/main has it, and here")
    found = check_base("next")
    assert not found.is_right and "origin/next: expected the branch" in found.said


def test_a_product_that_was_renamed_or_removed_takes_its_release_with_it(
    released: Path, git: Callable[..., None]
) -> None:
    """Under another name nothing would be pinned: a looser gate, easier cases and a worse reference would pass."""
    params = json.loads((released / "params.yaml").read_text())
    params["products"]["bot"] = params["products"].pop(PRODUCT)
    for candidate in params["candidates"].values():
        candidate["product"] = "bot"
    (released / "params.yaml").write_text(json.dumps(params))
    shutil.rmtree(released / "release")
    found = check_base()
    assert not found.is_right
    assert found.said.startswith(f"origin/main:{BUNDLE}/manifest.json: expected a product {PRODUCT!r} in params.yaml")


def test_before_a_first_release_nothing_is_compared(git: Callable[..., None], tmp_path: Path) -> None:
    write_project(tmp_path)
    git("add", "params.yaml")
    git("commit", "-qm", "settings")
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    bundle_project(tmp_path)
    assert check_base().is_right


def test_a_pull_request_can_not_change_the_key_that_releases_are_checked_with(
    released: Path, git: Callable[..., None]
) -> None:
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


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda manifest: manifest["reference"].update(weights_digest="0" * 64), "reference.weights"),
        (lambda manifest: manifest["evalsets"]["choices"].update(digest="0" * 64), "evals.choices.cases"),
    ],
)
def test_a_worse_reference_or_easier_cases_under_the_old_name_need_a_reason(
    released: Path, change: Callable[[dict[str, Any]], object], key: str
) -> None:
    path = released / BUNDLE / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    found = check_base()
    assert not found.is_right and f"expected {key!r} with a reason" in found.said


def test_where_a_key_is_kept_the_release_must_be_signed_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    private, public = write_keys(tmp_path, "owner")
    bundle_project(tmp_path)
    assert VERDICT.is_file() and check_release().is_right
    public.rename("release.pub")
    found = check_release()
    assert not found.is_right and "expected a signature, as a public key is given" in found.said
    bundle_project(tmp_path, private_key=private)
    found = check_release()
    assert found.is_right and "signed by the owner of release.pub" in found.said


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with its release, as it lies in a clone: no records."""
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    bundle_project(tmp_path)
    shutil.rmtree(tmp_path / "build")
    return tmp_path


def edit_params(root: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    params = json.loads((root / "params.yaml").read_text())
    change(params)
    (root / "params.yaml").write_text(json.dumps(params, indent=1))


def ask(params: dict[str, Any]) -> dict[str, Any]:
    """Return the product's section of params.yaml."""
    section: dict[str, Any] = params["products"][PRODUCT]
    return section


def _calibrate(params: dict[str, Any]) -> None:
    params["candidates"][NAME]["steps"][0]["calibration"]["num_samples"] = 7


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda p: p["candidates"][NAME]["steps"][0].update(group_size=64), f"candidates.{NAME}.steps.0.group_size"),
        (_calibrate, f"candidates.{NAME}.steps.0.calibration.num_samples"),
        (lambda p: p["candidates"][NAME].update(checkpoint="models/other"), f"candidates.{NAME}.checkpoint"),
        (lambda p: p["candidates"][NAME].update(exact=True), f"candidates.{NAME}.exact"),
        (lambda p: p["candidates"]["reference"].update(checkpoint="models/other"), "candidates.reference.checkpoint"),
        (lambda p: ask(p)["optimize"].update(num_threads=9), f"{ASKED}.optimize.num_threads"),
        (lambda p: ask(p)["serving"].update(dtype="bfloat16"), f"{ASKED}.serving.dtype"),
        (lambda p: ask(p)["serving"].update(max_tokens=65), f"{ASKED}.serving.max_tokens"),
        (lambda p: ask(p)["evals"]["workflows"].update(max_turns=3), f"{ASKED}.evals.workflows.max_turns"),
        (lambda p: ask(p)["evals"]["choices"].update(num_fewshot=2), f"{ASKED}.evals.choices.num_fewshot"),
        (lambda p: ask(p)["canary"].update(num_prompts=99), f"{ASKED}.canary.num_prompts"),
    ],
)
def test_a_release_is_of_the_recipe_that_stands_in_params_yaml(
    project: Path, change: Callable[[dict[str, Any]], object], key: str
) -> None:
    """Whatever dvc.lock says: a merge by "ours" leaves it as if the new recipe had run."""
    assert check_release().is_right, check_release().said
    edit_params(project, change)
    found = check_release()
    assert not found.is_right and found.said.startswith(f"params.yaml: {key}: {BUNDLE}/params.yaml has ")
    assert "run `make repro`" in found.said and "\n" not in found.said


@pytest.mark.parametrize(
    "change",
    [
        lambda params: params["candidates"].update(
            other={"product": PRODUCT, "checkpoint": "models/other", "steps": []}
        ),
        lambda params: params["candidates"]["reference"].update(engine={"kind": "transformers"}, exact=False),
        lambda params: ask(params)["evals"]["choices"].pop("num_fewshot", None),
        lambda params: ask(params)["gate"].update(loosened={}),
    ],
)
def test_other_candidates_and_defaults_that_are_written_out_are_the_same_recipe(
    project: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    """A bundle of a time before a setting was there has its default."""
    edit_params(project, change)
    assert check_release().is_right, check_release().said


def test_cases_and_weights_that_lie_beside_a_release_are_those_that_it_is_about(project: Path) -> None:
    manifest = read_record(project / BUNDLE / "manifest.json", Manifest)
    right = {name: kept.digest for name, kept in manifest.evalsets.items()}
    assert find_other_material(manifest, project, cases=right, adapter=None) == []
    assert find_other_material(manifest, project, cases={}, adapter=None) == [], "kept elsewhere, and not here"
    [problem] = find_other_material(manifest, project, cases=right | {"choices": "0" * 64}, adapter=None)
    assert problem.startswith("evals.choices: its cases are not those of the release (")
    weights = project / manifest.reference.weights_path
    weights.mkdir(parents=True, exist_ok=True)
    (weights / "model.safetensors").write_text("others")
    problems = find_other_material(manifest, project, cases=right, adapter=None)
    assert problems[0].startswith(f"{manifest.reference.weights_path}: not the weights of reference")


def write_stages(root: Path, **changed: str) -> None:
    """Write a dvc.yaml with a product `fonts` beside the one that is released, each with its judging stages."""
    judging = {stage: f"python -m stages.{stage} ${{key}}" for stage in JUDGING}
    stages: dict[str, Any] = {
        name: {"cmd": cmd} for name, cmd in {"env": "true", **changed}.items() if cmd and name not in judging
    }
    stages |= {
        name: {"foreach": {PRODUCT: None, "fonts": None}, "do": {"cmd": cmd}}
        for name, cmd in (judging | changed).items()
        if cmd and name in judging
    }
    (root / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    Repo.init(str(root), no_scm=True)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "nothing is out of date"),
        ({"gate": "true"}, "dvc.yaml: gate@agent.cmd: expected 'python -m stages.gate agent', got 'true'"),
        (
            {"gate": "python -m stages.gate agent"},
            "dvc.yaml: gate@fonts.cmd: expected 'python -m stages.gate fonts', got 'python -m stages.gate agent'",
        ),
        ({"compare": "true"}, "dvc.yaml: compare@agent.cmd: expected 'python -m stages.compare agent', got 'true'"),
        (
            {"release": ""},
            "dvc.yaml: release@agent.cmd: expected 'python -m stages.release agent', got 'no such stage'",
        ),
        ({"env": "echo no memory; exit 3"}, "stage env ended with 3\nno memory"),
        ({"env": ""}, "stage env ended with 1\ndvc.yaml: expected a stage env, found none"),
    ],
)
def test_what_judges_must_be_there_and_run_whatever_dvc_lock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], said: str
) -> None:
    """Written into both files, DVC sees no difference."""
    monkeypatch.chdir(tmp_path)
    write_stages(tmp_path, **changed)
    monkeypatch.setattr(gate_committed, "find_stale", lambda root, runs_here: {})
    found = gate_committed.check_results([PRODUCT, "fonts"])
    assert found.said.startswith(said) and found.is_right == (not changed)


def test_what_digests_the_code_must_run_and_nothing_stands_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another command in dvc.yaml and dvc.lock, digests of old code stayed, and edited code was not seen."""
    monkeypatch.chdir(tmp_path)
    write_stages(tmp_path)
    (tmp_path / "stages").mkdir()
    committed = tmp_path / "build/env/inputs.json"
    committed.parent.mkdir(parents=True)
    committed.write_text("{}")
    monkeypatch.setattr(gate_committed, "find_stale", lambda root, runs_here: {})
    found = gate_committed.check_results([PRODUCT, "fonts"])
    assert not found.is_right and "dvc.yaml: env.cmd: expected 'python -m stages.env', got 'true'" in found.said
    assert not committed.exists()


def test_beside_a_run_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the run's lock away, and its turns: a second run could start, and what is timed was no more alone."""
    monkeypatch.chdir(tmp_path)
    write_stages(tmp_path)
    monkeypatch.setattr(gate_committed, "find_stale", lambda root, runs_here: {})
    with lock_project():
        found = gate_committed.check_results([PRODUCT, "fonts"])
        assert not found.is_right and found.said.startswith("build/env/prefetch.lock: expected one prefetch at a time")
        assert Path("build/env/prefetch.lock").exists()


def test_a_comment_that_can_t_be_written_is_one_line_ahead_of_all_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate_committed, "check_all", lambda: pytest.fail("minutes of work"))
    with pytest.raises(SystemExit) as caught:
        gate_committed.main(["--markdown", str(tmp_path)])
    assert caught.value.code == 2
    assert f"--markdown: expected a file, '{tmp_path}' is a folder; name a file in it" in capsys.readouterr().err


def test_what_is_out_of_date_is_named_in_order_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_stages(tmp_path)
    monkeypatch.setattr(
        gate_committed,
        "find_stale",
        lambda root, runs_here: {"evaluate@a": ["serving.dtype modified"], "compare@agent": []},
    )
    found = gate_committed.check_results([PRODUCT, "fonts"])
    assert not found.is_right
    named = "out of date: evaluate@a, compare@agent\nevaluate@a: serving.dtype modified\n"
    assert found.said.startswith(f"{named}run `make ")
