"""What is out of date in a clone without data: a project that DVC ran, then cloned and edited in one place."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dvc.progress
import dvc_data.callbacks
import pytest
from ruamel.yaml import YAML

from pipeline.errors import EvidenceError
from pipeline.running.staleness import find_stale, list_due, note_runs, open_project, read_commands, read_own_commands

# of DVC's own
pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep:DeprecationWarning")

RUNS_HERE = {"env", "gate"}
KEPT = {"cache": False, "persist": True}
STAGES: dict[str, Any] = {
    "env": {
        "cmd": "mkdir -p build && cp code.json build",
        "always_changed": True,
        "outs": [{"build/code.json": {"persist": True}}],
    },
    "make": {
        "foreach": ["a", "b"],
        "do": {
            "cmd": "mkdir -p build/made/${item} && cp data.txt build/made/${item}",
            "deps": ["data.txt"],
            "params": ["steps", {"build/code.json": ["make"]}],
            "outs": ["build/made/${item}"],
        },
    },
    "compare": {
        "cmd": "cat build/made/*/* > verdict.json && cp verdict.json report.md",
        "deps": ["build/made"],
        "params": ["limit", {"build/code.json": ["compare"]}],
        "outs": [{"verdict.json": KEPT}, {"report.md": KEPT}],
    },
    "gate": {
        "cmd": "cp verdict.json build/gate.ok",
        "deps": ["verdict.json"],
        "params": ["limit", {"build/code.json": ["gate"]}],
        "outs": ["build/gate.ok"],
    },
    "release": {
        "cmd": "cp build/gate.ok bundle.json",
        "deps": ["build/gate.ok", "verdict.json"],
        "params": [{"build/code.json": ["release"]}],
        "outs": [{"bundle.json": KEPT}],
    },
}
ALL = ["make@a", "make@b", "compare", "gate", "release"]
JUDGING = ALL[2:]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose stages all ran."""
    root = tmp_path_factory.mktemp("stale") / "project"
    root.mkdir()
    (root / "data.txt").write_text("1\n")
    (root / "params.yaml").write_text("steps: [1]\nlimit: 0.1\nother: 1\n")
    (root / "code.json").write_text(json.dumps({"make": "1", "compare": "1", "gate": "1", "release": "1"}))
    (root / "dvc.yaml").write_text(json.dumps({"stages": STAGES}))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "GIT_"))} | {"DVC_NO_ANALYTICS": "1"}
    for words in (["init", "--no-scm", "-q"], ["repro", "-q"]):
        done = subprocess.run([sys.executable, "-m", "dvc", *words], cwd=root, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture
def clone(project: Path, tmp_path: Path) -> Path:
    """What git would keep of it, with what stage env writes."""
    root = tmp_path / "clone"
    shutil.copytree(project, root, ignore=shutil.ignore_patterns("build", "cache", "tmp"))
    return root


def find(root: Path) -> dict[str, list[str]]:
    (root / "build").mkdir(exist_ok=True)
    shutil.copy(root / "code.json", root / "build/code.json")
    return find_stale(root, runs_here=RUNS_HERE)


Change = Callable[[dict[str, Any]], Any]


def edit(root: Path, name: str, change: Change) -> None:
    """Change the content of a file of YAML or JSON."""
    content = YAML(typ="safe").load((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))


def of(part: str, name: str) -> Callable[[dict[str, Any]], Any]:
    """Return the digests of an entry of dvc.lock."""
    return lambda stage: next(item for item in stage[part] if item["path"] == name)


def test_of_a_clone_nothing_is_out_of_date(clone: Path) -> None:
    assert find(clone) == {} and not (clone / "build/made").exists()


def test_what_was_made_here_is_compared_too(project: Path, tmp_path: Path) -> None:
    """Where weights and records are, they are looked at, and a marker that another verdict left is seen."""
    root = tmp_path / "whole"
    shutil.copytree(project, root)
    assert find(root) == {}
    (root / "build/made/b/data.txt").write_text("2\n")
    assert list(find(root)) == ["make@b", "compare", "gate", "release"]


@pytest.mark.parametrize(
    ("name", "change", "stale"),
    [
        ("params.yaml", lambda p: p.update(steps=[2]), ALL),
        ("params.yaml", lambda p: p.update(limit=0.2), ["compare", "gate", "release"]),
        ("params.yaml", lambda p: p.pop("limit"), ["compare", "gate", "release"]),
        ("params.yaml", lambda p: p.update(other=2), []),
        ("code.json", lambda c: c.update(make="2", compare="2"), ALL),
        ("code.json", lambda c: c.update(compare="2"), ["compare", "gate", "release"]),
        ("code.json", lambda c: c.update(compare="2", release="2"), ["compare", "gate", "release"]),
        ("code.json", lambda c: c.update(release="2"), ["release"]),
        ("code.json", lambda c: c.update(gate="2"), []),  # it runs here
        ("code.json", lambda c: c.update(other="2"), []),
    ],
)
def test_a_setting_or_code_makes_its_stages_and_all_behind_them_stale(
    clone: Path, name: str, change: Change, stale: list[str]
) -> None:
    edit(clone, name, change)
    assert list(find(clone)) == stale


@pytest.mark.parametrize(
    ("name", "stale"),
    [
        ("data.txt", ALL),
        ("report.md", ["compare", "gate", "release"]),
        ("verdict.json", ["compare", "gate", "release"]),
        ("bundle.json", ["release"]),
    ],
)
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_committed_file_that_is_another_one_or_gone_is_stale(
    clone: Path, name: str, stale: list[str], is_deleted: bool
) -> None:
    """DVC itself skips a stage whose committed report was deleted."""
    if is_deleted:
        (clone / name).unlink()
    else:
        (clone / name).write_text("edited\n")
    assert list(find(clone)) == stale


@pytest.mark.parametrize(
    ("stage", "change", "stale", "said"),
    [
        ("make@a", lambda s: s["outs"][0].update(md5="0" * 32 + ".dir", size=9), JUDGING, "of make@a, make@b together"),
        ("make@a", lambda s: s["outs"][0].pop("md5"), ["make@a", *JUDGING], "dvc.lock has no digest of it"),
        ("make@b", lambda s: s.update(cmd="true"), ["make@b", *JUDGING], "dvc.lock has 'true'"),
        ("make@b", lambda s: s["params"]["params.yaml"].update(steps=[2]), ["make@b", *JUDGING], "steps modified"),
        (
            "make@b",
            lambda s: s["params"]["params.yaml"].update(limit=0.1),
            ["make@b", *JUDGING],
            "limit not in dvc.yaml",
        ),
        ("compare", lambda s: s["deps"][0].update(nfiles=3), JUDGING, "of make@a, make@b together"),
        ("compare", lambda s: s.pop("deps"), JUDGING, "deps: build/made not in dvc.lock"),
        ("compare", lambda s: s["outs"].pop(), JUDGING, "not in dvc.lock"),
        ("release", lambda s: of("deps", "build/gate.ok")(s).update(md5="0" * 32), ["release"], "dvc.lock has of gate"),
        ("release", lambda s: of("deps", "build/gate.ok")(s).pop("md5"), ["release"], "no digest of it"),
        ("gate", lambda s: s["outs"][0].update(md5="0" * 32), ["release"], "dvc.lock has of gate"),
        ("gate", lambda s: s.update(cmd="true"), ["gate", "release"], "dvc.lock has 'true'"),
    ],
)
def test_an_entry_of_dvc_lock_that_does_not_fit_the_others_is_stale(
    clone: Path, stage: str, change: Change, stale: list[str], said: str
) -> None:
    """As a merge by "ours" leaves it."""
    edit(clone, "dvc.lock", lambda lock: change(lock["stages"][stage]))
    found = find(clone)
    assert list(found) == stale and said in found[stale[0]][0], found


@pytest.mark.parametrize(
    ("stage", "stale"),
    [("make@b", ["make@b", *JUDGING]), ("compare", JUDGING), ("gate", ["gate", "release"]), ("release", ["release"])],
)
def test_a_stage_that_dvc_lock_does_not_have_is_stale(clone: Path, stage: str, stale: list[str]) -> None:
    edit(clone, "dvc.lock", lambda lock: lock["stages"].pop(stage))
    found = find(clone)
    assert list(found) == stale and found[stage] == ["no entry in dvc.lock"]


def test_without_dvc_lock_everything_is_stale(clone: Path) -> None:
    (clone / "dvc.lock").unlink()
    assert list(find(clone)) == ["env", *ALL]


def define(name: str, **changed: Any) -> Change:
    return lambda file: (file["stages"][name].get("do") or file["stages"][name]).update(changed)


@pytest.mark.parametrize(
    ("change", "stale", "said"),
    [
        (define("make", frozen=True), ALL, "frozen"),
        (define("gate", frozen=True), ["gate", "release"], "frozen"),
        (define("env", frozen=True), ["env", *ALL], "frozen"),
        (define("compare", cmd="true"), JUDGING, "cmd is 'true'"),
        (define("gate", cmd="true"), ["gate", "release"], "cmd is 'true'"),
        (define("env", cmd="true"), ["env", *ALL], "cmd is 'true'"),
        (define("compare", params=["limit"]), JUDGING, "params: build/code.json not in dvc.yaml"),
        (define("compare", params=[{"build/code.json": ["compare"]}]), JUDGING, "params: params.yaml not in dvc.yaml"),
        (
            define("compare", params=["limit", "other", {"build/code.json": ["compare"]}]),
            JUDGING,
            "other not in dvc.lock",
        ),
        (define("compare", deps=["build/made", "data.txt"]), JUDGING, "data.txt not in dvc.lock"),
        (define("compare", deps=[]), JUDGING, "deps: build/made not in dvc.yaml"),
        (define("compare", outs=[{"verdict.json": KEPT}]), JUDGING, "report.md not in dvc.yaml"),
        (define("release", deps=["verdict.json"]), ["release"], "build/gate.ok not in dvc.yaml"),
        (define("compare", always_changed=True), JUDGING, "always changed"),
        (lambda file: file["stages"].pop("make"), JUDGING, "build/made is missing, and no stage makes it"),
        (lambda file: file["stages"].pop("gate"), ["release"], "build/gate.ok is missing, and no stage makes it"),
    ],
)
def test_a_stage_that_dvc_yaml_defines_otherwise_than_it_ran_is_stale(
    clone: Path, change: Change, stale: list[str], said: str
) -> None:
    edit(clone, "dvc.yaml", change)
    found = find(clone)
    assert set(found) == set(stale) and any(said in problem for problem in found[stale[0]]), found


def test_a_stage_may_not_be_moved_to_a_folder_where_nothing_changes(clone: Path) -> None:
    """Its paths, which are all that dvc.lock has, would stay what they are."""
    shutil.copytree(clone, clone / "old", ignore=shutil.ignore_patterns("old", "dvc.*", ".dvc"))
    edit(clone, "params.yaml", lambda params: params.update(limit=0.2))
    edit(clone, "dvc.yaml", define("compare", wdir="old"))
    assert any(problem.startswith("wdir: ") for problem in find(clone)["compare"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dvc.yaml", "stages: ["),
        ("dvc.yaml", "stages: {compare: 3}"),
        ("dvc.lock", "schema: '2.0'\nstages: ["),
        ("dvc.lock", "stages: [\n"),
        ("params.yaml", "steps: ["),
        (
            "dvc.yaml",
            '{"stages": {"a": {"cmd": "true", "deps": ["x"], "outs": ["y"]}, '
            '"b": {"cmd": "true", "deps": ["y"], "outs": ["x"]}}}',
        ),
    ],
)
def test_what_dvc_can_not_read_is_not_up_to_date(clone: Path, name: str, text: str) -> None:
    (clone / name).write_text(text)
    with pytest.raises(EvidenceError) as found:
        find(clone)
    assert "expected stages that DVC can compare with dvc.lock, got" in str(found.value)
    assert "\n" not in str(found.value)


def test_a_merge_conflict_says_how_to_go_on(clone: Path) -> None:
    lock = clone / "dvc.lock"
    lock.write_text(f"<<<<<<< HEAD\n{lock.read_text()}=======\nstages: {{}}\n>>>>>>> other\n")
    with pytest.raises(EvidenceError, match=r"dvc\.lock: .* by `git checkout --ours dvc.lock`, and run `make repro`"):
        read_commands(clone)


def test_commands_are_those_of_the_file(clone: Path) -> None:
    made = {f"make@{item}": [f"mkdir -p build/made/{item} && cp data.txt build/made/{item}"] for item in ("a", "b")}
    assert read_commands(clone) == made | {name: [stage["cmd"]] for name, stage in STAGES.items() if "cmd" in stage}
    for cmd, expected in (('"true"', ["true"]), ('["a", "b"]', ["a", "b"])):
        (clone / "dvc.yaml").write_text(f'{{"stages": {{"gate": {{"cmd": {cmd}}}}}}}')
        assert read_commands(clone) == {"gate": expected}
        assert read_own_commands(clone, "gate") == expected
    with pytest.raises(EvidenceError, match="expected stages that DVC can compare"):
        read_own_commands(clone, "env")


@pytest.mark.parametrize(
    "text", ["stages: [", *(f'{{"stages": {{"gate": {{"cmd": {cmd}}}}}}}' for cmd in ("true", "3", "null"))]
)  # a boolean was a traceback
def test_what_is_no_command_is_one_line(clone: Path, text: str) -> None:
    (clone / "dvc.yaml").write_text(text)
    with pytest.raises(EvidenceError, match=r"dvc.yaml: expected stages that DVC can compare .*Error") as found:
        read_commands(clone)
    assert "\n" not in str(found.value)


def test_a_foreach_over_the_settings_names_its_stages(clone: Path) -> None:
    """As that of the project does: a product that is there has stages, and one that is not has none."""
    edit(clone, "params.yaml", lambda params: params.update(products={"one": {"folder": "x"}, "two": {"folder": "y"}}))
    edit(
        clone,
        "dvc.yaml",
        lambda file: file.update(
            stages={"gate": {"foreach": "${products}", "do": {"cmd": "judge ${key} ${item.folder}"}}}
        ),
    )
    assert read_commands(clone) == {"gate@one": ["judge one x"], "gate@two": ["judge two y"]}


@pytest.fixture
def whole(project: Path, tmp_path: Path) -> Path:
    """A copy of the project with all that DVC keeps."""
    root = tmp_path / "whole"
    shutil.copytree(project, root)
    return root


def repro(root: Path, *names: str) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "GIT_"))} | {"DVC_NO_ANALYTICS": "1"}
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q", *names], cwd=root, env=kept, check=True)


