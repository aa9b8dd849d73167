"""The project files that a stage runs for a kind of product, found without running it, and their digest.

    python -m pipeline.running.stage_code evaluate text    lists them

Stage `env` writes the digests to build/env/inputs.json, and each stage of dvc.yaml depends on its own; what a stage
keeps of a run that was killed is found again under the same digest only. Listed file by file, as sixty dependencies of
each candidate's stages, they made dvc.lock so large that writing it took DVC five seconds after every stage.

Follows imports anywhere in a file, functions included, dotted names of project modules in strings (a server is started
as `python -m pipeline...`), and templates and folders of data that a file names beside itself. A package's __init__.py
counts: Python runs it on the way. What only a type checker imports does not. The list of kinds leads to none of them:
of the one kind, the methods count that the stage's own files call by name. Not covered: modules whose names are put
together while the program runs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from pipeline.records.digests import digest_file, digest_json

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipeline", "stages")
PRODUCTS = Path("pipeline/products")
NOT_A_STAGE = ("__init__.py", "cli.py")


def digest_code(stage: str, kind: str) -> str:
    """Return the digest of a stage's code as it lies on disk: what other code made is not mixed with what this makes.

    It is read anew, as the file of stage `env` may be older than the code.
    """
    return digest_json({path: digest_file(ROOT / path) for path in list_code(stage, kind, ROOT)})


def list_stages(root: Path) -> list[str]:
    """Name the stages: one file each."""
    return sorted(path.stem for path in (root / "stages").glob("*.py") if path.name not in NOT_A_STAGE)


def list_code(stage: str, kind: str, root: Path) -> list[str]:
    """List every project file that a stage can run, or read beside its code, for products of a kind.

    Args:
        stage: name of its file in stages/.
        kind: name of its folder in pipeline/products/.
        root: of the project, which the paths are relative to.
    """
    entry = root / PRODUCTS / kind / "__init__.py"
    seen = _follow({root / "stages" / f"{stage}.py"}, root)
    called = {name for path in seen for name in _list_calls(path)}
    seen |= {entry} | _follow(_list_led_to(entry, called, root), root)
    return sorted(path.relative_to(root).as_posix() for path in seen)


def _follow(start: Collection[Path], root: Path) -> set[Path]:
    """Return files and all that they lead to, short of the list of kinds and what a kind's own file leads to."""
    gates = {root / PRODUCTS / "__init__.py", *root.glob(f"{PRODUCTS.as_posix()}/*/__init__.py")}
    seen = set(start) - gates
    waiting = list(seen)
    while waiting:
        new = find_named(waiting.pop(), root) - seen - gates
        seen |= new
        waiting += new
    return seen


@cache
def _list_calls(path: Path) -> frozenset[str]:
    """List the names that a file calls as methods."""
    if path.suffix != ".py":
        return frozenset()
    return frozenset(
        node.func.attr
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    )


def _list_led_to(entry: Path, called: Collection[str], root: Path) -> frozenset[Path]:
    """List what a kind's own file names, less what stands in methods that nobody calls."""
    tree = _parse(entry)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            node.body = [part for part in node.body if not isinstance(part, ast.FunctionDef) or part.name in called]
    return _find_files(tree, entry, root)


@cache
def find_named(path: Path, root: Path) -> frozenset[Path]:
    """List the project files that a file imports or names in a string; what is not Python names none."""
    return _find_files(_parse(path), path, root) if path.suffix == ".py" else frozenset()


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _find_files(tree: ast.Module, path: Path, root: Path) -> frozenset[Path]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []  # no stage runs it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
            names.add(node.value)
    with_parents = {
        ".".join(parts[:i])
        for name in names
        if (parts := name.split("."))
        for i in range(1, len(parts) + 1)
        if find_module(name, root) or find_module(name.rpartition(".")[0], root)
    }
    files = {find_module(name, root) for name in with_parents}
    files.update(file for name in names if "/" not in name for file in _list_data(path.parent, name))
    return frozenset(file for file in files if file is not None and file != path)


def find_module(name: str, root: Path) -> Path | None:
    """Return the file of a project module, or None when the name is something else."""
    if name.split(".")[0] not in PACKAGES:
        return None
    base = root.joinpath(*name.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def _list_data(folder: Path, name: str) -> Iterator[Path]:
    """List the template of a name, or the files of a folder without code."""
    path = folder / name
    if name.endswith(".jinja") and path.is_file():
        yield path
    elif name and name.isidentifier() and path.is_dir() and not any(path.glob("*.py")):
        yield from (file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


if __name__ == "__main__":
    print("\n".join(list_code(sys.argv[1], sys.argv[2], Path())))
