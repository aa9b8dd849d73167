"""Settings against the files that they name: a contradiction is one line that starts with its path."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pipeline.products.text.preflight
from pipeline.errors import CheckpointError, EvalsetError, SettingsError
from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.params import choose_product, load_params, parse_params
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.model_loading import load_model, load_tokenizer
from pipeline.products.text.preflight import check_text
from pipeline.products.text.settings import TextProduct
from pipeline.records.digests import digest_file
from tests.fakes.synthetic_records import NO_BENCHMARK
from tests.fakes.tiny_architectures import write_tiny_model
from tests.fakes.tiny_llama import write_documents, write_tiny_llama
from tests.paths import ROOT

CALIBRATION = {"sources": ["prose", "long"], "num_samples": 8, "max_tokens": 64, "length_exponent": 0}
SETTINGS: dict[str, Any] = {
    "products": {
        "agent": {
            "kind": "text",
            "reference": "reference",
            "release": ["int4"],
            "optimize": {"calibration_texts": "evalsets/calibration", "num_threads": 1},
            "serving": {
                "dtype": "float32",
                "continuous_batching": True,
                "concurrency": 8,
                "num_threads": 1,
                "context_length": 512,
                "max_tokens": 64,
            },
            "resources": {"num_servers": 1, "request_timeout_s": 60, "start_timeout_s": 60},
            "canary": {"num_prompts": 8, "target_rate": 0.3},
            "evals": {
                "prose": {"kind": "perplexity", "evalset": "evalsets/prose"},
                "choices": {"kind": "harness", "task": "choices", "include_path": "evalsets/choices"},
                "builtin": {"kind": "harness", "task": "arc_easy"},
                "workflows": {"kind": "trajectories", "evalset": "evalsets/workflows", "max_turns": 8},
            },
            "gate": {
                "alpha": 0.05,
                "on_inconclusive": "block",
                "tolerances": {"prose/perplexity_per_token": {"overall": 0.02, "buckets": {"long": 0.05}}},
            },
            "benchmark": NO_BENCHMARK,
        }
    },
    "candidates": {
        "reference": {"product": "agent", "checkpoint": "models/tiny", "steps": []},
        "int4": {
            "product": "agent",
            "checkpoint": "models/tiny",
            "steps": [{"kind": "gptq", "group_size": 64, "calibration": CALIBRATION}],
        },
    },
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that SETTINGS names."""
    root = tmp_path_factory.mktemp("project")
    write_tiny_llama(root / "models/tiny")
    write_documents(root / "evalsets/calibration", {"prose": list("abcdefg"), "long": ["h"]})
    write_documents(root / "evalsets/prose", {"short": ["x"], "long": ["y"]})
    write_cases(root / "evalsets/choices", "easy", question="1 + 1 =", choices=["2", "3"], answer=0)
    write_card(root / "evalsets/choices", kind="choices")
    write_cases(
        root / "evalsets/workflows",
        "steps/2-4",
        messages=[{"role": "user", "content": "Order 2."}],
        state={"sent": 0},
        checks=[{"path": "sent", "equals": 2}],
    )
    write_card(root / "evalsets/workflows", kind="trajectories", tools={"order": {"parameters": {}}})
    (root / "evalsets/choices/task.yaml").write_text("task: choices\n")
    (root / "evalsets/cardless").mkdir()
    (root / "evalsets/cardless/task.yaml").write_text("task: choices\n")
    return root


def write_cases(folder: Path, bucket: str, **case: Any) -> None:
    """Write one case, and a card that fits it but for the kind."""
    write_documents(folder, {bucket: ["a"]})
    path = folder / "cases.jsonl"
    path.write_text(json.dumps({"id": "1", "cluster": "1", "buckets": [bucket], **case}) + "\n")
    write_card(folder, sha256=digest_file(path))


def write_card(folder: Path, **changes: Any) -> None:
    path = folder / "card.yaml"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def check(project: Path, path: str = "", value: Any = None) -> None:
    """Check SETTINGS with the value at a path ("candidates//int4", or a key of the product) replaced."""
    data = copy.deepcopy(SETTINGS)
    *parents, last = path.split("//")
    target: Any = data if path.startswith("candidates") else data["products"]["agent"]
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if path:
        target[last] = {"product": "agent"} | value if parents == ["candidates"] else value
    check_text(choose_product(parse_params(data), None, kind=TextProduct), project)


