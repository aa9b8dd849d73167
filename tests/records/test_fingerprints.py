"""What makes one way of serving another: each drift is named by its field, a move is none."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pipeline.records.evaluations import Candidate
from pipeline.records.fingerprints import find_difference, fingerprint, read_environment
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculativeConfig
from tests.fakes.synthetic_records import make_candidate

FILES = {"model.safetensors": "1", "generation_config.json": "2", "chat_template.jinja": "3"}
SPECULATIVE = SpeculativeConfig(method="draft_model", num_tokens=5, draft_digest="d" * 64, draft_path="models/draft")
RUNTIME = {
    "engine": {"block_size": 16, "max_batch_tokens": 512},
    "sampling": {"repetition_penalty": 1.0},
    "environment": {"OMP_NUM_THREADS": "1"},
    "hardware": {"device": "cpu x86_64"},
}


def make_facts(**serving: Any) -> dict[str, Any]:
    built = make_candidate("a")
    checkpoint = built.checkpoint.model_copy(update={"files": FILES})
    config = ServingConfig(speculative=SPECULATIVE).model_copy(update=serving)
    return copy.deepcopy(built.model_copy(update={"checkpoint": checkpoint, "serving": config}).facts | RUNTIME)


def change_file(name: str) -> Any:
    def change(facts: dict[str, Any]) -> None:
        facts["checkpoint"] = {"digest": "f" * 64, "files": FILES | {name: "other"}}

    return change


def change_fact(section: str, key: str, value: Any) -> Any:
    def change(facts: dict[str, Any]) -> None:
        facts[section][key] = value

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param(
            change_fact("serving", "speculative.draft_digest", "e" * 64),
            "serving.speculative.draft_digest",
            id="another-draft",
        ),
        pytest.param(change_fact("serving", "speculative.num_tokens", 8), "serving.speculative.num_tokens", id="k"),
        pytest.param(
            change_file("model.safetensors"), "checkpoint digest (model.safetensors differs)", id="one-weight"
        ),
        pytest.param(
            change_file("generation_config.json"),
            "checkpoint digest (generation_config.json differs)",
            id="repetition-penalty",
        ),
        pytest.param(
            change_file("chat_template.jinja"), "checkpoint digest (chat_template.jinja differs)", id="chat-template"
        ),
        pytest.param(change_fact("serving", "dtype", "bfloat16"), "serving.dtype", id="dtype"),
        pytest.param(change_fact("libraries", "torch", "2.14.0"), "libraries.torch", id="library-version"),
        pytest.param(change_fact("engine", "max_batch_tokens", 8192), "engine.max_batch_tokens", id="engine-default"),
        pytest.param(change_fact("sampling", "repetition_penalty", 1.1), "sampling.repetition_penalty", id="sampling"),
        pytest.param(
            change_fact("environment", "ATEN_CPU_CAPABILITY", "avx2"),
            "environment.ATEN_CPU_CAPABILITY",
            id="environment",
        ),
        pytest.param(change_fact("hardware", "device", "NVIDIA L4"), "hardware.device", id="hardware"),
    ],
)
def test_each_planted_drift_changes_the_fingerprint_and_is_named(change: Any, field: str) -> None:
    evaluated, serves_now = make_facts(), make_facts()
    change(serves_now)
    assert fingerprint(serves_now) != fingerprint(evaluated)
    difference = find_difference(evaluated, serves_now)
    assert difference is not None and difference.field == field


def test_a_move_of_a_folder_or_another_port_changes_nothing() -> None:
    here = make_facts(command=("/here/bin/vllm", "serve"))
    moved = make_facts(
        base_url="http://127.0.0.1:8102",
        command=("/elsewhere/vllm", "serve"),
        speculative=SPECULATIVE.model_copy(update={"draft_path": "elsewhere/draft"}),
    )
    assert fingerprint(moved) == fingerprint(here) and find_difference(here, moved) is None


def test_another_command_is_another_path() -> None:
    """A word before the program may set what no setting shows."""
    plain, more = (
        make_facts(command=(*words, "vllm", "serve")) for words in ((), ("env", "ONEDNN_DEFAULT_FPMATH_MODE=BF16"))
    )
    difference = find_difference(plain, more)
    assert difference is not None and difference.field == "serving.command"


def test_a_section_that_one_side_does_not_tell_is_not_compared() -> None:
    declared = {"checkpoint": make_facts()["checkpoint"]}
    assert find_difference(make_facts(), declared) is None
    assert fingerprint(declared) != fingerprint(make_facts())


def test_facts_are_the_same_after_they_were_written_and_read() -> None:
    candidate = make_candidate("a")
    again = Candidate.model_validate_json(candidate.model_dump_json())
    assert again.fingerprint == candidate.fingerprint and find_difference(again.facts, candidate.facts) is None


def test_the_environment_is_what_can_change_an_answer_and_no_secret() -> None:
    environment = {
        "VLLM_ATTENTION_BACKEND": "FLASHINFER",
        "OMP_NUM_THREADS": "2",
        "VLLM_API_KEY": "secret",
        "HOME": "/",
        "VLLM_PORT": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    assert read_environment(environment) == {"OMP_NUM_THREADS": "2", "VLLM_ATTENTION_BACKEND": "FLASHINFER"}
