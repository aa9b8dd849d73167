"""The modules of the user's own that a file of Python code imports, found without running it.

Follows imports anywhere in a file, functions included. Not covered: installed packages, which are recorded by
their versions, and modules whose names are put together while the program runs.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path


def list_modules(files: Iterable[Path]) -> list[Path]:
    """Return the files and all local modules that they import, directly or not.

    What lies beside the record of an installation is no local module: of `pip install --target`, or of the system.
    """
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots = [
        path
        for path in (Path(entry).resolve() for entry in sys.path)
        if path.is_dir() and not _is_below(path, installed) and not any(path.glob("*.dist-info"))
    ]
    waiting, seen = [path.resolve() for path in files], set()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += [] if _is_below(path, installed) else _find_imports(path, roots)
    return sorted(seen)


def _is_below(path: Path, folders: set[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _find_imports(path: Path, roots: list[Path]) -> list[Path]:
    files: list[Path] = []
    for level, name in _list_names(ast.parse(path.read_bytes())):
        # what is beside a task's code is looked for there, too: such code often adds its folder to sys.path
        folders = [path.parents[level - 1]] if level else [path.parent, *roots]
        parts = name.split(".")
        bases = (folder.joinpath(*parts[:i]) for folder in folders for i in range(1, len(parts) + 1))
        files += [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()]
    return [file.resolve() for file in files]


def _list_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield what is imported: how many folders up, none for an absolute import, and the dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.level, ".".join(filter(None, (node.module, alias.name)))) for alias in node.names)
