"""Imports point one way, and what must stay light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from pipeline.products import KINDS
from pipeline.running.stage_code import find_named
from tests.paths import ROOT

# An entry of pipeline/ may import from those above it, and from its own line.
LAYERS = (
    ("errors",),
    ("settings", "records"),
    ("numerics", "evalsets"),
    ("running",),
    ("gate",),
    ("report",),
    ("product",),
    ("products",),
    ("release", "outcomes"),
    ("__main__",),
)
ENGINES = ("transformers", "vllm", "openai", "diffusers", "torch")  # of one kind each
# Modules outside of products/ that hold the name of a kind, of an eval kind or of an engine, and why they may
NAMING = {
    "errors": "pydantic's word for a str",
    "evalsets.cards": "a format of cases, which evals of that name read",
    "evalsets.cases": "formats of cases, which evals of these names read",
    "gate.influence": "a field of the matched detections",
    "gate.plan": "a word of a sentence",
    "gate.verdicts": "policies of old releases",
    "records.detections": "a word of a message",
    "records.reasons": "a field",
    "records.serving": "how a server is run, which records of old releases hold",
    "records.evaluations": "how a server is run, which records of old releases hold",
    "report.markdown": "what a block of code is highlighted as",
    "report.mlflow_runs.picture_view": "a section of MLflow's charts",
    "running.environment": "libraries",
    "running.gpu_proof": "a library",
    "running.journal": "a field",
    "running.made_files": "libraries",
    "running.shards": "a field",
}
OLD_FORMS = ("outcomes", "release")  # read records of others and bundles of old releases
HEAVY = ("torch", "transformers", "llmcompressor", "lm_eval", "datasets", "mlflow")
# What judges, shows and releases, and what checks settings before any work: a second, on a machine without HEAVY
LIGHT = (
    "__main__",
    "settings",
    "records",
    "evalsets",
    "gate",
    "report",
    "product",
    "products",
    "products.params",
    "products.inputs",
    "products.text.preflight",
    "products.text.memory",
    "products.text.findings",
    "products.text.show",
    "products.images.preflight",
    "products.images.findings",
    "products.images.show",
    "products.vision.preflight",
    "products.vision.findings",
    "products.vision.show",
    "running.environment",
    "running.gpu_proof",
    "numerics.tile_grid",
    "release",
    "outcomes",
)

MODULES = sorted((ROOT / "pipeline").rglob("*.py"))


def module_name(path: Path) -> str:
    """Name a module relative to pipeline: "gate.metrics"; a package is its folder's name."""
    return ".".join(path.relative_to(ROOT / "pipeline").with_suffix("").parts).removesuffix(".__init__")


def rank(name: str) -> int:
    """Return the layer of a module, counted from the top."""
    return next(i for i, entries in enumerate(LAYERS) if name.split(".")[0] in entries)


def list_imports(path: Path) -> set[str]:
    """Name the modules of pipeline/ that a file leads to; a package is no more than its folder."""
    found = {q for q in find_named(path, ROOT) if q.is_relative_to(ROOT / "pipeline")}
    return {module_name(q) for q in found if q.name != "__init__.py" or q.parent.parent.name == "products"}


def test_the_root_has_few_entries_and_each_has_its_place() -> None:
    entries = {p.stem for p in (ROOT / "pipeline").iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert entries - {"__init__"} == {entry for entries in LAYERS for entry in entries} and len(entries) <= 13


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    name = module_name(path)
    upward = {(name, other) for other in list_imports(path) if name and rank(other) > rank(name)}
    assert not upward


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_kind_is_named_by_the_list_of_kinds_alone(path: Path) -> None:
    own = module_name(path).split(".")
    if own[0] in ("__main__", "outcomes", "release"):
        allowed: set[str] = set()
    else:
        allowed = {own[1]} if own[0] == "products" and len(own) > 1 else set()
    named = {other.split(".")[1] for other in list_imports(path) if other.startswith("products.")} & set(KINDS)
    assert not named - allowed or path == ROOT / "pipeline/products/__init__.py"


def list_kinds_named(path: Path) -> set[str]:
    """List the names of kinds, of their evals and of their engines that are string constants of a file."""
    names = {*KINDS, *ENGINES, *(name for kind in KINDS.values() for name in kind.evals)}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in names}


def test_what_judges_and_shows_every_kind_names_none() -> None:
    """A new kind would be forgotten there, and an edit for one kind would make stale what another has."""
    shared = [p for p in MODULES if module_name(p).split(".")[0] not in ("products", *OLD_FORMS)]
    naming = {module_name(p) for p in shared if list_kinds_named(p)}
    assert naming == set(NAMING), "a kind gives what belongs to it: see pipeline/product.py"
    assert not [p.name for p in (ROOT / "stages").glob("*.py") if list_kinds_named(p)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_imports_its_work_only_when_asked(kind: str) -> None:
    """Every stage imports every kind, whose work takes seconds to import and may lack a library."""
    tree = ast.parse((ROOT / "pipeline/products" / kind / "__init__.py").read_text(encoding="utf-8"))
    imported = {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
    own = f"pipeline.products.{kind}."
    light = {f"{own}settings", f"{own}detection_settings", "pipeline.product", "pipeline.running.environment"}
    assert {name for name in imported if name.startswith("pipeline.")} - light <= {"pipeline.settings.base"}


def test_no_module_imports_itself_in_a_circle() -> None:
    """A package's own file counts where it holds code: those of the kinds."""
    graph = {
        module_name(p): {
            module_name(q)
            for q in find_named(p, ROOT)
            if q.is_relative_to(ROOT / "pipeline") and q.name != "__init__.py"
        }
        for p in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circular imports: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_the_library_knows_nothing_of_stages_and_argv(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not any(p.is_relative_to(ROOT / "stages") for p in find_named(path, ROOT))
    is_started = 'if __name__ == "__main__"' in text  # a server's launcher is a process of its own
    assert is_started or not any(word in text for word in ("sys.argv", "sys.exit("))


def test_only_tracking_imports_mlflow() -> None:
    importers = set()
    for path in MODULES + sorted((ROOT / "stages").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            )
            if any(name.split(".")[0] == "mlflow" for name in names):
                importers.add(path.relative_to(ROOT).as_posix())
    assert importers == {"pipeline/report/mlflow_runs/tracking.py"}


def is_light(name: str) -> bool:
    """Say whether a module is one of LIGHT, or lies in a folder of them; of products only those that are named."""
    whole = {entry for entry in LIGHT if entry != "products" and "." not in entry}
    return name in LIGHT or name.split(".")[0] in whole


def test_gate_and_tracking_import_no_heavy_package() -> None:
    """The gate must answer in about a second, and on a machine without any of these."""
    names = [f"pipeline.{module_name(p)}" for p in MODULES if is_light(module_name(p))]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(' '.join(n for n in {HEAVY!r} if n in sys.modules))"
    )
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == ""
