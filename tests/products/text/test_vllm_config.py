"""The configuration that vLLM is given: what follows from the settings, and what a release does not take."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.errors import SettingsError
from pipeline.products.params import get_product, parse_params
from pipeline.products.text.preflight import check_text
from pipeline.products.text.serving.engines import vllm
from pipeline.products.text.serving.engines.engine import ServerLaunch
from pipeline.products.text.serving.vllm_config import build_config, check_config, check_options, render_config
from pipeline.products.text.settings import ResourceSettings, TextProduct, VllmEngine
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculativeConfig
from tests.fakes.synthetic_records import make_candidate
from tests.paths import ROOT

DRAFT = SpeculativeConfig(method="draft_model", num_tokens=5, draft_digest="d", draft_path="models/agent-draft")


def make(speculative: SpeculativeConfig | None = DRAFT, **serving: Any) -> Candidate:
    config = ServingConfig(engine="vllm", version="0.32.0", command=("vllm", "serve"), speculative=speculative)
    return make_candidate("a").model_copy(update={"serving": config.model_copy(update=serving)})


def check(config: dict[str, Any], version: str = "0.32.0") -> None:
    check_config(config, version=version, where="candidates.a")


def test_the_file_is_the_engines_own_with_its_nested_speculative_config() -> None:
    config = build_config(make(context_length=1022, options={"enforce-eager": True}), needs_scores=True)
    read = YAML(typ="safe").load(io.StringIO(render_config(config)))
    assert read == config
    assert read["speculative-config"] == {
        "method": "draft_model",
        "num_speculative_tokens": 5,
        "model": "models/agent-draft",
    }
    assert (read["max-model-len"], read["dtype"], read["enforce-eager"]) == (1024, "float32", True)
    assert read["fingerprint-value"] == make(context_length=1022, options={"enforce-eager": True}).fingerprint
    check(config)


def test_a_release_is_not_asked_for_what_came_later() -> None:
    config = build_config(make(version="0.26.0"), needs_scores=False)
    assert "per-request-spec-decode-metrics" not in config and "fingerprint-value" in config
    check(config, version="0.26.0")
    assert "per-request-spec-decode-metrics" in build_config(make(version="0.99.0"), needs_scores=False)


def test_how_many_gpus_is_asked_for_as_options_of_its_own() -> None:
    engine = VllmEngine(kind="vllm", command=["vllm", "serve"], version="0.26.0", options={"max-num-seqs": 64})
    plain = make(**engine.build_serving())
    assert plain.serving.options == {"max-num-seqs": 64}, "the fingerprint of who sets none stays as it was"
    wide = engine.model_copy(update={"tensor_parallel_size": 2, "data_parallel_size": 4, "report_kernels": True})
    config = build_config(make(**wide.build_serving()), needs_scores=False)
    assert (config["tensor-parallel-size"], config["data-parallel-size"]) == (2, 4)
    assert config["worker-extension-cls"] == "quantgate_kernels.KernelReport"
    assert make(**wide.build_serving()).fingerprint != plain.fingerprint
    check(config, version="0.26.0")
    with pytest.raises(SettingsError, match=r"options\.tensor-parallel-size: expected an option that"):
        check_options({"tensor-parallel-size": 2}, where="candidates.a")


def test_prompt_lookup_has_another_name_there_and_takes_options() -> None:
    lookup = SpeculativeConfig(method="prompt_lookup", num_tokens=4, options={"prompt_lookup_max": 3})
    config = build_config(make(lookup), needs_scores=False)
    assert config["speculative-config"] == {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    check(config)


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (make(options={"enforce-eagerly": True}), "vLLM 0.32.0 does not take options: Additional properties"),
        (make(options={"max-num-seqs": "many"}), "does not take max-num-seqs: 'many' is not of type 'integer'"),
        (
            make(DRAFT.model_copy(update={"method": "eagle9"})),
            "does not take speculative-config.method: 'eagle9' is not",
        ),
        (make(DRAFT.model_copy(update={"options": {"lookahead": 2}})), "does not take speculative-config: Additional"),
    ],
)
def test_what_the_recorded_release_does_not_take_is_refused_before_it_starts(candidate: Candidate, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check(build_config(candidate, needs_scores=False))
    assert said in str(caught.value) and str(caught.value).startswith("candidates.a")


def test_a_release_that_was_not_recorded_checks_the_file_itself() -> None:
    check(build_config(make(options={"anything": 1}), needs_scores=False), version="0.99.0")


def test_an_option_that_follows_from_other_settings_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^candidates\.a\.engine\.options\.port: expected an option that"):
        check_options({"port": 80}, where="candidates.a")


def test_an_option_that_names_a_file_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"engine\.options\.chat-template: expected no file beside the checkpoint"):
        check_options({"chat-template": "other.jinja"}, where="candidates.a")
    check_options({"generation-config": "vllm"}, where="candidates.a")


def test_code_of_a_checkpoint_is_not_run_there_either() -> None:
    with pytest.raises(
        SettingsError, match=r"engine\.options\.trust-remote-code: expected none, as code of a checkpoint"
    ):
        check_options({"trust-remote-code": True}, where="candidates.a")
    check_options({"trust-remote-code": False}, where="candidates.a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"options": {"enforce-eagerly": True}}, "candidates.fast: vLLM 0.32.0 does not take options: Additional prop"),
        ({"method": "eagle9"}, "candidates.fast: vLLM 0.32.0 does not take speculative-config.method: 'eagle9' is not"),
    ],
)
def test_the_stage_env_tells_before_any_work(change: dict[str, Any], said: str) -> None:
    data = YAML(typ="safe").load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    engine = {"kind": "vllm", "command": ["vllm", "serve"], "version": "0.32.0", "options": change.get("options", {})}
    step = {
        "kind": "speculative",
        "method": change.get("method", "draft_model"),
        "draft": "models/agent-draft",
        "num_speculative_tokens": 5,
    }
    data["products"]["agent"]["serving"]["context_length"] = 1022  # vLLM takes two tokens more to score texts
    data["candidates"]["fast"] = {"product": "agent", "checkpoint": "models/agent", "steps": [step], "engine": engine}
    with pytest.raises(SettingsError) as caught:
        check_text(get_product(parse_params(data), "agent", kind=TextProduct), ROOT)
    assert str(caught.value).startswith(said)


def test_the_documented_example_of_engines_is_valid() -> None:
    section = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    yaml = YAML(typ="safe")
    block = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
    assert block is not None
    example = yaml.load(block.group(1))
    data = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    candidates = data["candidates"] | {name: {"product": "agent"} | c for name, c in example["candidates"].items()}
    product = get_product(parse_params(data | {"candidates": candidates}), "agent", kind=TextProduct)
    assert [product.candidates[name].engine.kind for name in ("on-vllm", "on-my-server")] == ["vllm", "openai"]


def test_a_place_for_traces_is_on_the_command_line_and_not_in_the_file_that_a_release_is_served_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(vllm, "spawn", lambda command, **_: commands.append(command))
    resources = ResourceSettings(num_servers=1, request_timeout_s=1, start_timeout_s=1)
    for traces in (None, tmp_path / "traces"):
        launch = ServerLaunch(make(), resources, {}, tmp_path, tmp_path, traces=traces)
        vllm._spawn(launch, tmp_path / "vllm.yaml", 8000)
    plain, traced = commands
    option, profiler = traced[len(plain) :]
    assert traced[: len(plain)] == plain and option == "--profiler-config"
    assert json.loads(profiler)["torch_profiler_dir"] == str(tmp_path / "traces")
    check({"profiler-config": json.loads(profiler)})
