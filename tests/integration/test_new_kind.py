"""A kind of product that the project does not know goes from `dvc repro` to a release, as a folder and its line.

The kind is `tests/fakes/embeddings`: encoders of sentences, judged by the passages that they find. What assumes one of
the shipped kinds in the gate, the report, the records, MLflow, a stage or dvc.yaml breaks here.
"""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.records.digests import digest_file
from tests.fakes.project_copy import ProjectCopy, list_ran
from tests.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KIND, PRODUCT = "embeddings", "finder"
LIST = Path("pipeline/products/__init__.py")
IMPORT = "from pipeline.products.embeddings import EmbeddingsKind\n"
BEFORE_IMPORT, BEFORE_ENTRY = "from pipeline.products.images import", '"images": ImagesKind()'
NUM_CASES = 200
PARAMS: dict[str, dict[str, Any]] = {
    "products": {
        PRODUCT: {
            "kind": KIND,
            "reference": "full",
            "release": ["rounded"],
            "evals": {"passages": {"kind": "retrieval", "evalset": "evalsets/passages"}},
            "gate": {
                "alpha": 0.05,
                "on_inconclusive": "block",
                "tolerances": {
                    "passages/recall_at_1": {"overall": 0.08, "buckets": {"short": 0.15}},
                    "passages/recall_at_10": {"overall": 0.05},
                },
            },
        }
    },
    "candidates": {
        "full": {"product": PRODUCT, "checkpoint": "models/finder", "steps": []},
        "rounded": {"product": PRODUCT, "checkpoint": "models/finder", "steps": [{"kind": "round", "bits": 8}]},
        "cut": {
            "product": PRODUCT,
            "checkpoint": "models/finder",
            "steps": [{"kind": "truncate", "num_dimensions": 4}],
        },
    },
}


def add_kind(root: Path) -> None:
    """Do what CONTRIBUTING.md says of a kind: a folder, and its entry in the list."""
    source = ROOT / "tests/fakes" / KIND
    shutil.copytree(source, root / "pipeline/products" / KIND, ignore=shutil.ignore_patterns("__pycache__"))
    text = (root / LIST).read_text(encoding="utf-8")
    for line, added in ((BEFORE_IMPORT, IMPORT), (BEFORE_ENTRY, f'"{KIND}": EmbeddingsKind(), ')):
        assert text.count(line) == 1
        text = text.replace(line, added + line)
    (root / LIST).write_text(text, encoding="utf-8")


