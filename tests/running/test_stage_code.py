"""A stage's code must not miss a file: it would not run again when that one changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import pipeline.running.stage_code
from pipeline.products import KINDS
from pipeline.running.stage_code import digest_code, list_code, list_stages
from tests.paths import ROOT

KIND = "toy"
NO_KIND = {f"pipeline/products/{KIND}/__init__.py": ""}


def _project(root: Path, files: dict[str, str]) -> Path:
    for name, text in (NO_KIND | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _list_own(stage: str, root: Path) -> list[str]:
    """List a stage's code without that of the kind."""
    return [path for path in list_code(stage, KIND, root) if path not in NO_KIND]


def _digest(root: Path, monkeypatch: pytest.MonkeyPatch, *kinds: str) -> dict[tuple[str, str], str]:
    """Return the digests of all stages of a project, each for every kind."""
    monkeypatch.setattr(pipeline.running.stage_code, "ROOT", root)
    return {(stage, kind): digest_code(stage, kind) for kind in kinds for stage in list_stages(root) if stage != "env"}


def test_follows_every_way_to_run_a_file(tmp_path: Path) -> None:
    root = _project(
        tmp_path,
        {
            "stages/__init__.py": "",
            "stages/cli.py": "",
            "stages/demo.py": "from stages.cli import run\nfrom pipeline.top import f\nimport json",
            "pipeline/top.py": "def f():\n    from pipeline.package import lazy\n"
            "    page, tables = 'page.jinja', 'tables'",
            "pipeline/page.jinja": "",
            "pipeline/other.jinja": "",
            "pipeline/tables/a.json": "{}",
            "pipeline/package/__init__.py": "",
            "pipeline/package/lazy.py": "import pipeline.deep\n",
            "pipeline/deep.py": "COMMAND = ['python', '-m', 'pipeline.started']\n",
            "pipeline/started.py": "",
            "pipeline/unused.py": "import pipeline.deep",
        },
    )
    assert list_stages(root) == ["demo"]
    assert _list_own("demo", root) == [
        "pipeline/deep.py",
        "pipeline/package/__init__.py",
        "pipeline/package/lazy.py",
        "pipeline/page.jinja",
        "pipeline/started.py",
        "pipeline/tables/a.json",
        "pipeline/top.py",
        "stages/__init__.py",
        "stages/cli.py",
        "stages/demo.py",
    ]


def test_ends_on_a_cycle(tmp_path: Path) -> None:
    root = _project(tmp_path, {"stages/a.py": "import pipeline.b", "pipeline/b.py": "import stages.a"})
    assert _list_own("a", root) == ["pipeline/b.py", "stages/a.py"]


def test_what_only_a_type_checker_imports_is_not_run(tmp_path: Path) -> None:
    """The interface of kinds names the gate's types: every stage would hang on the gate's code."""
    root = _project(
        tmp_path,
        {
            "stages/a.py": "if TYPE_CHECKING:\n    from pipeline.typed import T\nelse:\n    from pipeline.run import T",
            "pipeline/typed.py": "",
            "pipeline/run.py": "",
        },
    )
    assert _list_own("a", root) == ["pipeline/run.py", "stages/a.py"]


def test_of_a_kind_the_methods_count_that_the_stage_calls(tmp_path: Path) -> None:
    """Too few: an edit goes unnoticed. Too many: an edit of the report would quantise anew."""
    kind = (
        "from pipeline.shared import Settings\nclass Toy:\n    settings = Settings\n"
        "    def make(self):\n        from pipeline.making import make\n        make()\n"
        "    def judge(self):\n        from pipeline.judging import judge\n        judge()\n"
    )
    root = _project(
        tmp_path,
        {
            "stages/make.py": "from pipeline.products import KINDS\nKINDS['toy'].make()",
            "stages/judge.py": "from pipeline.listed import judge_all",
            "pipeline/listed.py": "from pipeline.products import KINDS\ndef judge_all():\n    KINDS['toy'].judge()",
            "pipeline/products/__init__.py": "import pipeline.products.toy\nimport pipeline.products.other",
            f"pipeline/products/{KIND}/__init__.py": kind,
            "pipeline/products/other/__init__.py": kind.replace("pipeline.", "pipeline.other_"),
            "pipeline/shared.py": "",
            "pipeline/making.py": "import pipeline.deep",
            "pipeline/judging.py": "",
            "pipeline/deep.py": "",
            "pipeline/other_making.py": "",
            "pipeline/other_shared.py": "",
        },
    )
    own = [f"pipeline/products/{KIND}/__init__.py", "pipeline/shared.py"]
    assert list_code("make", KIND, root) == ["pipeline/deep.py", "pipeline/making.py", *own, "stages/make.py"]
    assert list_code("judge", KIND, root) == ["pipeline/judging.py", "pipeline/listed.py", *own, "stages/judge.py"]


def test_the_digest_is_that_of_a_stages_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stage's edit, or a folder elsewhere, must make nothing stale; any edit of its own must."""
    files = {"stages/a.py": "import pipeline.x", "stages/b.py": "", "pipeline/x.py": "1"}
    before = _digest(_project(tmp_path / "before", files), monkeypatch, KIND)
    assert _digest(_project(tmp_path / "moved", files), monkeypatch, KIND) == before
    edited = _project(tmp_path / "after", files | {"pipeline/x.py": "2", "pipeline/unused.py": ""})
    after = _digest(edited, monkeypatch, KIND)
    assert after["a", KIND] != before["a", KIND] and after["b", KIND] == before["b", KIND]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project's own code in another folder."""
    for folder in ("pipeline", "stages"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize(
    ("edited", "changed"),
    [
        ("pipeline/products/images/rendering.py", {("optimize", "images"), ("evaluate", "images")}),
        ("pipeline/products/images/steps.py", {("optimize", "images")}),
        ("pipeline/products/images/scoring.py", {("evaluate", "images"), ("benchmark", "images")}),
        ("pipeline/products/vision/loading.py", {("optimize", "vision"), ("evaluate", "vision")}),
        ("pipeline/products/text/optimize/quantize.py", {("optimize", "text")}),
        ("pipeline/products/text/evals/perplexity.py", {("evaluate", "text")}),
        ("pipeline/products/text/benchmark/rounds.py", {("benchmark", "text")}),
        ("pipeline/report/markdown_report.py", {("compare", kind) for kind in KINDS}),
        ("pipeline/products/images/show/costs.py", {("compare", "images"), ("track", "images")}),
        ("pipeline/gate/decision.py", {(stage, kind) for kind in KINDS for stage in ("compare", "track", "release")}),
        ("pipeline/gate/standing.py", {("gate", kind) for kind in KINDS}),
    ],
)
def test_an_edit_reaches_its_own_kind_and_stage_alone(
    edited: str, changed: set[tuple[str, str]], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an edit for images evaluates every language model anew, and one of the gate's quantises."""
    before = _digest(copy, monkeypatch, *KINDS)
    with (copy / edited).open("a") as file:
        file.write("# edited\n")
    after = _digest(copy, monkeypatch, *KINDS)
    assert {key for key in before if after[key] != before[key]} == changed


def test_an_edit_of_any_file_for_images_changes_no_other_kind(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _digest(copy, monkeypatch, *KINDS)
    for path in [*(copy / "pipeline/images").glob("*.py"), copy / "pipeline/products/images/__init__.py"]:
        path.write_text(path.read_text() + "# edited\n")
    after = _digest(copy, monkeypatch, *KINDS)
    changed = {key for key in before if after[key] != before[key]}
    assert {kind for _, kind in changed} == {"images"} and {("optimize", "images"), ("evaluate", "images")} <= changed
