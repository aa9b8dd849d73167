"""A stage's code must not miss a file: it would not run again when that one changed."""

from __future__ import annotations

from pathlib import Path

from pipeline.stage_code import digest_stages, list_code, list_stages


def _project(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_follows_every_way_to_run_a_file(tmp_path: Path) -> None:
    root = _project(tmp_path, {
        "stages/__init__.py": "", "stages/cli.py": "",
        "stages/demo.py": "from stages.cli import run\nfrom pipeline.top import f\nimport json",
        "pipeline/top.py": "def f():\n    from pipeline.package import lazy\n    page, tables = 'page.jinja', 'tables'",
        "pipeline/page.jinja": "", "pipeline/other.jinja": "", "pipeline/tables/a.json": "{}",
        "pipeline/package/__init__.py": "",
        "pipeline/package/lazy.py": "import pipeline.deep\n",
        "pipeline/deep.py": "COMMAND = ['python', '-m', 'pipeline.started']\n",
        "pipeline/started.py": "", "pipeline/unused.py": "import pipeline.deep",
    })  # fmt: skip
    assert list_stages(root) == ["demo"]
    assert list_code("demo", root) == [
        "pipeline/deep.py", "pipeline/package/__init__.py", "pipeline/package/lazy.py", "pipeline/page.jinja",
        "pipeline/started.py", "pipeline/tables/a.json", "pipeline/top.py", "stages/__init__.py", "stages/cli.py",
        "stages/demo.py",
    ]  # fmt: skip


def test_ends_on_a_cycle(tmp_path: Path) -> None:
    root = _project(tmp_path, {"stages/a.py": "import pipeline.b", "pipeline/b.py": "import stages.a"})
    assert list_code("a", root) == ["pipeline/b.py", "stages/a.py"]


def test_the_digest_is_that_of_a_stages_own_code(tmp_path: Path) -> None:
    """Another stage's edit, or a folder elsewhere, must make nothing stale; any edit of its own must."""
    files = {"stages/a.py": "import pipeline.x", "stages/b.py": "", "pipeline/x.py": "1"}
    before = digest_stages(_project(tmp_path / "before", files))
    assert digest_stages(_project(tmp_path / "moved", files)) == before
    after = digest_stages(_project(tmp_path / "after", files | {"pipeline/x.py": "2", "pipeline/unused.py": ""}))
    assert after["a"] != before["a"] and after["b"] == before["b"]
