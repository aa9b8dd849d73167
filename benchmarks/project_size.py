"""How large is the project, and how deep do its imports go? For a change of layout: commits side by side.

    python -m benchmarks.project_size OLD [NEW]

NEW is HEAD. Prints a row a number. Import levels are the modules on the longest chain of imports inside pipeline/:
those of a module's own top level, as Python runs them, and of functions too.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from io import BytesIO
from pathlib import Path


def unpack(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a folder."""
    archive = subprocess.run(["git", "archive", commit], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def list_code(root: Path, folder: str) -> list[Path]:
    """List the Python files of a folder."""
    return sorted((root / folder).rglob("*.py"))


def count_lines(files: list[Path]) -> int:
    """Count the lines of files."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def count_levels(root: Path, *, everywhere: bool) -> int:
    """Count the modules on the longest chain of imports; a circle counts as one step.

    Args:
        root: of the project.
        everywhere: imports inside functions too, else those at the top level of a module.
    """
    files = list_code(root, "pipeline")
    names = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}
    open_modules: set[str] = set()

    @cache
    def measure(name: str) -> int:
        open_modules.add(name)
        below = [measure(n) for n in _list_imports(names[name], everywhere) if n in names and n not in open_modules]
        open_modules.discard(name)
        return 1 + max(below, default=0)

    sys.setrecursionlimit(10_000)
    return max(map(measure, names))


def _list_imports(path: Path, everywhere: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def measure_tree(root: Path) -> float:
    """Return the size of a commit's files in MiB."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) / 2**20


ROWS: dict[str, Callable[[Path], object]] = {
    "entries at the root of pipeline/": lambda root: (
        len([p for p in (root / "pipeline").iterdir() if p.name[0] != "_"]) + (root / "pipeline/__main__.py").is_file()
    ),
    "Python files at the root of pipeline/": lambda root: len(list((root / "pipeline").glob("*.py"))),
    "files in pipeline/": lambda root: len(list_code(root, "pipeline")),
    "lines of pipeline/": lambda root: count_lines(list_code(root, "pipeline")),
    "files in stages/": lambda root: len(list_code(root, "stages")),
    "lines of stages/": lambda root: count_lines(list_code(root, "stages")),
    "files in tests/": lambda root: len(list_code(root, "tests")),
    "lines of tests/": lambda root: count_lines(list_code(root, "tests")),
    "lines of README.md": lambda root: count_lines([root / "README.md"]),
    "lines of dvc.yaml": lambda root: count_lines([root / "dvc.yaml"]),
    "lines of dvc.lock": lambda root: count_lines([root / "dvc.lock"]),
    "import levels, at the top of modules": lambda root: count_levels(root, everywhere=False),
    "import levels, everywhere": lambda root: count_levels(root, everywhere=True),
    "files of the tree, MiB": lambda root: f"{measure_tree(root):.1f}",
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    options = parser.parse_args()
    print(f"| number | {options.old} | {options.new} |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        sides = [unpack(commit, Path(folder, str(i))) for i, commit in enumerate((options.old, options.new))]
        for name, measure in ROWS.items():
            values = [f"{value:,}" if isinstance(value := measure(side), int) else value for side in sides]
            print(f"| {name} | {values[0]} | {values[1]} |")


if __name__ == "__main__":
    main()
