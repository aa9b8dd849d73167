"""The project files that a stage runs, found without running it, and their digest: what DVC reruns a stage by.

    python -m pipeline.stage_code evaluate    lists the files of a stage

Stage `env` writes the digests to build/env/code.json, and each stage of dvc.yaml depends on its own; what a stage keeps
of a run that was killed is found again under the same digest only. Listed there file
by file, as sixty dependencies of each candidate's stages, they made dvc.lock so large that writing it took DVC five
seconds after every stage.

Follows imports anywhere in a file, functions included, dotted names of project modules in strings (a server is started
as `python -m pipeline...`), and templates and folders of data that a file names beside itself. A package's __init__.py
counts: Python runs it on the way. Not covered: modules whose names are put together while the program runs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pipeline.digests import digest_file, digest_json

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "stages")
NOT_A_STAGE = ("__init__.py", "cli.py")


def digest_stages(root: Path) -> dict[str, str]:
    """Return the digest of each stage's code, under the name of its file in stages/."""
    code = {stage: list_code(stage, root) for stage in list_stages(root)}
    digests = {path: digest_file(root / path) for path in set().union(*code.values())}
    return {stage: digest_json({path: digests[path] for path in paths}) for stage, paths in code.items()}


def digest_code(stage: str) -> str:
    """Return the digest of a stage's code as it lies on disk: what other code made is not mixed with what this makes.

    It is read anew, as the file of stage `env` may be older than the code.
    """
    return digest_json({path: digest_file(ROOT / path) for path in list_code(stage, ROOT)})


def list_stages(root: Path) -> list[str]:
    """Name the stages: one file each."""
    return sorted(path.stem for path in (root / "stages").glob("*.py") if path.name not in NOT_A_STAGE)


def list_code(stage: str, root: Path) -> list[str]:
    """List every project file that a stage can run or read beside its code, relative to the root and sorted."""
    start = root / "stages" / f"{stage}.py"
    seen, waiting = {start}, [start]
    while waiting:
        new = find_named(waiting.pop(), root) - seen
        seen |= new
        waiting += new
    return sorted(path.relative_to(root).as_posix() for path in seen)


@cache
def find_named(path: Path, root: Path) -> frozenset[Path]:
    """List the project files that a file imports or names in a string; what is not Python names none."""
    if path.suffix != ".py":
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
            names.add(node.value)
    with_parents = {".".join(parts[:i]) for name in names if (parts := name.split("."))
                    for i in range(1, len(parts) + 1) if find_module(name, root)
                    or find_module(name.rpartition(".")[0], root)}  # fmt: skip
    found = {find_module(name, root) for name in with_parents}
    found.update(file for name in names if "/" not in name for file in _list_data(path.parent, name))
    return frozenset(file for file in found if file is not None and file != path)


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
    print("\n".join(list_code(sys.argv[1], Path())))
