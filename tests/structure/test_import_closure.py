"""The closure must not miss a file: a stage whose code changed would then not run again."""

from __future__ import annotations

from pathlib import Path

from tests.structure.import_closure import import_closure, list_stages


def _project(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_follows_every_way_to_run_a_file(tmp_path: Path) -> None:
    root = _project(tmp_path, {
        "stages/__init__.py": "", "stages/cli.py": "",
        "stages/demo.py": "from stages.cli import run\nfrom pipeline.top import f\nimport json",
        "pipeline/top.py": "def f():\n    from pipeline.package import lazy\n",
        "pipeline/package/__init__.py": "",
        "pipeline/package/lazy.py": "import pipeline.deep\n",
        "pipeline/deep.py": "COMMAND = ['python', '-m', 'pipeline.started']\n",
        "pipeline/started.py": "", "pipeline/unused.py": "import pipeline.deep",
    })  # fmt: skip
    assert list_stages(root) == ["demo"]
    assert import_closure("demo", root) == [
        "pipeline/deep.py", "pipeline/package/__init__.py", "pipeline/package/lazy.py", "pipeline/started.py",
        "pipeline/top.py", "stages/__init__.py", "stages/cli.py", "stages/demo.py",
    ]  # fmt: skip


def test_ends_on_a_cycle(tmp_path: Path) -> None:
    root = _project(tmp_path, {"stages/a.py": "import pipeline.b", "pipeline/b.py": "import stages.a"})
    assert import_closure("a", root) == ["pipeline/b.py", "stages/a.py"]
