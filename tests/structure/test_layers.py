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

# A module may import from the layers above its own in this list, and from its own.
LAYERS = (
    (
        "errors",
        "digests",
        "differences",
        "files",
        "plain_text",
        "yaml_files",
        "fingerprints",
        "record_files",
        "speculation_records",
        "serving_records",
        "canary_records",
        "records",
        "settings",
        "text_params",
        "text_problems",
        "image_params",
        "network_params",
        "built_candidates",
        "image_serving",
        "network_serving",
        "serving_config",
        "gate.metrics",
        "gate.rates",
        "benchmark_records",
        "verdict_records",
        "medians",
        "recall",
        "detection_params",
        "detections",
        "average_precision",
        "tile_grid",
        "harm_stop",
        "sweep.settings",
    ),
    ("numerics", "environment", "timing", "memory_format", "worker_pool", "stage_code"),
    (
        "weight_files",
        "weight_folders",
        "network_files",
        "memory",
        "checkpoints",
        "drafts",
        "cases",
        "pictures",
        "evalsets",
    ),
    ("optimize", "serving"),
    ("evals", "evaluation_folder"),
    ("images", "networks"),
    ("first_turns",),
    (
        "preflight",
        "image_preflight",
        "network_preflight",
        "drift",
        "benchmark",
        "sweep.rendering",
        "suite_sizes",
        "staleness",
    ),
    ("product", "products"),
    ("params",),
    ("gate_preflight", "stage_inputs"),
)
PLANNING = ("suite_sizes", "gate_preflight")  # these ask the gate what it can prove
PLOTTED = ("gate.plots", "gate.guidance_plot", "gate.image_plots", "gate.network_plots", "gate.network_pictures")
# These judge and show records; the model is none of their business.
RECORDS_ONLY = (
    "__main__",
    "gate",
    "outcomes",
    "release",
    "tracking",
    "model_registry",
    "run_contents",
    "image_contents",
    "network_contents",
    "run_pictures",
    "predictions",
    "sweep.judging",
    "sweep.table",
    "sweep.plot",
)
# Leads to the kinds, and they to all work, but imports none of it: LIGHT_MODULES.
SETTINGS = "params"
HEAVY = ("torch", "transformers", "llmcompressor", "lm_eval", "datasets", "mlflow")
LIGHT_MODULES = (
    SETTINGS,
    "products",
    "stage_inputs",
    "preflight",
    "image_preflight",
    "network_preflight",
    "network_serving",
    "environment",
    "memory",
    "tile_grid",
    *RECORDS_ONLY,
)

MODULES = sorted((ROOT / "pipeline").rglob("*.py"))


def module_name(path: Path) -> str:
    """Name a module relative to pipeline: "gate.metrics"; a package is its folder's name."""
    return ".".join(path.relative_to(ROOT / "pipeline").with_suffix("").parts).removesuffix(".__init__")


def is_in(name: str, groups: tuple[str, ...]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def find_layer(name: str) -> int | None:
    return next((i for i, groups in enumerate(LAYERS) if is_in(name, groups)), None)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    name = module_name(path)
    imported = [module_name(p) for p in find_named(path, ROOT) if p.is_relative_to(ROOT / "pipeline")]
    packages = {name.rpartition(".")[0]} | {other for other in imported if other in ("gate", "__init__")}
    layer = find_layer(name)
    for other in set(imported) - packages:
        other_layer = find_layer(other)
        if is_in(name, RECORDS_ONLY) and layer is None:
            allowed = other_layer == 0 or is_in(other, RECORDS_ONLY) or other == SETTINGS
        else:
            assert layer is not None or path.name == "__init__.py", f"give pipeline.{name} a place in LAYERS"
            allowed = other_layer is not None and other_layer <= (layer or 0)
            allowed |= name in PLANNING and is_in(other, ("gate",))
            allowed |= is_in(name, ("products",)) and is_in(other, PLOTTED)
        assert allowed, f"pipeline.{name} imports pipeline.{other}, which is not below it"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_imports_its_work_only_when_asked(kind: str) -> None:
    """Every stage imports every kind, whose work takes seconds to import and may lack a library."""
    tree = ast.parse((ROOT / "pipeline/products" / kind / "__init__.py").read_text(encoding="utf-8"))
    imported = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [name.removeprefix("pipeline.") for name in imported if name.startswith("pipeline.")]
    assert names and not [name for name in names if find_layer(name) != 0 and name not in ("environment", "product")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_leads_to_no_other_kinds_work(kind: str) -> None:
    named = {module_name(p) for p in find_named(ROOT / "pipeline/products" / kind / "__init__.py", ROOT)}
    others = {
        "images": ("images", "image_preflight", "image_serving"),
        "vision": ("networks", "network_preflight"),
        "text": ("evals.evaluate", "optimize", "preflight", "benchmark"),
    }
    own = others.pop(kind)
    assert any(is_in(name, own) for name in named)
    assert not [name for name in named if any(is_in(name, groups) for groups in others.values())]


def test_no_module_imports_itself_in_a_circle() -> None:
    """A package's own file counts where it holds code: those of the kinds."""
    graph = {
        module_name(p): {
            module_name(q)
            for q in find_named(p, ROOT)
            if q.is_relative_to(ROOT / "pipeline")
            and (q.name != "__init__.py" or q.is_relative_to(ROOT / "pipeline/products"))
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


def test_gate_and_tracking_import_no_heavy_package() -> None:
    """The gate must answer in about a second, and on a machine without any of these."""
    names = [f"pipeline.{module_name(p)}" for p in MODULES if is_in(module_name(p), LIGHT_MODULES)]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(' '.join(n for n in {HEAVY!r} if n in sys.modules))"
    )
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == ""
