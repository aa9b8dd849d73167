"""What stages depend on: no kind can take the digest of the code out of it, and the order of settings counts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.products import inputs
from pipeline.products.params import get_product, load_params
from pipeline.products.text.settings import TextProduct
from pipeline.products.vision.settings import VisionProduct
from pipeline.records.evaluations import BuiltCandidate, Checkpoint
from pipeline.records.record_files import read_record, write_record
from pipeline.release.manifest import Manifest
from pipeline.running.stage_code import digest_code
from pipeline.settings.base import Product
from tests.paths import ROOT


def test_the_code_counts_whatever_a_kind_calls_its_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_inputs(*_: Any) -> dict[str, Any]:
        return {"evaluate": {"people": {"code": "forged", "cases": 1}}}

    monkeypatch.setattr(inputs, "_list_inputs", list_inputs)
    params = load_params(ROOT / "params.yaml")
    only = type(params)({"people": params.products["people"]})
    watched = inputs.digest_inputs(only, ROOT)["evaluate"]["people"]
    assert watched["code"] == digest_code("evaluate", "vision") and "cases" in watched


def test_another_first_tolerance_is_another_input() -> None:
    params = load_params(ROOT / "params.yaml")
    product = params.products["people"]
    tolerances = dict(reversed(product.gate.tolerances.items()))
    turned = product.model_copy(update={"gate": product.gate.model_copy(update={"tolerances": tolerances})})
    before, after = (
        inputs.digest_inputs(type(params)({"people": p}), ROOT)["compare"]["people"] for p in (product, turned)
    )
    assert before["code"] == after["code"] and before["settings"] != after["settings"]


def test_other_weights_make_their_candidates_stale(tmp_path: Path) -> None:
    """No file of dvc.yaml says so: a checkpoint is none of its dependencies."""
    project = copy_inputs(tmp_path)
    params = load_params(project / "params.yaml")
    before = inputs.digest_inputs(params, project)["optimize"]
    with (project / "models/agent/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    after = inputs.digest_inputs(params, project)["optimize"]
    stale = {name for name, watched in after.items() if watched != before[name]}
    assert stale == {name for name, c in params.products["agent"].candidates.items() if c.checkpoint == "models/agent"}
    assert all(after[name]["weights"] != before[name]["weights"] for name in stale)


def copy_inputs(folder: Path) -> Path:
    """Copy the files that settings name."""
    (folder / "evalsets").symlink_to(ROOT / "evalsets")
    (folder / "models").mkdir()
    for path in (ROOT / "models").iterdir():
        (folder / "models" / path.name).symlink_to(path)
    (folder / "models/agent").unlink()  # it is written to: else the project's own would be
    shutil.copytree(ROOT / "models/agent", folder / "models/agent")
    shutil.copyfile(ROOT / "params.yaml", folder / "params.yaml")
    return folder


def test_the_weights_of_a_reference_are_known_by_what_the_gate_pins() -> None:
    names = ("agent", "upscaler")
    params = load_params(ROOT / "params.yaml")
    pinned = {
        name: read_record(ROOT / "release" / name / "manifest.json", Manifest).reference.weights_digest
        for name in names
    }
    assert inputs.digest_references([params.products[name] for name in names], ROOT) == pinned


def write_reference(project: Path, product: Product, *, format: str = "dense", digest: str) -> None:
    """Write the record of a reference that was made of such weights."""
    shape: dict[str, Any] = {"kind": "any", "dtype": "float32", "num_parameters": 1, "num_bytes": 4}
    weights = Checkpoint(path="models/any", format=format, digest=digest, **shape)
    path = project / product.build / "candidates" / product.reference / "candidate.json"
    write_record(path, BuiltCandidate(name=product.reference, checkpoint=weights))


def test_how_a_reference_is_run_is_known_by_what_the_gate_pins_once_it_is_made(tmp_path: Path) -> None:
    """Another serving.max_tokens than at the last release was refused after all candidates had been evaluated."""
    project = copy_inputs(tmp_path)
    params = load_params(project / "params.yaml")
    product = get_product(params, "agent", kind=TextProduct)
    (project / "release/agent").mkdir(parents=True)
    assert inputs.digest_servings([product], project) == {}, "nothing is made yet"
    write_reference(project, product, digest=inputs.digest_references([product], project)["agent"])
    pinned = read_record(ROOT / "release/agent/manifest.json", Manifest).reference.serving_digest
    assert inputs.digest_servings([product], project) == {"agent": pinned}
    other = product.model_copy(update={"serving": product.serving.model_copy(update={"max_tokens": 4})})
    assert inputs.digest_servings([other], project) != {"agent": pinned}
    shutil.rmtree(project / "release")
    assert inputs.digest_servings([other], project) == {}, "no release pins it"


def test_how_a_reference_of_other_weights_was_run_says_nothing_of_this_one(tmp_path: Path) -> None:
    """An .onnx file tried as the reference, and set back, was refused before the reference could be made again."""
    project = copy_inputs(tmp_path)
    product = get_product(load_params(project / "params.yaml"), "upscaler", kind=VisionProduct)
    (project / "release/upscaler").mkdir(parents=True)
    write_reference(project, product, format="onnx", digest="0" * 64)
    assert inputs.digest_servings([product], project) == {}, "the gate tells, once it is made"
    write_reference(project, product, digest=inputs.digest_references([product], project)["upscaler"])
    pinned = read_record(ROOT / "release/upscaler/manifest.json", Manifest).reference.serving_digest
    assert inputs.digest_servings([product], project) == {"upscaler": pinned}
