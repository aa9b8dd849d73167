"""Speculative decoding as records: what is counted, what the fingerprint covers, how a candidate gets there."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from pipeline.errors import CheckpointError, EngineError
from pipeline.products.params import get_product, load_params, parse_params
from pipeline.products.text import TextKind
from pipeline.products.text.benchmark.product import _digest_work
from pipeline.products.text.memory import estimate_needs
from pipeline.products.text.optimize.candidate import build_candidate
from pipeline.products.text.preflight import check_text
from pipeline.products.text.serving.speculation import count_speculation
from pipeline.products.text.serving_config import read_candidate, serve
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.step_settings import SpeculativeStep
from pipeline.records.digests import digest_checkpoint
from pipeline.records.evaluations import Candidate
from pipeline.records.speculation import SpeculationCounts, SpeculativeConfig, sum_speculation
from pipeline.running.environment import read_machine
from pipeline.running.weight_files import read_tensors
from tests.fakes.tiny_llama import write_tiny_llama
from tests.paths import ROOT

CONFIG = SpeculativeConfig(method="prompt_lookup", num_tokens=3)
PROMPT = [10, 11, 12]


def count(fed: list[list[int]], completion: list[int]) -> SpeculationCounts:
    return count_speculation(fed, PROMPT + completion, len(PROMPT), CONFIG)


def test_a_pass_yields_what_it_accepts_and_one_token_of_its_own() -> None:
    counts = count([[*PROMPT, 1, 2, 9], [3, 4, 5, 6], [7]], [1, 2, 3, 4, 5, 6, 7, 8])
    assert (counts.num_target_forwards, counts.num_completion_tokens, counts.num_drafted) == (3, 8, 6)
    assert counts.accepted_by_position == (2, 2, 1)
    assert (counts.acceptance_rate, counts.acceptance_length, counts.forwards_per_token) == (5 / 6, 5 / 3, 3 / 8)


def test_an_accepted_token_may_end_the_answer() -> None:
    counts = count([[*PROMPT, 1, 2]], [1, 2])
    assert (counts.num_target_forwards, counts.num_accepted, counts.num_completion_tokens) == (1, 2, 2)


def test_what_was_drafted_behind_a_stop_string_is_neither_right_nor_wrong() -> None:
    """The target took all four; a perfect draft would look bad where answers are short."""
    counts = count([[*PROMPT, 1, 2, 3], [4, 5, 6, 7]], [1, 2, 3, 4, 5])
    assert (counts.num_completion_tokens, counts.num_drafted, counts.accepted_by_position) == (5, 4, (2, 1, 1))
    assert count([[*PROMPT, 1, 9, 3]], [1, 2]).num_drafted == 3, "the answer ends with the target's own token"


def test_a_rejected_token_hides_the_ones_after_it() -> None:
    """The third is right by chance, after a wrong second one: the target never kept it."""
    assert count([[*PROMPT, 1, 9, 3], [2], [3]], [1, 2, 3, 4]).accepted_by_position == (1, 0, 0)


@pytest.mark.parametrize("fed", [[[*PROMPT, 1]], [[*PROMPT], [1], [2], [3], [4], [5]]], ids=["too-few", "too-many"])
def test_passes_that_do_not_make_the_answer_are_an_error(fed: list[list[int]]) -> None:
    with pytest.raises(EngineError, match="don't make the 4 tokens of the answer"):
        count(fed, [1, 2, 3, 4])


def test_counts_add_up_over_requests_and_none_is_nothing() -> None:
    one, two = count([[*PROMPT, 1, 2]], [1, 2, 3]), count([[*PROMPT, 9], [1]], [1, 2])
    total = sum_speculation([one, None, two])
    assert total == SpeculationCounts(
        method="prompt_lookup",
        num_tokens=3,
        num_target_forwards=3,
        num_completion_tokens=5,
        num_drafted=3,
        accepted_by_position=(1, 1, 0),
    )
    assert sum_speculation([None]) is None


@pytest.mark.parametrize("change", [{"accepted_by_position": (1, 1)}, {"num_drafted": 1}, {"num_drafted": 4}])
def test_counts_that_can_not_be_are_refused(change: dict[str, Any]) -> None:
    counts = count([[*PROMPT, 1, 2]], [1, 2, 3]).model_dump()
    with pytest.raises(ValidationError):
        SpeculationCounts(**counts | change)


def make_params(draft: str | None, **step: Any) -> TextProduct:
    """Return the shipped settings with a candidate that is served with drafts."""
    params = get_product(load_params(ROOT / "params.yaml"), "agent", kind=TextProduct)
    speculative = SpeculativeStep(
        **{"kind": "speculative", "method": "draft_model", "draft": draft, "num_speculative_tokens": 5} | step
    )
    candidate = params.candidates["agent"].model_copy(update={"checkpoint": "tiny", "steps": [speculative]})
    return params.model_copy(update={"candidates": params.candidates | {"fast": candidate}})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path / "tiny")
    write_tiny_llama(tmp_path / "draft", seed=1)
    return tmp_path


def build(project: Path, params: TextProduct) -> Candidate:
    build_candidate("fast", params, root=project, build=project / "build/agent")
    return read_candidate(project / "build/agent", "fast", params)


def test_a_speculative_step_changes_how_a_checkpoint_is_served_and_not_its_weights(project: Path) -> None:
    candidate = build(project, make_params("draft"))
    assert candidate.checkpoint.digest == digest_checkpoint(project / "tiny")
    assert candidate.serving.speculative == SpeculativeConfig(
        method="draft_model", num_tokens=5, draft_digest=digest_checkpoint(project / "draft"), draft_path="draft"
    )
    assert not candidate.serving.continuous_batching
    assert [path.name for path in (project / "build/agent/candidates/fast").iterdir()] == ["candidate.json"]


def test_the_fingerprint_covers_draft_tokens_and_method_and_not_the_path(project: Path) -> None:
    first = build(project, make_params("draft"))
    (project / "draft").rename(project / "moved")
    assert build(project, make_params("moved")).fingerprint == first.fingerprint
    others = [
        build(project, make_params("moved", num_speculative_tokens=4)),
        build(project, make_params(None, method="prompt_lookup")),
    ]
    write_tiny_llama(project / "moved", seed=2)
    others.append(build(project, make_params("moved")))
    assert len({c.fingerprint for c in [first, *others]}) == 4


def test_the_gates_threshold_is_no_part_of_what_is_built(project: Path) -> None:
    first, second = (
        build_candidate("fast", make_params("draft", min_acceptance=m), root=project, build=project / "build/agent")
        for m in (0.4, 0.5)
    )
    assert first == second


def test_a_candidate_with_a_threshold_is_served_and_judged_all_the_same(project: Path) -> None:
    """The record does not hold the threshold, and must not be missed there."""
    with_threshold = build(project, make_params("draft", min_acceptance=0.4))
    assert with_threshold.fingerprint == build(project, make_params("draft")).fingerprint


def test_a_draft_of_another_tokenizer_is_not_built(project: Path) -> None:
    (project / "draft/tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected the same bytes as"):
        build(project, make_params("draft"))


def test_dvc_sees_the_draft_of_each_candidate_and_of_no_other(project: Path) -> None:
    (project / "evalsets").symlink_to(ROOT / "evalsets")
    inputs = dict(TextKind().list_inputs(make_params("draft"), project).optimize)
    assert inputs.pop("fast")["draft"] == digest_checkpoint(project / "draft")
    assert inputs and not [name for name, watched in inputs.items() if "draft" in watched]


def test_another_cache_is_timed_again_and_evaluated_no_more(project: Path) -> None:
    """Its size decides which requests wait, and which prefixes are still there."""
    (project / "evalsets").symlink_to(ROOT / "evalsets")
    params = make_params("draft")
    resources = params.resources.model_copy(update={"kv_cache_gib": 0.5})
    small = params.model_copy(update={"resources": resources})
    before, after = (TextKind().list_inputs(product, project) for product in (params, small))
    assert (after.optimize, after.evaluate) == (before.optimize, before.evaluate)
    assert after.benchmark == {**before.benchmark, "kv_cache_gib": 0.5}
    assert _digest_work("fast", small, project) != _digest_work("fast", params, project)


def test_memory_counts_the_draft_and_no_quantising(project: Path) -> None:
    params = make_params("draft")
    alone = params.model_copy(update={"candidates": {"fast": params.candidates["fast"]}})
    machine = read_machine().model_copy(update={"gpus": ()})
    needs = estimate_needs(alone, project, machine)
    assert [need.activity for need in needs] == ["serving"]
    num_weights = 2 * sum(tensor.num_elements for tensor in read_tensors(project / "tiny").values())
    assert needs[0].weights_mib == math.ceil(num_weights * 4 / 2**20 * params.resources.num_servers)


def test_a_candidate_without_the_step_is_served_as_before(project: Path) -> None:
    params = make_params("draft")
    built = build_candidate("fast", params, root=project, build=project / "build/agent").model_copy(
        update={"speculative": None}
    )
    serving = serve(built, params).serving
    assert serving.speculative is None and serving.continuous_batching


def test_the_documented_example_is_valid_and_fits_the_shipped_checkpoints() -> None:
    section = (ROOT / "docs/speculative-decoding.md").read_text(encoding="utf-8")
    yaml = YAML(typ="safe")
    block = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert block is not None
    example = yaml.load(block.group(1))
    data = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    candidates = data["candidates"] | {name: {"product": "agent"} | c for name, c in example["candidates"].items()}
    params = get_product(parse_params(data | {"candidates": candidates}), "agent", kind=TextProduct)
    step = params.candidates["spec-draft-k5"].speculative
    assert step is not None
    assert (step.method, step.draft, step.num_speculative_tokens) == ("draft_model", "models/agent-draft", 5)
    check_text(params, ROOT)
