"""What a person who clones the project relies on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from pipeline.running.stage_code import list_stages
from tests.paths import ROOT

MAX_FILE_BYTES = 12 << 20
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".json", ".jsonl", ".lock", ".jinja", ""}
# In pieces, so that this file does not find itself.
MACHINE_PATH = re.compile("(?<![\\w.])/(?:" + "|".join(("wo" + "rk", "ro" + "ot", "ho" + "me", "op" + "t")) + r")/\w")
COMMENT = re.compile(r"#.*")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def list_files() -> list[Path]:
    """List what git tracks, or would on the next `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_large_file() -> None:
    large = {path.relative_to(ROOT).as_posix(): path.stat().st_size for path in list_files()}
    assert not {name: size for name, size in large.items() if size > MAX_FILE_BYTES}


def test_no_path_of_a_machine() -> None:
    """Such a path works where it was written and nowhere else."""
    found = []
    for path in list_files():
        if path.suffix in TEXT_SUFFIXES:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if MACHINE_PATH.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found


def test_no_merge_was_left_half_done() -> None:
    marks = re.compile("^(?:" + "<" * 7 + "|" + ">" * 7 + ") ", re.MULTILINE)
    texts = {path: path.read_text(encoding="utf-8") for path in list_files() if path.suffix in TEXT_SUFFIXES}
    assert not [path.name for path, text in texts.items() if marks.search(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_documented_names_commands_that_exist(page: Path) -> None:
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(encoding="utf-8"), re.DOTALL))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) <= targets
    assert set(re.findall(r"python -m stages\.(\w+)", code)) <= set(list_stages(ROOT))
    scripts = re.findall(r"python ((?:scripts|tests|models|evalsets)/[\w/]+\.py)", code)
    assert not [script for script in scripts if not (ROOT / script).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{page.name}: {target}"


def test_every_page_is_named_in_the_readme() -> None:
    """And the README stays one that is read in two minutes."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in readme]
    assert len(readme.splitlines()) <= 130


def test_constraints_pin_everything_once() -> None:
    """An unpinned package lets the next clone resolve to something that was never run."""
    lines = [COMMENT.sub("", line).strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line.split("==")[0].lower().replace("_", "-").replace(".", "-") for line in lines if line]
    assert len(pins) == len(set(pins))
    assert not [line for line in lines if line and not re.fullmatch(r"[\w.-]+==[\w.!]+", line)]
    wanted = [COMMENT.sub("", line).strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    starts = [re.match(r"[\w.-]+", line) for line in wanted if line]
    assert all(starts)
    names = [start.group().lower().replace(".", "-") for start in starts if start]
    assert set(names) <= set(pins)


def test_no_error_is_raised_where_an_older_python_wraps_it() -> None:
    """Before 3.11.4 what is raised in `except*` comes out in a group, and no stage knows it for one line."""
    clause = re.compile(r"^\s*except\s*\*", re.MULTILINE)
    assert not [path.name for path in list_files() if path.suffix == ".py" and clause.search(path.read_text())]
