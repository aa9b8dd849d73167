"""Products by params.yaml alone: one more of a known kind beside the others, and a project that has a single one.

A folder, a stage or a module that takes the shipped products for granted breaks here: DVC would complain of outputs
that are not there, or one product would write into the folders of another.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from pipeline.records.digests import digest_folder
from tests.fakes.fake_vllm import make_handler, score
from tests.fakes.project_copy import ProjectCopy, list_ran
from tests.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FIRST, SECOND = "agent", "second"
STAGES_OF_CANDIDATES = ("optimize", "evaluate")
STAGES_OF_PRODUCTS = ("benchmark", "compare", "track", "gate", "release")
ONE_OF_EACH_KIND = ("agent", "shots", "upscaler")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> ProjectCopy:
    """The project as git has it."""
    return ProjectCopy.make(tmp_path_factory.mktemp("products"))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The address of a server of which every text is as likely as any: one without weights saves half a minute."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "likely"}]}
        if path == "/tokenize":
            return 200, {"tokens": [[len(word) for word in text.split()] for text in body["prompt"]]}
        return (200, score(body)) if path == "/v1/completions" else (404, {"detail": "Not Found"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(answer))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def second(clone: ProjectCopy, endpoint: str) -> subprocess.CompletedProcess[str]:
    """A run of a second product of kind text, added as docs/your-model.md says."""
    clone.keep_product(FIRST)  # beside it, others are checked and their pictures drawn for nothing
    data = clone.read_params()
    engine = {"kind": "openai", "base_url": endpoint, "model": "likely"}
    section = data["products"][FIRST]
    tolerances = {"prose/perplexity_per_token": {"overall": 0.02}}
    data["products"][SECOND] = section | {
        "reference": SECOND,
        "release": [f"{SECOND}-again"],
        "evals": {"prose": section["evals"]["prose"]},
        "gate": {"alpha": 0.05, "on_inconclusive": "block", "tolerances": tolerances},
        "benchmark": section["benchmark"] | {"candidates": []},
    }
    for name in (SECOND, f"{SECOND}-again"):
        data["candidates"][name] = {"product": SECOND, "checkpoint": "models/agent", "steps": [], "engine": engine}
    clone.write_params(data)
    return clone.run_dvc("repro", f"release@{SECOND}")


def test_a_second_product_runs_alone(clone: ProjectCopy, second: subprocess.CompletedProcess[str]) -> None:
    assert second.returncode == 0, second.stdout
    assert sorted(list_ran(second.stdout)) == list_stages(SECOND, [SECOND, f"{SECOND}-again"])


def test_its_results_lie_by_its_name(clone: ProjectCopy, second: subprocess.CompletedProcess[str]) -> None:
    for path in ("build/{}/gate.ok", "reports/{}/report.md", "metrics/{}/second.json", "release/{}/manifest.json"):
        assert (clone.root / path.format(SECOND)).is_file(), second.stdout


def test_nothing_of_the_first_is_touched(clone: ProjectCopy, second: subprocess.CompletedProcess[str]) -> None:
    for folder in ("metrics", "reports", "release"):
        assert {path.name for path in (clone.root / folder).iterdir()} == {FIRST, SECOND}
        assert digest_folder(clone.root / folder / FIRST) == digest_folder(ROOT / folder / FIRST)
    assert not (clone.root / "build" / FIRST).exists()


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> ProjectCopy:
    """A clone for projects of one product, one after the other."""
    return ProjectCopy.make(tmp_path_factory.mktemp("single"))


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_project_may_have_one_product_of_any_kind(single: ProjectCopy, name: str) -> None:
    shutil.rmtree(single.root / "build", ignore_errors=True)
    for folder in ("release", "reports", "metrics"):
        shutil.copytree(ROOT / folder, single.root / folder, dirs_exist_ok=True)
    shutil.copyfile(ROOT / "params.yaml", single.root / "params.yaml")
    single.keep_product(name)
    done = single.run_dvc("repro", "env")
    assert done.returncode == 0 and "does not exist" not in done.stdout, done.stdout
    inputs = single.read_json("build/env/inputs.json")
    candidates = list(single.read_params()["candidates"])
    assert inputs.keys() == {*STAGES_OF_CANDIDATES, *STAGES_OF_PRODUCTS}
    assert all(inputs[stage].keys() == set(candidates) for stage in STAGES_OF_CANDIDATES)
    assert all(inputs[stage].keys() == {name} for stage in STAGES_OF_PRODUCTS)
    listed = single.run_dvc("stage", "list", "--name-only")
    assert sorted(listed.stdout.split()) == list_stages(name, candidates), listed.stdout


def list_stages(product: str, candidates: list[str]) -> list[str]:
    """Return the stages that make one product."""
    by_candidate = [f"{stage}@{name}" for stage in STAGES_OF_CANDIDATES for name in candidates]
    return sorted(["env", *by_candidate, *(f"{stage}@{product}" for stage in STAGES_OF_PRODUCTS)])