def ask(root: Path, *names: str) -> list[str]:
    shutil.copy(root / "code.json", root / "build/code.json")
    with contextlib.chdir(root), open_project() as plan:
        return [plan(name) for name in names]


def test_dvc_skips_what_is_there_and_runs_what_was_edited(whole: Path) -> None:
    assert ask(whole, "make@a", "make@b", "compare") == ["skip", "skip", "skip"]
    edit(whole, "code.json", lambda c: c.update(make="2"))
    # compare would run for what make@a may write: nobody knows yet
    assert ask(whole, "make@a", "make@b", "compare") == ["run", "run", "skip"]
    (whole / "build/made/a/data.txt").write_text("2\n")
    assert ask(whole, "compare") == ["run"]


def test_what_was_made_of_the_same_once_is_restored_from_dvcs_cache(whole: Path) -> None:
    """Making it ahead would be work for nothing, and what depends on it needs it there."""
    text = (whole / "build/made/a/data.txt").read_text()
    shutil.rmtree(whole / "build/made/a")
    assert ask(whole, "make@a") == ["restored"]
    assert (whole / "build/made/a/data.txt").read_text() == text
    edit(whole, "code.json", lambda c: c.update(make="2"))
    assert ask(whole, "make@a") == ["run"], "the run of other inputs is none of these"
    repro(whole, "make@a")
    edit(whole, "code.json", lambda c: c.update(make="1"))
    assert ask(whole, "make@a", "make@b") == ["restored", "skip"]
    assert (whole / "build/made/a/data.txt").read_text() == text, "and not what the last run made"
    (whole / "build/made/a/data.txt").write_text("of nobody\n")
    assert ask(whole, "make@a") == ["restored"], "DVC asks at the terminal whether it may remove what it does not keep"
    assert (whole / "build/made/a/data.txt").read_text() == text
    shutil.rmtree(whole / "build/made/a")
    shutil.rmtree(whole / ".dvc/cache/files")
    assert ask(whole, "make@a") == ["run"]


