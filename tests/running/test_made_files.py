"""Files that git does not hold are made once, whole, and as their list says."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pipeline.errors import EvalsetError, QuantgateError, SettingsError
from pipeline.running.made_files import list_made_files, make_missing
from tests.paths import ROOT

# writes two files, counts its runs, and waits between the files for as long as a file `wait` is there
SCRIPT = """
import sys, time
from pathlib import Path

assert sys.argv[1:3] == ["--word", "oak"] and sys.argv[3] == "--out", sys.argv
out = Path(sys.argv[4])
(out / "deep").mkdir(parents=True)
with Path("runs").open("a") as file:
    file.write("run\\n")
(out / "one.bin").write_bytes(b"one")
while Path("wait").exists():
    time.sleep(0.01)
(out / "deep/two.bin").write_bytes(b"two")
(out / "README.md").write_text("the script's own, which the list does not name")
"""
ONE, TWO = (hashlib.sha256(text).hexdigest() for text in (b"one", b"two"))
NAMES = ("one.bin", "deep/two.bin")
MAKE = "from pathlib import Path; from pipeline.running.made_files import make_missing; make_missing(Path({root!r}))"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models/tree").mkdir(parents=True)
    (tmp_path / "models/tree/README.md").write_text("by hand")
    (tmp_path / "grow.py").write_text(SCRIPT)
    write_list(tmp_path, two=TWO)
    return tmp_path


def write_list(root: Path, *, two: str) -> None:
    (root / "models/made.yaml").write_text(
        f"tree:\n  module: grow\n  arguments: [--word, oak]\n  files: {{one.bin: '{ONE}', deep/two.bin: '{two}'}}\n"
    )


def read_tree(root: Path) -> dict[str, bytes]:
    """Return what lies in the folder of models, but for the list."""
    folder = root / "models"
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.name != "made.yaml"}
    return {name: path.read_bytes() for name, path in files.items() if path.is_file()}


def count_runs(root: Path) -> int:
    path = root / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def start(root: Path) -> subprocess.Popen[str]:
    """Make what is missing in another process, which leads a group of its own."""
    command = [sys.executable, "-c", MAKE.format(root=str(root))]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.01)
    pytest.fail(f"{path} did not come")


MADE = {"tree/README.md": b"by hand", "tree/one.bin": b"one", "tree/deep/two.bin": b"two"}


def test_what_is_missing_is_made_and_nothing_else_is_touched(root: Path) -> None:
    notes: list[str] = []
    make_missing(root, notes.append)
    assert read_tree(root) == MADE
    assert len(notes) == 1 and "making 2 files by `python -m grow --word oak --out " in notes[0]
    assert list_made_files(root) == [root / "models/tree" / name for name in NAMES]
    (root / "models/tree/one.bin").unlink()
    make_missing(root)
    assert read_tree(root) == MADE and count_runs(root) == 2


def test_a_relative_root_is_as_good_where_temporary_folders_are_named_in_full(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from Python 3.12 on, where stage env ended in a traceback."""
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **where: os.path.abspath(make(**where)))
    monkeypatch.chdir(root)
    make_missing(Path())
    assert read_tree(root) == MADE


def test_folders_that_nobody_names_are_left_and_what_one_is_made_from_is_made(root: Path) -> None:
    """Pictures of products that params.yaml does not have took a minute of a GPU machine."""
    write_two_lists(root, "[--word, oak, --source, models/tree]")
    make_missing(root, named_in={"evalsets/other", "models", ""})
    assert count_runs(root) == 0
    make_missing(root, named_in={"./models/leaf/"})
    assert (
        count_runs(root) == 2 and (root / "models/leaf/one.bin").is_file() and (root / "models/tree/one.bin").is_file()
    )


def write_two_lists(root: Path, leaf_arguments: str) -> None:
    """List a second folder beside `tree`, by the same script, and let the script take any arguments."""
    listed = (root / "models/made.yaml").read_text()
    leaf = listed.replace("tree:", "leaf:", 1).replace("[--word, oak]", leaf_arguments)
    (root / "models/made.yaml").write_text(listed + leaf)
    (root / "models/leaf").mkdir()
    (root / "grow.py").write_text(SCRIPT.replace('sys.argv[3] == "--out"', "True").replace("argv[4]", "argv[-1]"))


def add_to_script(root: Path, lines: str) -> None:
    (root / "grow.py").write_text((root / "grow.py").read_text() + lines)


