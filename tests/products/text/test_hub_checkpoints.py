"""A candidate whose checkpoint is a pinned model of a hub: settings, preflight, the record, and who serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EvidenceError, SettingsError
from pipeline.gate.checks import check_checkpoint
from pipeline.products.params import get_product, load_params, parse_params
from pipeline.products.text.optimize.candidate import build_candidate
from pipeline.products.text.serving.engines.vllm import place_models
from pipeline.products.text.serving.loading import load_candidate
from pipeline.products.text.serving.vllm_config import build_config
from pipeline.products.text.serving_config import read_candidate
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.step_settings import SpeculativeStep
from pipeline.records.digests import digest_checkpoint
from pipeline.records.evaluations import Candidate
from pipeline.running.hub import locate_checkpoint
from tests.fakes.fake_hub import REFERENCE, FakeHub, serve_hub
from tests.fakes.project_copy import ProjectCopy
from tests.fakes.tiny_llama import write_tiny_llama
from tests.paths import ROOT

BRANCH = REFERENCE.partition("@")[0] + "@main"
DRAFTED: dict[str, Any] = {
    "kind": "speculative",
    "method": "draft_model",
    "draft": REFERENCE,
    "num_speculative_tokens": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", max_shard_size="300KB")
    (folder / "README.md").write_text("notes")
    return folder


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[FakeHub]:
    with serve_hub(model, tmp_path / "cache") as hub:
        yield hub


def make_product() -> TextProduct:
    """Return the shipped settings with a candidate that is served with drafts, both from the hub."""
    product = get_product(load_params(ROOT / "params.yaml"), "agent", kind=TextProduct)
    step = SpeculativeStep(**DRAFTED)
    candidate = product.candidates["agent"].model_copy(update={"checkpoint": REFERENCE, "steps": [step]})
    return product.model_copy(update={"candidates": product.candidates | {"fast": candidate}})


def build(root: Path) -> Candidate:
    product = make_product()
    build_candidate("fast", product, root=root, build=root / "build/agent")
    return read_candidate(root / "build/agent", "fast", product)


def test_the_record_names_the_commit_and_not_the_cache(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """The cache lies elsewhere on another machine; the files must be the same."""
    candidate = build(tmp_path)
    assert candidate.checkpoint.path == REFERENCE
    assert candidate.checkpoint.digest == digest_checkpoint(model)
    assert candidate.serving.speculative and candidate.serving.speculative.draft_path == REFERENCE
    assert candidate.serving.speculative.draft_digest == digest_checkpoint(model)
    assert str(tmp_path) not in candidate.model_dump_json()


def test_it_is_served_from_the_cache_without_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    candidate = build(tmp_path)
    hub.stop()
    folder = locate_checkpoint(candidate.checkpoint.path, tmp_path)
    loaded = load_candidate(candidate, folder, draft_folder=folder)
    assert loaded.facts["checkpoint"]["digest"] == candidate.checkpoint.digest


def test_vllm_gets_the_folders(hub: FakeHub, tmp_path: Path) -> None:
    """It would look for the name of a pinned model on the hub, where there is none of it."""
    candidate = build(tmp_path)
    folder = str(locate_checkpoint(REFERENCE, tmp_path).relative_to(tmp_path))  # which vLLM is started in
    config = place_models(build_config(candidate, needs_scores=True), tmp_path)
    assert (config["model"], config["speculative-config"]["model"]) == (folder, folder)
    assert config["speculative-config"]["num_speculative_tokens"] == 2
    plain = {"model": "models/agent", "speculative-config": {"model": "models/draft"}, "dtype": "float32"}
    assert place_models(plain, tmp_path) == plain


def test_the_gate_sees_a_file_of_the_cache_that_changed(hub: FakeHub, tmp_path: Path) -> None:
    candidate, product = build(tmp_path), make_product()
    check_checkpoint(candidate, product, tmp_path)
    config = locate_checkpoint(REFERENCE, tmp_path) / "generation_config.json"
    config.write_text("{}")
    with pytest.raises(EvidenceError, match=r"generation_config\.json differs"):
        check_checkpoint(candidate, product, tmp_path)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"checkpoint": BRANCH}, "candidates.gptq-long.checkpoint"),
        ({"steps": [DRAFTED | {"draft": BRANCH}]}, "candidates.gptq-long.steps.0.draft"),
    ],
)
def test_a_branch_is_refused_before_any_work(change: dict[str, Any], key: str) -> None:
    data = ProjectCopy(ROOT).read_params()
    data["candidates"]["gptq-long"] |= change
    with pytest.raises(SettingsError, match=r"40 hex digits of a commit, got .*: a branch or tag can move") as caught:
        parse_params(data)
    assert key in str(caught.value)


def test_a_kind_that_reads_folders_alone_says_so() -> None:
    data = ProjectCopy(ROOT).read_params()
    data["candidates"]["shots"]["checkpoint"] = REFERENCE
    with pytest.raises(SettingsError, match=r"candidates\.shots\.checkpoint: expected a folder for a product of kind"):
        parse_params(data)