def refusal(project: Path, path: str, value: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        check(project, path, value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_settings_that_fit_pass(project: Path) -> None:
    check(project)


def test_the_shipped_project_passes() -> None:
    check_text(choose_product(load_params(ROOT / "params.yaml"), None, kind=TextProduct), ROOT)


def damage_header(folder: Path, **changes: Any) -> None:
    """Edit what the header says of one tensor; the file keeps its length."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:size])
    name = next(name for name in header if "gate_proj" in name)
    other = next(each for each in header if "up_proj" in each)
    header[name] |= {key: header[other][key] if value is None else value for key, value in changes.items()}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[size:])


@pytest.mark.parametrize(
    "changes",
    [{"data_offsets": None}, {"dtype": "F64"}, {"dtype": "XX9"}, {"data_offsets": [10, 5]}],
    ids=["overlap", "width", "unknown", "order"],
)
def test_a_header_that_no_loader_takes_is_refused(tmp_path: Path, project: Path, changes: dict[str, Any]) -> None:
    """Stage optimize ended in a traceback of safetensors, after `env` had said nothing."""
    root = tmp_path / "project"
    shutil.copytree(project, root)
    damage_header(root / "models/tiny", **changes)
    with pytest.raises(SettingsError, match=r"model\.safetensors: safetensors refuses the file: .*; copy it again"):
        check(root)


@pytest.mark.parametrize(("gib", "fits"), [(1e-5, False), (1.0, True), (None, True)])
def test_a_cache_without_room_for_a_request_is_refused(project: Path, gib: float | None, fits: bool) -> None:
    """A server said so once it had loaded the weights, and advised fewer servers."""
    settings = copy.deepcopy(SETTINGS)
    if gib is not None:
        settings["products"]["agent"]["resources"]["kv_cache_gib"] = gib
    product = choose_product(parse_params(settings), None, kind=TextProduct)
    if fits:
        check_text(product, project)
        return
    with pytest.raises(SettingsError, match=r"resources\.kv_cache_gib: expected 0\.\d+ or more, as one request"):
        check_text(product, project)


@pytest.mark.parametrize(
    ("name", "is_hub"), [("org/name", True), ("models/none", False), ("none", False), ("~/name", False)]
)
def test_what_looks_like_a_model_of_a_hub_is_told_how_to_be_one(project: Path, name: str, is_hub: bool) -> None:
    hint = f"; if it is a model of a hub, write hf://{name}@COMMIT"
    assert refusal(project, "candidates//int4//checkpoint", name).endswith(hint if is_hub else f"{name}'")


STEP = "candidates//int4//steps//0"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "candidates//int4//checkpoint",
            "models/none",
            "candidates.int4.checkpoint: expected a checkpoint folder, found none at ",
        ),
        (
            "candidates//int4//checkpoint",
            "models",
            "candidates.int4.checkpoint: expected a folder with config.json, found none in ",
        ),
        (
            "candidates//int4",
            {"checkpoint": "models/tiny", "steps": [{"kind": "quantize", "scheme": "NVFP4A16"}]},
            "candidates.int4.steps.0.scheme: expected serving.dtype bfloat16 with nvfp4, which transformers unpacks "
            "into it, as ",
        ),
        (
            f"{STEP}//calibration//sources",
            ["prose", "web"],
            "candidates.int4.steps.0.calibration.sources: 'web' is no bucket of the calibration texts; they have "
            "prose, "
            "long",
        ),
        (f"{STEP}//group_size", 96, "candidates.int4.steps.0: group_size: 96 does not divide the input features of "),
        (
            f"{STEP}//exclude",
            ["lm_head", "model.layers.0.mlp.dwon_proj"],
            "candidates.int4.steps.0: exclude: 'model.layers.0.mlp.dwon_proj' matches no linear layer; the nearest are "
            "model.layers.0.mlp.down_proj",
        ),
        (
            f"{STEP}//calibration//num_samples",
            3,
            "candidates.int4.steps.0: calibration: 192 tokens can't determine the 256 input features of model.layers.0."
            "mlp.down_proj; raise num_samples or max_tokens",
        ),
        (
            f"{STEP}//calibration//num_samples",
            9,
            "candidates.int4.steps.0.calibration.num_samples: expected at most 8, the texts of prose, long, got 9: "
            "each would be repeated; lower it, or name more sources",
        ),
        (f"{STEP}//exclude", ["re:("], "candidates.int4.steps.0: exclude: 're:(' is not a regular expression"),
        (
            "optimize//calibration_texts",
            "evalsets/none",
            "optimize.calibration_texts: expected an evalset folder with card.yaml and ",
        ),
        (
            "optimize//calibration_texts",
            "evalsets/workflows",
            "optimize.calibration_texts: expected an evalset of kind 'documents', 'workflows' is of kind "
            "'trajectories'",
        ),
        ("evals//prose//evalset", "evalsets/none", "evals.prose.evalset: expected an evalset folder with card.yaml"),
        (
            "evals//prose//evalset",
            "evalsets/choices",
            "evals.prose.evalset: expected an evalset of kind 'documents', 'choices' is of kind 'choices'",
        ),
        (
            "evals//workflows//evalset",
            "evalsets/prose",
            "evals.workflows.evalset: expected an evalset of kind 'trajectories', 'prose' is of kind 'documents'",
        ),
        (
            "evals//choices//include_path",
            "evalsets/none",
            "evals.choices.include_path: expected a folder with task YAML, found none at ",
        ),
        (
            "gate//tolerances//prose/perplexity_per_token//buckets",
            {"huge": 0.1},
            "gate.tolerances.prose/perplexity_per_token.buckets.huge: evalset 'prose' has no such bucket; it has "
            "short, "
            "long",
        ),
        (
            "gate//tolerances//choices/accuracy",
            {"buckets": {"hard": 0.1}},
            "gate.tolerances.choices/accuracy.buckets.hard: evalset 'choices' has no such bucket; it has easy",
        ),
    ],
)
def test_a_contradiction_is_named_by_its_path(project: Path, path: str, value: Any, said: str) -> None:
    at = "" if said.startswith("candidates") else "products.agent."
    assert refusal(project, path, value).startswith(at + said)


def test_calibration_texts_that_are_evaluated_are_refused(project: Path, tmp_path: Path) -> None:
    """A candidate that was fitted to the cases passed a gate that it would fail, and nobody said so."""
    folder = write_documents(tmp_path / "prose", {"short": ["x", "b", "c\n"], "long": ["y"]})
    assert refusal(project, "evals//prose//evalset", str(folder)) == (
        "products.agent.optimize.calibration_texts: expected texts that no eval asks, as a quantiser fits what it is "
        f"calibrated on, got 2 of evals.prose: 'prose-1' of {project}/evalsets/calibration/cases.jsonl is case "
        f"'short-1' of {folder}/cases.jsonl; take them out of one of both"
    )
    write_cases(tmp_path / "choices", "easy", question="b", choices=["2", "3"], answer=0)
    write_card(tmp_path / "choices", kind="choices")
    (tmp_path / "choices/task.yaml").write_text("task: choices\n")
    assert "got 1 of evals.choices: " in refusal(project, "evals//choices//include_path", str(tmp_path / "choices"))
    call, asked = {"name": "order", "arguments": {}}, [{"role": "user", "content": "b"}]
    write_cases(tmp_path / "calls", "easy", messages=asked, expected=call)
    write_card(tmp_path / "calls", kind="tool_calls", tools={"order": {"parameters": {}}})
    calls = {"kind": "tool_calls", "evalset": str(tmp_path / "calls")}
    assert "got 1 of evals.calls: " in refusal(project, "evals//calls", calls)


def test_calibration_texts_that_no_step_draws_may_be_evaluated(project: Path, tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "prose", {"short": ["h"], "long": ["y"]})
    with pytest.raises(SettingsError, match="expected texts that no eval asks"):
        check(project, "evals//prose//evalset", str(folder))
    data = copy.deepcopy(SETTINGS)
    data["products"]["agent"]["evals"]["prose"]["evalset"] = str(folder)
    data["candidates"]["int4"]["steps"][0]["calibration"] |= {"sources": ["prose"], "num_samples": 7}
    check_text(choose_product(parse_params(data), None, kind=TextProduct), project)


@pytest.mark.parametrize(("num_gpus", "is_refused"), [(3, True), (2, False)])
def test_attention_heads_are_shared_evenly(project: Path, copied: Path, num_gpus: int, is_refused: bool) -> None:
    engine = {"kind": "vllm", "command": ["vllm"], "version": "0.26.0", "tensor_parallel_size": num_gpus}
    candidate = {"checkpoint": str(copied), "steps": [], "engine": engine}
    if not is_refused:
        check(project, "candidates//sharded", candidate)
        return
    assert refusal(project, "candidates//sharded", candidate).startswith(
        "candidates.sharded.engine.tensor_parallel_size: expected a divisor of the "
    )


def test_what_came_quantised_and_would_be_served_otherwise_is_refused(project: Path, copied: Path) -> None:
    """Float weights that a forward pass rounds were served unrounded, with the reference's numbers, and shipped."""
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    edit_json(copied / "config.json", quantization_config=settings)
    tensors = load_file(copied / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj"
    scale = tensors[f"{layer}.weight"][:, :1].clone()
    save_file(tensors | {f"{layer}.weight_scale": scale}, copied / "model.safetensors")
    said = rf"found float ones .{layer}.: each forward pass would have to round them"
    with pytest.raises(SettingsError, match=rf"^candidates\.plain\.checkpoint: .*{said}"):
        check(project, "candidates//plain", {"checkpoint": str(copied), "steps": []})
    with pytest.raises(CheckpointError, match=said):  # a server asks as well, and may be started by hand
        read_checkpoint(copied, root=project)


def test_a_quantised_checkpoint_can_be_no_input_of_a_step(project: Path, tmp_path: Path) -> None:
    packed = write_tiny_llama(tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    said = refusal(project, "candidates//int4//checkpoint", str(packed))
    assert said.startswith("candidates.int4.steps.0: ") and "already quantised as 'gptq'" in said


def test_a_mixture_of_experts_can_be_no_input_of_a_quantising_step(project: Path, copied: Path, tmp_path: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    tensors[name] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, copied / "model.safetensors")
    assert refusal(project, "candidates//int4//checkpoint", str(copied)) == (
        f"candidates.int4.steps.0: {copied}: expected a model without experts, got model type 'llama' with {name!r}: "
        "experts can't be quantised here; serve and compare it with `steps: []`"
    )
    experts = write_tiny_model(tmp_path / "experts", "mixtral")
    edit_json(experts / "config.json", max_position_embeddings=512)
    check(project, "candidates//plain", {"checkpoint": str(experts), "steps": []})


def test_a_tensor_that_is_missing_is_found_before_any_work(project: Path, copied: Path) -> None:
    """Quantising or loading found it, hours later."""
    tensors = load_file(copied / "model.safetensors")
    moved = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors | {"model.up.weight": moved}, copied / "model.safetensors")
    found = f"candidates.int4.checkpoint: {copied}: tensors: "
    assert refusal(project, "candidates//int4//checkpoint", str(copied)) == (
        f"{found}1 missing, such as 'model.layers.0.mlp.up_proj.weight', 1 unexpected, such as 'model.up.weight'; "
        "weights and config.json do not belong together"
    )
    tensors["model.layers.0.mlp.up_proj.weight"] = moved
    save_file(tensors | {"dummy": moved.clone()}, copied / "model.safetensors")
    assert refusal(project, "candidates//int4//checkpoint", str(copied)) == (
        f"{found}1 unexpected, such as 'dummy'; remove them from the weights, or take the config.json that knows them"
    )


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
@pytest.mark.parametrize("says", [{}, {"quantization_config": None}])
def test_rounded_weights_that_no_config_speaks_of_are_no_dense_ones(
    project: Path, copied: Path, dtype: torch.dtype, name: str, says: dict[str, Any]
) -> None:
    """They were read as floats without their scales, and answered noise."""
    edit_json(copied / "config.json", **says)
    tensors = load_file(copied / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {layer: tensors[layer].to(dtype)}, copied / "model.safetensors")
    said = refusal(project, "candidates//plain", {"checkpoint": str(copied), "steps": []})
    assert said == (
        f"candidates.plain.checkpoint: {copied}: expected weights in floats, or a quantization_config in config.json "
        f"that says how they are rounded, got 1 tensors such as '{layer}' as {name}; take weights that "
        "transformers reads as they are rounded, or those that they were made of"
    )


@pytest.mark.parametrize(
    "wrong", [{"hidden_act": "foo"}, {"model_type": "t5"}, {"num_attention_heads": 3, "num_key_value_heads": 3}]
)
def test_a_config_that_transformers_can_not_build_is_no_complete_model(
    project: Path, copied: Path, wrong: dict[str, Any]
) -> None:
    """It was taken for complete for good, and failed when it was loaded."""
    edit_json(copied / "config.json", **wrong)
    for _ in range(2):
        said = refusal(project, "candidates//plain", {"checkpoint": str(copied), "steps": []})
        assert said.startswith(f"candidates.plain.checkpoint: {copied}: transformers can't load it: ")


def test_what_was_complete_is_not_built_again(project: Path, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage env would take seconds more in each run."""
    check(project)
    monkeypatch.delattr("pipeline.products.text.completeness.silence_torchao")
    check(project)
    edit_json(copied / "config.json", num_hidden_layers=3)
    with pytest.raises(NameError):
        check(project, "candidates//int4//checkpoint", str(copied))


@pytest.mark.parametrize(
    ("file", "code", "changes", "message"),
    [
        (
            "config.json",
            {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"},
            {"model_type": "evil"},
            "config.json: expected a model type that transformers {version} has, got 'evil', which needs "
            "trust_remote_code to run modeling_evil.Evil: ",
        ),
        (
            "tokenizer_config.json",
            {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]},
            {"tokenizer_class": "EvilTokenizer"},
            "tokenizer_config.json: expected a tokenizer that transformers {version} has, got 'EvilTokenizer', which "
            "needs trust_remote_code to run ['tokenization_evil.EvilTokenizer', None]: ",
        ),
    ],
)
def test_code_of_a_checkpoint_is_refused_and_never_run(
    project: Path, copied: Path, file: str, code: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """Whoever loads it would run what anybody wrote there."""
    for module in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        (copied / f"{module}.py").write_text("raise SystemExit('it ran')")
    edit_json(copied / "config.json", model_type="evil")  # no type of a tokenizer either
    edit_json(copied / file, auto_map=code, **changes)
    said = refusal(project, "candidates//plain", {"checkpoint": str(copied), "steps": []})
    assert said.startswith(f"candidates.plain.checkpoint: {copied}/{message.format(version=version('transformers'))}")
    attached = {"engine": {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "evil"}}
    check(project, "candidates//plain", {"checkpoint": str(copied), "steps": []} | attached)


def test_code_beside_a_type_of_the_library_is_not_needed(project: Path, copied: Path) -> None:
    """Many checkpoints still name the code that they had before transformers took it over."""
    edit_json(copied / "config.json", auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    edit_json(copied / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_llama.Llama", None]})
    check(project, "candidates//plain", {"checkpoint": str(copied), "steps": []})
    assert load_model(copied, dtype="float32") and load_tokenizer(copied)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_template(folder: Path, text: str) -> None:
    (folder / "chat_template.jinja").write_text(text)


def move_template(folder: Path, name: str, template: Any) -> None:
    (folder / "chat_template.jinja").unlink()
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | {"chat_template": template}))


UNCLOSED = "{% for m in messages %}\n{{ m.content }}\n{% end %}"


@pytest.fixture
def copied(project: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(project / "models/tiny", tmp_path / "copy"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            lambda c: (c / "model.safetensors").write_bytes(b"x" * 50),
            "model.safetensors: not a safetensors",
            id="weights",
        ),
        pytest.param(
            lambda c: edit_json(c / "config.json", num_attention_heads=6, num_key_value_heads=4),
            "config.json: num_key_value_heads: expected a divisor of the 6 num_attention_heads, got 4; ",
            id="key-heads",
        ),
        pytest.param(
            lambda c: (c / "tokenizer.json").write_text("{"), "tokenizer.json: not readable as JSON", id="tokenizer"
        ),
        pytest.param(
            lambda c: (c / "tokenizer_config.json").unlink(),
            "tokenizer_config.json: expected a file, found none",
            id="no-tokenizer-settings",
        ),
        pytest.param(
            lambda c: (c / "tokenizer_config.json").write_text("[]"),
            "tokenizer_config.json: expected a JSON obj",
            id="tokenizer-settings",
        ),
        pytest.param(
            lambda c: edit_json(c / "tokenizer_config.json", bos_token=None, eos_token=None),
            "tokenizer_config.json: expected a bos_token or an eos_token, which perplexity",
            id="no-first-token",
        ),
        pytest.param(
            lambda c: (c / "chat_template.jinja").unlink(),
            "chat_template.jinja: expected a chat template, found none here or in tokenizer_config.json; copy it "
            "from the source, or drop the evals of kind tool_calls and trajectories",
            id="no-template",
        ),
        pytest.param(
            lambda c: move_template(c, "chat_template.json", "{{ messages }}"),
            "chat_template.jinja: expected a chat template, found none here or in tokenizer_config.json; copy it "
            "out of chat_template.json, which no tokenizer reads",
            id="template-of-a-processor",
        ),
        pytest.param(
            lambda c: move_template(c, "tokenizer_config.json", []),
            "chat_template.jinja: expected a chat template, found none here",
            id="empty-list-of-templates",
        ),
        pytest.param(
            lambda c: write_template(c, " \n"),
            "chat_template.jinja: expected a chat template, got an empty one, which shows a model none of its prompt",
            id="empty-template",
        ),
        pytest.param(
            lambda c: write_template(c, UNCLOSED),
            "chat_template.jinja:3: expected a chat template in Jinja, got a syntax error: Encountered unknown "
            "tag 'end'. Jinja was looking for the following tags: 'endfor' or 'else'. The innermost block that "
            "needs to be closed is 'for'; copy it from the source",
            id="template",
        ),
        pytest.param(
            lambda c: move_template(c, "tokenizer_config.json", UNCLOSED),
            "tokenizer_config.json: chat_template:3: expected a chat template in",
            id="template-in-settings",
        ),
        pytest.param(
            lambda c: move_template(
                c,
                "tokenizer_config.json",
                [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": UNCLOSED}],
            ),
            "tokenizer_config.json: chat_template.1:3: expected a chat template in Jinja",
            id="second-template",
        ),
        pytest.param(
            lambda c: (c / "generation_config.json").write_text("{"),
            "generation_config.json: not readable as JSON",
            id="generation-settings",
        ),
        pytest.param(
            lambda c: (c / "special_tokens_map.json").write_text("[]"),
            "special_tokens_map.json: expected a JSON object, got list",
            id="special-tokens",
        ),
        pytest.param(
            lambda c: edit_json(c / "generation_config.json", eos_token_id=[2, 320]),
            "generation_config.json: eos_token_id: expected ids below 320, the rows of the embedding, got 320; "
            "copy it from the source",
            id="last-token",
        ),
        pytest.param(
            lambda c: edit_json(c / "config.json", eos_token_id=999),
            "config.json: eos_token_id: expected ids below 320, ",
            id="last-token-in-config",
        ),
        pytest.param(
            lambda c: edit_json(c / "config.json", hidden_size=64),
            "config.json: hidden_size: expected 128, as the stored embedding has, got 64",
            id="width",
        ),
        pytest.param(
            lambda c: edit_json(c / "config.json", vocab_size=512),
            "config.json: vocab_size: expected 320, as the stored embedding has, got 512",
            id="vocabulary",
        ),
    ],
)
def test_a_checkpoint_that_could_not_be_served_is_refused_before_any_work(
    project: Path, copied: Path, change: Callable[[Path], Any], said: str
) -> None:
    """A candidate without steps, which nothing would open before it is served."""
    change(copied)
    message = refusal(project, "candidates//plain", {"checkpoint": str(copied), "steps": []})
    assert message.startswith(f"candidates.plain.checkpoint: {copied}/{said}")


@pytest.mark.parametrize(
    ("dropped", "is_refused"), [(["workflows"], True), (["workflows", "choices", "builtin"], False)]
)
def test_a_template_is_read_before_any_work_where_a_task_alone_asks_by_it(
    project: Path, copied: Path, dropped: list[str], is_refused: bool
) -> None:
    """It ended the evaluation, when everything had been quantised."""
    write_template(copied, UNCLOSED)
    data = copy.deepcopy(SETTINGS)
    for name in dropped:
        del data["products"]["agent"]["evals"][name]
    data["candidates"]["plain"] = {"product": "agent", "checkpoint": str(copied), "steps": []}
    message = r"chat_template\.jinja:3: expected a chat template in Jinja"
    with pytest.raises(SettingsError, match=message) if is_refused else contextlib.nullcontext():
        check_text(choose_product(parse_params(data), None, kind=TextProduct), project)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda c: move_template(c, "tokenizer_config.json", "{{ messages }}"), id="template-in-settings"),
        pytest.param(
            lambda c: write_template(
                c,
                "{% for m in messages %}{%- generation -%}{{ m.content }}"
                "{% endgeneration %}{% if m.last %}{% break %}{% endif %}{% endfor %}",
            ),
            id="tags-that-transformers-adds",
        ),
        pytest.param(lambda c: edit_json(c / "generation_config.json", eos_token_id=None), id="no-last-token"),
        pytest.param(lambda c: (c / "generation_config.json").unlink(), id="no-generation-settings"),
        pytest.param(
            lambda c: edit_json(c / "config.json", hidden_size=1, text_config={"hidden_size": 128}), id="composite"
        ),
        pytest.param(
            lambda c: edit_json(
                c / "config.json", max_position_embeddings=256, rope_parameters={"rope_type": "yarn", "factor": 4.0}
            ),
            id="stretched-positions",
        ),
        pytest.param(lambda c: edit_json(c / "config.json", quantization_config={"quant_method": "gptq"}), id="packed"),
    ],
)
def test_an_unusual_checkpoint_that_can_be_served_passes(
    project: Path, copied: Path, change: Callable[[Path], Any]
) -> None:
    change(copied)
    check(project, "candidates//plain", {"checkpoint": str(copied), "steps": []})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"hidden_size": None, "vocab_size": None}, id="no-sizes"),
        pytest.param({"hidden_size": 256, "word_embed_proj_dim": 128, "model_type": "optional"}, id="projected"),
    ],
)
def test_what_another_engine_loads_passes(project: Path, copied: Path, changes: dict[str, Any]) -> None:
    edit_json(copied / "config.json", **changes)
    engine = {"kind": "vllm", "command": ["vllm"], "version": "0.26.0"}
    check(project, "candidates//plain", {"checkpoint": str(copied), "steps": [], "engine": engine})


@pytest.mark.parametrize(
    ("key", "limit"),
    [
        ("", {"max_position_embeddings": 256}),
        ("text_config", {"max_position_embeddings": 256}),
        ("", {"max_position_embeddings": None, "n_positions": 256}),
    ],
    ids=["whole", "part", "gpt2"],
)
def test_a_context_beyond_the_models_positions_is_refused(
    project: Path, copied: Path, key: str, limit: dict[str, Any]
) -> None:
    """GPT-2 has another word for them: the server refused, half a minute later."""
    edit_json(copied / "config.json", **({key: limit} if key else limit))
    assert refusal(project, "candidates//plain", {"checkpoint": str(copied), "steps": []}) == (
        "products.agent.serving.context_length: expected at most 256, the positions that "
        f"{copied}/config.json has, got 512; lower it"
    )


def test_vllm_needs_room_beyond_the_context_to_score_texts(project: Path, copied: Path) -> None:
    """It refused so after its start, in a paragraph."""
    engine = {"kind": "vllm", "command": ["vllm"], "version": "0.26.0"}
    candidate = {"checkpoint": str(copied), "steps": [], "engine": engine}
    edit_json(copied / "config.json", max_position_embeddings=514)
    check(project, "candidates//plain", candidate)
    edit_json(copied / "config.json", max_position_embeddings=513)
    assert refusal(project, "candidates//plain", candidate) == (
        "products.agent.serving.context_length: expected at most 511, the positions that "
        f"{copied}/config.json has less 2 tokens that vLLM takes beyond it to score texts, got 512; lower it"
    )


def test_what_an_endpoint_brings_itself_is_not_checked(project: Path, copied: Path) -> None:
    (copied / "chat_template.jinja").unlink()
    edit_json(copied / "config.json", max_position_embeddings=256)
    endpoint = {"kind": "openai", "base_url": "http://localhost:8000", "model": "m"}
    check(project, "candidates//there", {"checkpoint": str(copied), "steps": [], "engine": endpoint})
    (copied / "model.safetensors").unlink()  # but the stage optimize describes the weights
    said = refusal(project, "candidates//there", {"checkpoint": str(copied), "steps": [], "engine": endpoint})
    assert said.startswith(f"candidates.there.checkpoint: {copied}: expected model.safetensors")


def test_a_checkpoint_is_checked_without_its_libraries(copied: Path) -> None:
    """Also one whose tokenizer is of an older kind: loading it would import transformers."""
    vocabulary = json.loads((copied / "tokenizer.json").read_text())["model"]["vocab"]
    (copied / "tokenizer.json").unlink()
    (copied / "vocab.json").write_text(json.dumps(vocabulary))
    code = (
        f"import sys, pathlib, pipeline.products.text.checkpoints as c; "
        f"c.open_checkpoint(pathlib.Path({str(copied)!r})); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert child.stdout.strip() == "[]", child.stderr


def speculative(draft: Path) -> list[dict[str, Any]]:
    return [{"kind": "speculative", "method": "draft_model", "draft": str(draft), "num_speculative_tokens": 3}]


def test_a_draft_of_the_targets_tokenizer_passes(project: Path, tmp_path: Path) -> None:
    draft = write_tiny_llama(tmp_path / "draft", seed=1, num_hidden_layers=1)
    check(project, "candidates//int4//steps", speculative(draft))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            lambda draft: shutil.rmtree(draft), "expected the draft's checkpoint folder, found none", id="absent"
        ),
        pytest.param(
            lambda draft: (draft / "tokenizer.json").unlink(),
            "expected a file that draft and target share",
            id="no-tokenizer",
        ),
        pytest.param(
            lambda draft: (draft / "tokenizer.json").write_text("{}"),
            "expected the same bytes as",
            id="another-tokenizer",
        ),
        pytest.param(
            lambda draft: write_tiny_llama(draft, vocab_size=512), "expected an embedding of ", id="another-vocabulary"
        ),
    ],
)
def test_a_draft_that_speaks_other_tokens_is_refused(
    project: Path, tmp_path: Path, change: Callable[[Path], Any], said: str
) -> None:
    draft = write_tiny_llama(tmp_path / "draft", seed=1)
    change(draft)
    message = refusal(project, "candidates//int4//steps", speculative(draft))
    assert message.startswith(f"candidates.int4.steps.0: {draft}") and said in message


def test_a_task_folder_without_a_card_has_no_buckets_to_check(project: Path) -> None:
    check(project, "evals//choices//include_path", "evalsets/cardless")


TASKS = """
group: all
tag: [reading, short]
task:
  - elsewhere
  - task: inline
    doc_to_text: !function text.make
"""


@pytest.mark.parametrize("task", ["all", "inline", "reading"])
def test_a_task_that_a_file_defines_passes(project: Path, tmp_path: Path, task: str) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/tasks.yaml").write_text(TASKS)
    check(project, "evals//choices", {"kind": "harness", "task": task, "include_path": str(tmp_path)})


def test_a_task_that_no_file_defines_is_refused_with_those_that_are(project: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").write_text(TASKS)
    (tmp_path / "broken.yaml").write_text("task: elsewhere\nmetric_list: [acc\n")
    (tmp_path / "list.yaml").write_text("- task\n")
    harness = {"kind": "harness", "task": "elsewhere", "include_path": str(tmp_path)}
    assert refusal(project, "evals//choices", harness) == (
        f"products.agent.evals.choices.task: expected a task, group or tag that a *.yaml file in {tmp_path} defines, "
        f"got 'elsewhere'; they define inline, all, reading, short; {tmp_path}/broken.yaml is not valid YAML: line 3: "
        "expected ',' or ']', but got '<stream end>'"
    )


@pytest.mark.parametrize("shape", ["{}", "{{test: {}}}", "{{test: [{}], train: {other}}}"])
@pytest.mark.parametrize("is_own", [True, False])
def test_a_task_of_an_evalset_reads_its_cases_and_no_others(
    project: Path, tmp_path: Path, shape: str, is_own: bool
) -> None:
    """A copied evalset whose task still read the first one's cases was released as what nobody asked."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        write_cases(folder, "x", question="What?", answer="that")
        write_card(folder, kind="answers")
    read = (mine if is_own else other) / "cases.jsonl"
    (mine / "another.yaml").write_text(f"task: another\ndataset_kwargs:\n  data_files: {other}/cases.jsonl\n")
    files = shape.format(read, other=other / "cases.jsonl")
    (mine / "tasks.yaml").write_text(f"task: mine\ntest_split: test\ndataset_kwargs:\n  data_files: {files}\n")
    harness = {"kind": "harness", "task": "mine", "include_path": str(mine)}
    if is_own:
        check(project, "evals//choices", harness)
        return
    assert refusal(project, "evals//choices", harness) == (
        f"products.agent.evals.choices.include_path: expected a task that reads the cases of {mine}, as its card.yaml "
        f"says what is asked, got {read} in {mine}/tasks.yaml; correct data_files there, or include_path"
    )


def test_a_call_of_a_tool_that_is_not_there_is_refused_before_any_work(project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    call = {"name": "reserve", "arguments": {}}
    write_cases(folder, "x", messages=[{"role": "user", "content": "Order 2."}], expected=call)
    write_card(folder, kind="tool_calls", tools={"order": {"parameters": {}}})
    with pytest.raises(EvalsetError, match=r"expected a tool of the card \(order\), got 'reserve'"):
        check(project, "evals//calls", {"kind": "tool_calls", "evalset": str(folder)})


def test_a_broken_tool_schema_is_refused_before_any_work(project: Path, tmp_path: Path) -> None:
    folder = write_documents(tmp_path / "broken", {"x": ["a"]})
    write_card(folder, kind="trajectories", tools={"order": {"parameters": {"type": "objekt"}}})
    with pytest.raises(EvalsetError) as caught:
        check(project, "evals//workflows//evalset", str(folder))
    assert str(caught.value).startswith(f"{folder / 'card.yaml'}: tools.order.parameters: not a JSON Schema: type: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["optimize//calibration_texts", "evals//prose//evalset", "evals//choices//include_path"]
)
def test_a_broken_case_is_refused_before_any_work(project: Path, tmp_path: Path, path: str) -> None:
    """A card that is in order says nothing of the lines beside it."""
    folder = write_documents(tmp_path / "broken", {"prose": ["a", "b"], "long": ["c"]})
    cases = folder / "cases.jsonl"
    cases.write_text(cases.read_text().replace('"text": "b"', '"txet": "b"'))
    with pytest.raises(EvalsetError) as caught:
        check(project, path, str(folder))
    assert str(caught.value).startswith(f"{cases}:2: text: expected this key, found none")
    assert "\n" not in str(caught.value)


def test_a_folder_that_two_evals_name_is_read_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(folder: Path) -> Evalset:
        loaded.append(folder.name)
        return load_evalset(folder)

    monkeypatch.setattr(pipeline.products.text.preflight, "load_evalset", load)
    check(project, "evals//again", {"kind": "perplexity", "evalset": "evalsets/prose/"})
    assert sorted(loaded) == ["calibration", "choices", "prose", "workflows"]