def test_bars_of_dvc_do_not_break_into_the_view(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each stage that is noted, over those of the run."""
    for package in ("dvc", "dvc_data"):
        logger = logging.getLogger(package)
        monkeypatch.setattr(logger, "level", logger.level)  # is set back afterwards
        logger.setLevel(logging.INFO)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert not dvc_data.callbacks.Tqdm(file=Terminal()).disable
    assert ask(whole, "make@a") == ["skip"]
    assert dvc_data.callbacks.Tqdm(file=Terminal()).disable and dvc.progress.Tqdm(file=Terminal()).disable


def test_what_dvc_will_come_to_is_listed_in_its_order(whole: Path) -> None:
    """With all that depends on it, as nobody knows ahead what comes out the same."""
    with contextlib.chdir(whole):
        assert list_due() == ["env"]
        edit(whole, "params.yaml", lambda data: data.update(limit=data["limit"] + 1))
        assert list_due() == ["env", "compare", "gate", "release"]
        assert list_due(["make@a"]) == ["env"]
        edit(whole, "params.yaml", lambda data: data.update(steps=[]))
        assert list_due() == ["env", *ALL] and list_due(["make@b"]) == ["env", "make@b"]


def test_a_run_that_was_killed_is_said_of_no_file(whole: Path) -> None:
    """DVC says it once a file, hundreds of lines above all that matters; whoever lives stays on its list."""
    edit(whole, "params.yaml", lambda data: data.update(steps=[]))
    rwlock = whole / ".dvc/tmp/rwlock"
    with subprocess.Popen(["true"]) as gone:
        pass
    dead, alive = {"pid": gone.pid, "cmd": "dvc repro"}, {"pid": os.getpid(), "cmd": "dvc repro"}
    data, made = str(whole / "data.txt"), str(whole / "build/made/a")
    rwlock.write_text(json.dumps({"read": {data: [dead]}, "write": {made: dead}}))
    with contextlib.chdir(whole):
        due = list_due()
    assert not any(json.loads(rwlock.read_text()).values())
    rwlock.write_text(json.dumps({"read": {data: [alive]}, "write": {}}))
    with contextlib.chdir(whole):
        assert list_due() == due
    assert json.loads(rwlock.read_text())["read"] == {data: [alive]}


def test_what_was_made_without_dvc_is_noted_as_if_dvc_had_made_it(whole: Path, tmp_path: Path) -> None:
    (whole / "data.txt").write_text("2\n")
    shutil.copytree(whole, tmp_path / "by-dvc")
    repro(tmp_path / "by-dvc", "make@a", "make@b")
    for name in ("a", "b"):
        shutil.copy(whole / "data.txt", whole / "build/made" / name / "data.txt")
    with contextlib.chdir(whole):
        note_runs(["make@a", "make@b"])
        assert list_due(["make@a", "make@b", "compare"]) == ["env", "compare"]
    locks = [YAML(typ="safe").load((root / "dvc.lock").read_text()) for root in (whole, tmp_path / "by-dvc")]
    assert locks[0] == locks[1]
    shutil.rmtree(whole / "build/made/a")
    repro(whole, "make@a")  # from the cache
    assert (whole / "build/made/a/data.txt").read_text() == "2\n"


def test_what_was_not_made_is_not_noted(whole: Path) -> None:
    (whole / "data.txt").write_text("2\n")
    shutil.rmtree(whole / "build/made/b")
    before = (whole / "dvc.lock").read_bytes()
    with contextlib.chdir(whole), pytest.raises(EvidenceError, match="build/made/b"):
        note_runs(["make@a", "make@b"])
    assert (whole / "dvc.lock").read_bytes() == before


def test_of_a_clone_without_data_dvc_runs_all(clone: Path) -> None:
    (clone / "build").mkdir()
    assert ask(clone, "make@a", "make@b") == ["run", "run"]


def test_a_frozen_stage_is_left_alone(whole: Path) -> None:
    edit(whole, "code.json", lambda c: c.update(make="2"))
    edit(whole, "dvc.yaml", lambda d: d["stages"]["make"]["do"].update(frozen=True))
    assert ask(whole, "make@a") == ["skip"]


def test_asking_changes_nothing(whole: Path) -> None:
    edit(whole, "code.json", lambda c: c.update(make="2"))
    shutil.copy(whole / "code.json", whole / "build/code.json")
    names = ["dvc.lock", "dvc.yaml", "params.yaml", "build/made/a/data.txt"]
    before = [(whole / name).read_bytes() for name in names]
    assert ask(whole, "make@a", "make@b") == ["run", "run"]
    assert [(whole / name).read_bytes() for name in names] == before


def test_where_another_dvc_works_its_process_is_named_and_to_be_waited_for(whole: Path) -> None:
    """DVC's advice to remove a file of its own came through, and ours to run `dvc status`, which waits for nobody."""
    held = {str(whole / "build/made/a"): {"pid": os.getppid(), "cmd": "dvc repro"}}
    gone = {str(whole / "build/made/b"): {"pid": 2**22 + 1, "cmd": "dvc repro"}}  # above what Linux gives
    (whole / ".dvc/tmp").mkdir(exist_ok=True)
    (whole / ".dvc/tmp/rwlock").write_text(json.dumps({"write": held | gone, "read": {}}))
    with pytest.raises(EvidenceError) as caught:
        ask(whole, "make@a")
    who = f"found one (process {os.getppid()}: dvc repro); wait for it or end it"
    remedy = "and remove .dvc/tmp/rwlock where that is no DVC"
    assert str(caught.value) == f"dvc.yaml: expected no other DVC at work on its stages, {who}, {remedy}"


def test_a_project_that_dvc_can_not_read_is_one_line(clone: Path) -> None:
    (clone / "build").mkdir()
    (clone / "dvc.yaml").write_text("stages: [")
    with pytest.raises(EvidenceError, match="expected stages that DVC can compare"):
        ask(clone)
