"""The registry: one version per release, the alias on what went out last, and nothing new the second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.report.mlflow_runs.model_registry import RELEASED, ReleasedVersion, register_versions
from pipeline.report.mlflow_runs.tracking import open_store
from tests.fakes.synthetic_records import PRODUCT


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder; MLflow's store is made by the first test that needs it."""
    return tmp_path_factory.mktemp("registry")


def release(root: Path, *names: str, verdict: str, product: str = PRODUCT) -> list[str]:
    versions = [
        ReleasedVersion(
            name, Path("build", name), {"gate": "pass", "verdict_sha256": verdict, "fingerprint": f"of {name}"}
        )
        for name in names
    ]
    return register_versions(versions, root, product=product)


def read(root: Path) -> dict[str, tuple[str | None, dict[str, Any]]]:
    """Return by model: the version that the alias names, and the tags by version."""
    with open_store(root) as client:
        return {
            m.name: (
                str(m.aliases[RELEASED]) if RELEASED in m.aliases else None,
                {str(v.version): v.tags for v in client.search_model_versions(f"name = '{m.name}'")},
            )
            for m in client.search_registered_models()
        }


def test_versions_follow_releases(store: Path) -> None:
    assert release(store, "int4", verdict="one") == [f"'quantgate agent int4' version 1 is {RELEASED!r}, new"]
    assert release(store, "int4", verdict="one") == [f"'quantgate agent int4' version 1 is {RELEASED!r}"]
    release(store, "int4", verdict="two")
    alias, versions = read(store)["quantgate agent int4"]
    assert alias == "2" and versions["2"]["verdict_sha256"] == "two" and versions["2"]["gate"] == "pass"
    release(store, "int4", verdict="one")  # the earlier release again
    assert read(store)["quantgate agent int4"][0] == "1" and len(read(store)["quantgate agent int4"][1]) == 2
    release(store, "bf16", verdict="six", product="shots")
    release(store, "int8", verdict="three")
    models = read(store)
    assert models["quantgate agent int4"][0] is None, "what is not released any more must not be called released"
    assert models["quantgate agent int8"][0] == "1" and models["quantgate shots bf16"][0] == "1"
