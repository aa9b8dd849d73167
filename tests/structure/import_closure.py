"""The project files that a stage runs, found without running it, so that dvc.yaml can list them.

    python tests/structure/import_closure.py             every stage
    python tests/structure/import_closure.py evaluate    one stage, ready to paste under `deps:`

Follows imports anywhere in a file, functions included, dotted names of project modules in strings
(a server is started as `python -m pipeline...`), and templates that a file names beside itself. A
package's __init__.py counts: Python runs it on the way. Only files under pipeline/ and stages/ are
listed.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipeline", "stages")
NOT_A_STAGE = ("__init__.py", "cli.py")


def list_stages(root: Path = ROOT) -> list[str]:
    """Name the stages: one file each."""
    return sorted(path.stem for path in (root / "stages").glob("*.py") if path.name not in NOT_A_STAGE)


def find_module(name: str, root: Path = ROOT) -> Path | None:
    """Return the file of a project module, or None when the name is something else."""
    if name.split(".")[0] not in PACKAGES:
        return None
    base = root.joinpath(*name.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


@cache
def direct_imports(path: Path, root: Path = ROOT) -> frozenset[Path]:
    """List the project files that a file imports or names in a string; a template has none."""
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
    found |= {path.with_name(name) for name in names if name.endswith(".jinja") and path.with_name(name).is_file()}
    return frozenset(p for p in found if p is not None and p != path)


def import_closure(stage: str, root: Path = ROOT) -> list[str]:
    """List every project file that a stage can run, relative to the root and sorted."""
    start = root / "stages" / f"{stage}.py"
    seen, waiting = {start}, [start]
    while waiting:
        new = direct_imports(waiting.pop(), root) - seen
        seen |= new
        waiting += new
    return sorted(path.relative_to(root).as_posix() for path in seen)


if __name__ == "__main__":
    for stage in sys.argv[1:] or list_stages():
        print(f"# {stage}")
        print("\n".join(f"      - {path}" for path in import_closure(stage)))