def write_passages(folder: Path) -> None:
    """Write passages of random words, and queries that hold some of their words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 8))) for _ in range(120)]
    cases = []
    for i in range(NUM_CASES):
        passage = draw.sample(words, 12)
        size, name = (5, "short") if i % 2 else (8, "long")
        query = " ".join(draw.sample(passage, size))
        cases.append({"id": f"{i}", "cluster": f"{i}", "buckets": [name], "query": query, "passage": " ".join(passage)})
    folder.mkdir()
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases), encoding="utf-8")
    card = {
        "name": folder.name,
        "version": "1",
        "licence": "CC0-1.0",
        "kind": "retrieval",
        "description": "random words",
        "made_by": "tests",
        "cluster": "passage",
    }
    (folder / "card.yaml").write_text(json.dumps(card), encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> ProjectCopy:
    """A copy with the kind, and one product of it alone; nothing has run in it."""
    project = ProjectCopy.make(tmp_path_factory.mktemp("kind"))
    for name in project.read_params()["products"]:
        for folder in ("release", "reports", "metrics"):
            shutil.rmtree(project.root / folder / name, ignore_errors=True)
    add_kind(project.root)
    project.write_params(PARAMS)
    write_passages(project.root / "evalsets/passages")
    write = (
        "from pathlib import Path; from pipeline.products.embeddings.encoder import write_encoder; "
        "write_encoder(Path('models/finder'), num_hashes=512, num_dimensions=64, seed=0)"
    )
    for command in (("-c", write), ("-m", "evalsets.seal", "evalsets/passages")):
        done = project.run(sys.executable, *command)
        assert done.returncode == 0, done.stdout
    return project


@pytest.fixture(scope="module")
def passed(project: ProjectCopy) -> subprocess.CompletedProcess[str]:
    """The first run."""
    return project.run_dvc("repro")


@pytest.fixture(scope="module")
def failed(project: ProjectCopy, passed: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """A run after a candidate with too few dimensions took the place of the released one."""
    data = project.read_params()
    data["products"][PRODUCT]["release"] = ["cut"]
    project.write_params(data)
    return project.run_dvc("repro")


def test_all_stages_run_and_the_gate_lets_the_release_through(
    project: ProjectCopy, passed: subprocess.CompletedProcess[str]
) -> None:
    assert passed.returncode == 0, passed.stdout
    ran = list_ran(passed.stdout)
    by_candidate = [f"{stage}@{name}" for stage in ("optimize", "evaluate") for name in PARAMS["candidates"]]
    by_product = [f"{stage}@{PRODUCT}" for stage in ("benchmark", "compare", "track", "gate", "release")]
    assert sorted(ran) == sorted(["env", *by_candidate, *by_product])
    gate = project.read_json(f"build/{PRODUCT}/gate.ok")
    assert gate["release"]["rounded"]["outcome"] == "pass"


def test_what_is_reported_is_of_this_kind(project: ProjectCopy, passed: subprocess.CompletedProcess[str]) -> None:
    report = (project.root / f"reports/{PRODUCT}/report.md").read_text(encoding="utf-8")
    page = (project.root / f"build/{PRODUCT}/report.html").read_text(encoding="utf-8")
    metrics = project.read_json(f"metrics/{PRODUCT}/rounded.json")
    assert metrics["passages"]["recall_at_10"] > 0.9 and metrics["passages"]["n"] == NUM_CASES
    for text in (report, page):
        assert "passages/recall_at_1 [short]" in text
        assert not any(word in text.lower() for word in ("image", "picture", "network", "token")), text


def test_mlflow_holds_a_run_a_candidate(project: ProjectCopy, passed: subprocess.CompletedProcess[str]) -> None:
    with sqlite3.connect(project.root / "mlflow.db") as store:
        metrics = dict(
            store.execute(
                "SELECT runs.name, value FROM runs JOIN latest_metrics USING (run_uuid) "
                "WHERE key = 'passages/recall_at_1_percent' AND lifecycle_stage = 'active'"
            ).fetchall()
        )
        params = dict(
            store.execute("SELECT runs.name, value FROM runs JOIN params USING (run_uuid) WHERE key = 'steps'")
        )
    assert metrics.keys() == PARAMS["candidates"].keys()
    assert metrics["full"] > 80 > 20 > metrics["cut"]
    assert "8" in params["rounded"] and "4" in params["cut"]


def test_the_release_verifies_without_the_weights(
    project: ProjectCopy, passed: subprocess.CompletedProcess[str]
) -> None:
    done = project.run(sys.executable, "-m", "scripts.verify", f"release/{PRODUCT}")
    assert done.returncode == 0, done.stdout
    card = (project.root / f"release/{PRODUCT}/cards/rounded.md").read_text(encoding="utf-8")
    assert "sentence-similarity" in card


def test_too_few_dimensions_fail_the_gate(project: ProjectCopy, failed: subprocess.CompletedProcess[str]) -> None:
    assert failed.returncode == 255, failed.stdout
    assert list_ran(failed.stdout) == ["env", *(f"{stage}@{PRODUCT}" for stage in ("compare", "track", "gate"))]
    assert "FAIL" in failed.stdout and "passages/recall_at_10" in failed.stdout
    assert not (project.root / f"build/{PRODUCT}/gate.ok").exists()
    cases = project.read_json(f"reports/{PRODUCT}/explanation.json")["candidates"][0]["flips"]
    assert cases[0]["kind"] == "loss" and cases[0]["reference"] != cases[0]["candidate"]


def test_nothing_else_of_the_project_was_touched(
    project: ProjectCopy, failed: subprocess.CompletedProcess[str]
) -> None:
    theirs, ours = list_code(project.root), list_code(ROOT)
    changed = {path for path in ours if theirs.get(path) != ours[path]}
    added = {path for path in theirs.keys() - ours.keys()}
    assert changed == {LIST}
    assert added and all(path.is_relative_to(f"pipeline/products/{KIND}") for path in added)
    lines = [(root / LIST).read_text(encoding="utf-8").splitlines() for root in (ROOT, project.root)]
    assert len(lines[1]) - len(lines[0]) == 1 and len(set(lines[1]) - set(lines[0])) == 2


def list_code(root: Path) -> dict[Path, str]:
    """Return the digest of each file that a kind might have to touch."""
    files = [root / "dvc.yaml"] + [path for name in ("pipeline", "stages") for path in (root / name).rglob("*.*")]
    return {
        path.relative_to(root): digest_file(path)
        for path in files
        if path.is_file() and "__pycache__" not in path.parts
    }