def test_folders_are_made_side_by_side(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another took 85 s of a machine with 16 cores."""
    monkeypatch.setattr("pipeline.running.made_files.count_cores", lambda: 2)
    write_two_lists(root, "[--word, oak]")
    add_to_script(
        root, 'end = time.monotonic() + 60\nwhile len(open("runs").readlines()) < 2: assert time.monotonic() < end\n'
    )
    make_missing(root)
    assert read_tree(root) == MADE | {"leaf/one.bin": b"one", "leaf/deep/two.bin": b"two"}


def test_a_folder_waits_for_what_it_is_made_from(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.running.made_files.count_cores", lambda: 2)
    write_two_lists(root, "[--word, oak, --source, models/tree]")
    add_to_script(root, 'assert "--source" not in sys.argv or Path("models/tree/deep/two.bin").exists()\n')
    make_missing(root)
    assert read_tree(root) == MADE | {"leaf/one.bin": b"one", "leaf/deep/two.bin": b"two"}


def test_what_is_there_is_only_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_missing(root)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    monkeypatch.setattr("pipeline.running.made_files.digest_file", lambda path: pytest.fail(f"{path} was read"))
    monkeypatch.setattr("pipeline.running.made_files.FileLock", lambda path: pytest.fail("a lock was taken"))
    make_missing(root, pytest.fail)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_another_digest_is_one_line_and_leaves_nothing(root: Path) -> None:
    write_list(root, two=ONE)
    with pytest.raises(QuantgateError) as raised:
        make_missing(root)
    line = str(raised.value)
    assert (
        f"models/tree/deep/two.bin: expected sha256 {ONE[:12]}, got {TWO[:12]} from `python -m grow --word oak --out "
        in line
    )
    assert "numpy " in line and "make setup" in line and "\n" not in line
    assert read_tree(root) == {"tree/README.md": b"by hand"} and not (root / "models/.making").exists()


def test_a_file_of_another_list_is_not_written_over(root: Path) -> None:
    make_missing(root)
    (root / "models/tree/one.bin").write_bytes(b"mine")
    make_missing(root)  # a checked file is not read again
    write_list(root, two=ONE)
    with pytest.raises(QuantgateError, match="one.bin: expected sha256 .* got .* of the file that is there; delete it"):
        make_missing(root)
    assert read_tree(root) == MADE | {"tree/one.bin": b"mine"}


def test_a_script_that_fails_is_one_line(root: Path) -> None:
    (root / "grow.py").write_text("raise SystemExit('no soil')")
    with pytest.raises(QuantgateError, match=r"models/tree: `python -m grow .*` failed: no soil$"):
        make_missing(root)
    assert read_tree(root) == {"tree/README.md": b"by hand"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tree: {module: grow, files: {one.bin: short}}", "made.yaml: tree.files"),
        ("tree: {module: grow}", "made.yaml: tree.files: Field required"),
        ("tree: [", "made.yaml: line 1"),
    ],
)
def test_a_malformed_list_is_refused(root: Path, text: str, message: str) -> None:
    (root / "models/made.yaml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        make_missing(root)


def test_a_folder_that_was_removed_stays_removed(root: Path) -> None:
    shutil.rmtree(root / "models/tree")
    make_missing(root)
    assert count_runs(root) == 0 and read_tree(root) == {}


def test_a_project_without_lists_has_nothing_to_make(tmp_path: Path) -> None:
    make_missing(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_half_way_leaves_no_file_and_the_next_run_makes_all(root: Path) -> None:
    (root / "wait").touch()
    child = start(root)
    wait_for(root / "runs")
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    assert not any((root / "models/tree" / name).exists() for name in NAMES)
    (root / "wait").unlink()
    make_missing(root)
    assert read_tree(root) == MADE and not (root / "models/.making").exists()


def test_two_processes_at_once_run_the_script_once(root: Path) -> None:
    (root / "wait").touch()
    children = [start(root)]
    wait_for(root / "runs")
    children.append(start(root))
    time.sleep(1)  # the second would run the script now, were there no lock
    (root / "wait").unlink()
    assert [child.wait() or child.communicate()[1] for child in children] == ["", ""]
    assert count_runs(root) == 1 and read_tree(root) == MADE


def test_the_lists_name_the_shipped_files_that_git_ignores() -> None:
    """One that git holds as well is there twice; one that it ignores and no list names is in no clone."""
    made = {path.relative_to(ROOT).as_posix() for path in list_made_files(ROOT)}
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "models", "evalsets"]
    ignored = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert {name for name in ignored if "__pycache__" not in name} == made


def test_what_is_made_can_be_read_by_others(root: Path) -> None:
    (root / "grow.py").write_text(SCRIPT + "\n(out / 'one.bin').chmod(0o600)\n")
    make_missing(root)
    assert {(root / "models/tree" / name).stat().st_mode & 0o777 for name in NAMES} == {0o644}


@pytest.mark.parametrize(
    "line", ['{"image": "images/a.png"', '{"image": "images/a.png"}', ""], ids=["cut", "no digest", "blank"]
)
def test_a_damaged_case_is_told_with_file_and_line(root: Path, line: str) -> None:
    folder = root / "evalsets/trees"
    folder.mkdir(parents=True)
    (folder.parent / "made.yaml").write_text("trees: {module: grow, files: cases.jsonl}\n")
    whole = f'{{"image": "images/a.png", "sha256": "{ONE}"}}'
    (folder / "cases.jsonl").write_text(f"{whole}\n{line}\n")
    with pytest.raises(EvalsetError) as caught:
        list_made_files(root)
    assert str(caught.value).startswith(f"{folder / 'cases.jsonl'}:2: expected a case with its pictures")


def test_cases_that_name_what_to_make_and_are_gone_are_one_line(root: Path) -> None:
    folder = root / "evalsets/scenes"
    folder.mkdir(parents=True)
    (root / "evalsets/made.yaml").write_text("scenes: {module: evalsets.make, files: cases.jsonl}\n")
    with pytest.raises(EvalsetError, match=r"scenes/cases\.jsonl: expected cases, .*found no file; take it from git"):
        make_missing(root)
