"""GPTQ and AWQ on a tiny Llama, from settings to a folder that plain transformers loads."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CheckpointError, QuantizationError, SettingsError
from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.params import get_product, parse_params
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.model_loading import load_model, load_tokenizer
from pipeline.products.text.optimize import candidate as candidate_module
from pipeline.products.text.optimize import quantize as quantize_module
from pipeline.products.text.optimize.coverage import check_coverage
from pipeline.products.text.optimize.layers import plan_folder
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.optimize.quantize import StepResult
from pipeline.products.text.optimize.ranks import quantize_by_ranks
from pipeline.products.text.optimize.registry import STEPS
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.step_settings import Calibration, QuantizeStep
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import BuiltCandidate
from pipeline.records.record_files import read_record
from pipeline.running.weight_files import read_tensors
from tests.fakes.synthetic_records import NO_BENCHMARK, PRODUCT
from tests.fakes.tiny_llama import build_tokenizer, write_documents, write_tiny_llama

WORDS = ["courier", "parcel", "north", "gate", "before", "market", "opens", "call", "room", "blue", "wait", "result"]
CALIBRATION = Calibration(sources=["prose"], num_samples=16, max_tokens=64, length_exponent=1.0)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    write_tiny_llama(root / "models/tiny")
    generator = random.Random(0)
    texts = [" ".join(generator.choice(WORDS) for _ in range(generator.randint(20, 80))) for _ in range(30)]
    write_documents(root / "evalsets/calibration", {"prose": texts})
    return root


@pytest.fixture(scope="module")
def source(project: Path) -> Path:
    return project / "models/tiny"


@pytest.fixture(scope="module")
def texts(project: Path) -> Evalset:
    return load_evalset(project / "evalsets/calibration")


def make_step(kind: str, **changes: Any) -> QuantizeStep:
    settings: dict[str, Any] = {"kind": kind, "group_size": 64, "calibration": CALIBRATION} | changes
    return QuantizeStep(**({"num_grid_points": 3} if kind == "awq" else {}) | settings)


def apply(source: Path, destination: Path, step: QuantizeStep, texts: Evalset) -> StepResult:
    return STEPS[step.kind](source, destination, step=step, calibration_set=texts)


@pytest.fixture(scope="module")
def gptq_folder(source: Path, texts: Evalset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StepResult]:
    folder = tmp_path_factory.mktemp("gptq") / "checkpoint"
    return folder, apply(source, folder, make_step("gptq"), texts)


VARIANTS = [
    ("gptq", {"symmetric": False, "group_size": 32, "activation_order": True}),
    ("gptq", {"bits": 8, "exclude": ["lm_head", "re:.*down_proj"]}),
    ("gptq", {"exclude": ["model.layers.0.mlp.down_proj"]}),
    ("awq", {}),
    ("awq", {"symmetric": False, "group_size": 128, "exclude": ["lm_head", "re:.*down_proj", "re:.*0.self_attn.*"]}),
]


@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "all")
def test_every_layer_ends_in_the_format_that_was_asked(
    source: Path, texts: Evalset, tmp_path: Path, kind: str, changes: dict[str, object]
) -> None:
    step = make_step(kind, **changes)
    result = apply(source, tmp_path / "out", step, texts)
    formats = {layer.layer: layer.format for layer in result.coverage}
    plan = plan_folder(source, step)
    kind_of_int = "asymmetric" if changes.get("symmetric") is False else "symmetric"
    name = f"int{changes.get('bits', 4)}-g{changes.get('group_size', 64)}-{kind_of_int}"
    assert formats == dict.fromkeys(plan.asked, name) | dict.fromkeys(plan.excluded, "float32")
    without_loss = {layer.layer for layer in result.coverage if layer.asked and layer.loss is None}
    assert without_loss == {fallback.layer for fallback in result.fallbacks}
    # grouped-query attention: no AWQ scale fits the output projection
    assert without_loss == ({n for n in plan.asked if n.endswith("o_proj")} if kind == "awq" else set())
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(source))


def test_groups_of_four_inputs_are_made_and_run(tmp_path: Path) -> None:
    """`init` and a refusal offer them where no larger ones divide the layers: the library must take them."""
    source = write_tiny_llama(tmp_path / "source", hidden_size=64, intermediate_size=172)
    step = QuantizeStep(kind="quantize", scheme="W4A16", group_size=4)
    result = STEPS["quantize"](source, tmp_path / "out", step=step, calibration_set=None)
    assert not result.fallbacks
    ids = load_tokenizer(source)("courier parcel north gate", return_tensors="pt")["input_ids"]
    before, after = (load_model(folder, dtype="float32")(ids).logits for folder in (source, tmp_path / "out"))
    assert 0 < (after - before).norm() < 0.2 * before.norm()


@pytest.fixture(scope="module")
def neox(project: Path) -> Path:
    """A head that the file calls embed_out, and transformers, once it is loaded, lm_head."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    tokenizer, folder = build_tokenizer(), project / "models/neox"
    config = GPTNeoXConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("exclude", [["lm_head"], []], ids=["head-kept", "head-packed"])
def test_a_head_that_the_file_calls_otherwise_has_one_name(
    neox: Path, texts: Evalset, tmp_path: Path, exclude: list[str]
) -> None:
    assert "embed_out.weight" in read_tensors(neox)
    step = make_step("gptq", exclude=exclude)
    asked = plan_folder(neox, step).asked
    coverage = {layer.layer: layer for layer in apply(neox, tmp_path / "out", step, texts).coverage}
    assert {name for name, layer in coverage.items() if layer.asked} == set(asked)
    head = coverage["lm_head"]
    assert (head.format, head.asked) == (("float32", False) if exclude else ("int4-g64-symmetric", True))
    assert head.num_bytes > 0 and "embed_out" not in coverage
    with pytest.raises(QuantizationError, match="'embed_out' matches no linear layer; the nearest are .*lm_head"):
        plan_folder(neox, make_step("gptq", exclude=["embed_out"]))


def test_record_says_what_was_calibrated_on_and_progress_is_one_line_a_layer(
    source: Path, texts: Evalset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = apply(source, tmp_path / "out", make_step("gptq"), texts)
    assert (result.record["kind"], result.record["algorithm"]) == ("quantize", "gptq")
    assert result.record["calibrated_on"]["num_samples"] == 16
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) == 15
    assert lines[0] == f"gptq calibrates on 16 samples, {result.record['calibrated_on']['num_tokens']} tokens"
    assert lines[1].startswith("gptq model.layers.0.self_attn.q_proj loss ")
    assert lines[-1].endswith(" [14/14]")
    assert printed.err == ""


def test_reloaded_weights_are_close_to_the_source_and_not_equal(
    source: Path, gptq_folder: tuple[Path, StepResult]
) -> None:
    import torch

    ids = torch.tensor([load_tokenizer(source)("the courier takes a parcel").input_ids])
    with torch.inference_mode():
        before, after = (load_model(f, dtype="float32")(ids).logits for f in (source, gptq_folder[0]))
    error = float((before - after).norm() / before.norm())
    assert 0.001 < error < 0.3


def test_two_runs_write_the_same_bytes_and_leave_nothing_behind(
    source: Path, texts: Evalset, gptq_folder: tuple[Path, StepResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = tmp_path / "cwd"
    working.mkdir()
    monkeypatch.chdir(working)
    apply(source, tmp_path / "out", make_step("gptq"), texts)
    for first in gptq_folder[0].iterdir():
        assert digest_file(first) == digest_file(tmp_path / "out" / first.name), first.name
    assert os.listdir(working) == []


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_the_model_is_freed_before_its_output_is_loaded(
    source: Path, texts: Evalset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    loads = 0
    loaded: list[weakref.ref[Any]] = []  # each module: the library holds the decoder where the model around it is gone

    def load(*args: Any, **options: Any) -> Any:
        nonlocal loads
        assert [type(module()).__name__ for module in loaded if module() is not None] == []
        model = load_model(*args, **options)
        loaded.extend(map(weakref.ref, model.modules()))
        loads += 1
        return model

    monkeypatch.setattr(quantize_module, "load_model", load)
    apply(source, tmp_path / "out", make_step(kind), texts)
    assert loads == 2


def test_ranks_share_layers_and_samples_and_write_a_whole_checkpoint(
    source: Path, texts: Evalset, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    step = make_step("gptq", world_size=2)
    result = apply(source, tmp_path / "made", step, texts)
    out, err = capfd.readouterr()
    plan = plan_folder(source, step)
    assert [out.count(f"gptq {layer} loss ") for layer in plan.asked] == [1] * len(plan.asked), "each layer, once"
    assert f"[{len(plan.asked)}/{len(plan.asked)}]" in out and "MISSING" not in err
    assert {layer.layer for layer in result.coverage if layer.asked} == set(plan.asked) and not result.fallbacks
    assert result.record["world_size"] == 2 and result.record["calibrated_on"]["num_samples"] == 16
    load_model(tmp_path / "made", dtype="auto")


def test_a_rank_that_fails_ends_the_others_and_is_one_line(
    source: Path, texts: Evalset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step("gptq", world_size=2)
    broken = shutil.copytree(source, tmp_path / "broken")
    plan = plan_folder(source, step)
    (broken / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(QuantizationError, match=r"^rank \d of 2: \w+: .* \(exit code 1\); lower world_size") as caught:
        quantize_by_ranks(broken, tmp_path / "made", step=step, plan=plan, log=StepLog("gptq"), samples=[[1, 2, 3]] * 2)
    assert "\n" not in str(caught.value)


def test_quantised_folder_is_described_and_not_quantised_again(
    source: Path, texts: Evalset, gptq_folder: tuple[Path, StepResult], tmp_path: Path
) -> None:
    folder = gptq_folder[0]
    before, after = (read_checkpoint(f, root=f.parent) for f in (source, folder))
    assert after.format == "compressed-tensors"
    assert after.num_parameters == before.num_parameters
    assert after.num_bytes < 0.5 * before.num_bytes
    with pytest.raises(QuantizationError, match="already quantised as 'compressed-tensors'; quantise the original"):
        apply(folder, tmp_path / "again", make_step("gptq"), texts)


def test_broken_weights_are_refused_before_any_work(source: Path, texts: Evalset, tmp_path: Path) -> None:
    broken = break_copy(source, tmp_path / "broken")
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.up_proj.weight' has 1 NaN"):
        apply(broken, tmp_path / "out", make_step("gptq"), texts)
    assert not (tmp_path / "out").exists()


def test_fewer_tokens_than_features_are_refused(source: Path, texts: Evalset, tmp_path: Path) -> None:
    wide = write_tiny_llama(tmp_path / "wide", intermediate_size=2048, num_hidden_layers=1)
    with pytest.raises(QuantizationError, match=r"tokens can't determine the 2048 input features of .*down_proj"):
        apply(wide, tmp_path / "out", make_step("gptq"), texts)


def test_a_singular_hessian_is_a_fallback(source: Path, texts: Evalset, tmp_path: Path) -> None:
    from unittest.mock import patch

    import llmcompressor.modifiers.gptq.gptq_quantize as library

    real = library.factorize_hessian

    def fail_once(weights: Any, hessians: Any, damping: float, used_fallback: Any) -> Any:
        factor = real(weights, hessians, damping, used_fallback)
        used_fallback[:] = weights.shape[-1] == 256
        return factor

    with patch.object(library, "factorize_hessian", fail_once):
        result = apply(source, tmp_path / "out", make_step("gptq"), texts)
    assert {f.layer for f in result.fallbacks} == {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}
    assert all("singular Hessian" in f.reason for f in result.fallbacks)


class TestCoverage:
    """What the check must find in a folder that was changed after it was written."""

    @pytest.fixture
    def folder(self, gptq_folder: tuple[Path, StepResult], tmp_path: Path) -> Path:
        return Path(shutil.copytree(gptq_folder[0], tmp_path / "copy"))

    def check(self, folder: Path, source: Path, **changes: object) -> None:
        step = make_step("gptq", **changes)
        check_coverage(folder, source=source, plan=plan_folder(source, step), log=StepLog("gptq", total=0))

    def edit(self, folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def test_untouched_folder_passes(self, folder: Path, source: Path) -> None:
        self.check(folder, source)

    def test_layer_that_was_not_asked_for(self, folder: Path, source: Path) -> None:
        with pytest.raises(QuantizationError, match=r"layer 'model\.layers\.0\.mlp\.down_proj' was quantised, but"):
            self.check(folder, source, exclude=["lm_head", "model.layers.0.mlp.down_proj"])

    def test_layer_that_stayed_dense(self, folder: Path, source: Path) -> None:
        name = "model.layers.1.mlp.up_proj"

        def make_dense(tensors: dict[str, Any]) -> None:
            for part in ("packed", "scale", "shape"):
                del tensors[f"{name}.weight_{part}"]
            tensors[f"{name}.weight"] = tensors["lm_head.weight"][:256].clone()

        self.edit(folder, make_dense)
        with pytest.raises(QuantizationError, match=rf"layer '{name}': expected int4-g64-symmetric .*, found weight"):
            self.check(folder, source)

    def test_scales_of_another_group_size(self, folder: Path, source: Path) -> None:
        name = "model.layers.1.mlp.up_proj.weight_scale"
        self.edit(folder, lambda tensors: tensors.update({name: tensors[name][:, :1].clone()}))
        with pytest.raises(
            QuantizationError, match=r"expected .* weight_scale F32 256x2.*, found .* weight_scale F32 256x1"
        ):
            self.check(folder, source)

    def test_config_that_declares_something_else(self, folder: Path, source: Path) -> None:
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace('"symmetric": true', '"symmetric": false'))
        with pytest.raises(QuantizationError, match=r"quantization_config: expected .* symmetric True.*, found .*"):
            self.check(folder, source)

    @pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
    def test_text_files_must_be_equal(self, folder: Path, source: Path, name: str) -> None:
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
        with pytest.raises(QuantizationError, match=f"{name}: differs from"):
            self.check(folder, source)
        (folder / name).unlink()
        with pytest.raises(QuantizationError, match=f"{name}: differs from"):
            self.check(folder, source)


def make_params(**candidates: dict[str, Any]) -> TextProduct:
    known: dict[str, dict[str, Any]] = (
        dict.fromkeys(("reference", "released"), {"checkpoint": "models/tiny", "steps": []}) | candidates
    )
    product = {
        "kind": "text",
        "reference": "reference",
        "release": ["released"],
        "optimize": {"calibration_texts": "evalsets/calibration", "num_threads": 1},
        "serving": {
            "dtype": "float32",
            "continuous_batching": True,
            "concurrency": 4,
            "num_threads": 1,
            "context_length": 256,
            "max_tokens": 16,
        },
        "resources": {"num_servers": 1, "request_timeout_s": 60.0, "start_timeout_s": 60.0},
        "canary": {"num_prompts": 8, "target_rate": 0.3},
        "evals": {"prose": {"kind": "perplexity", "evalset": "evalsets/prose"}},
        "gate": {
            "alpha": 0.05,
            "on_inconclusive": "block",
            "tolerances": {"prose/perplexity_per_token": {"overall": 0.02}},
        },
        "benchmark": NO_BENCHMARK,
    }
    owned = {name: {"product": PRODUCT} | settings for name, settings in known.items()}
    return get_product(parse_params({"products": {PRODUCT: product}, "candidates": owned}), PRODUCT, kind=TextProduct)


def build_candidate(name: str, product: TextProduct, *, root: Path) -> BuiltCandidate:
    return candidate_module.build_candidate(name, product, root=root, build=root / product.build)


def int4_settings(**changes: object) -> dict[str, object]:
    step = make_step("gptq", **changes).model_dump(mode="json")
    return {"checkpoint": "models/tiny", "steps": [step]}


def test_reference_points_at_its_checkpoint_and_copies_nothing(project: Path) -> None:
    made = build_candidate("reference", make_params(), root=project)
    folder = project / "build/agent/candidates/reference"
    assert os.listdir(folder) == ["candidate.json"]
    assert read_record(folder / "candidate.json", BuiltCandidate) == made
    assert made.checkpoint.path == "models/tiny"
    assert set(made.libraries) >= {"torch", "transformers", "compressed-tensors"}


def test_candidate_is_written_whole_and_replaces_the_old_one(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    params = make_params(int4=int4_settings())
    target = project / "build/agent/candidates/int4"
    target.mkdir(parents=True)
    (target / "stale").write_text("from an earlier run")
    (target.with_name(".int4.new") / "step-1").mkdir(parents=True)  # what a killed run leaves behind
    made = build_candidate("int4", params, root=project)
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        r"seconds: load the tokenizer \S+ s, load the model \S+ s, check the source \S+ s, "
        r"import the library \S+ s, quantise \S+ s, save \S+ s, free the model \S+ s, check the weights \S+ s, "
        r"check the logits \S+ s, digest \S+ s; \S+ s in all",
        line,
    )
    assert sorted(os.listdir(target)) == ["candidate.json", "checkpoint"]
    assert made.checkpoint.path == "build/agent/candidates/int4/checkpoint"
    assert made.checkpoint.parent_digest == build_candidate("reference", params, root=project).checkpoint.digest
    assert read_checkpoint(project / made.checkpoint.path, root=project).digest == made.checkpoint.digest
    assert {layer.format for layer in made.coverage} == {"int4-g64-symmetric", "float32"}
    assert not [n for n in os.listdir(target.parent) if n.startswith(".")]
    import torch

    assert torch.get_num_threads() == params.optimize.num_threads  # another number writes other bytes


def test_failed_step_leaves_the_old_candidate_alone(project: Path) -> None:
    params = make_params(kept=int4_settings(), reference={"checkpoint": "models/tiny", "steps": []})
    before = build_candidate("kept", params, root=project)
    with pytest.raises(QuantizationError, match="matches no linear layer"):
        build_candidate("kept", make_params(kept=int4_settings(exclude=["typo"])), root=project)
    folder = project / "build/agent/candidates/kept"
    assert read_record(folder / "candidate.json", BuiltCandidate) == before
    assert read_tensors(folder / "checkpoint")


def break_copy(source: Path, copy: Path) -> Path:
    """Copy a checkpoint and put a NaN into one of its tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_broken_checkpoints_are_refused_without_steps_as_well(project: Path, source: Path) -> None:
    break_copy(source, project / "models/nan")
    old = shutil.copytree(source, project / "models/old")
    config = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    params = make_params(nan={"checkpoint": "models/nan", "steps": []}, old={"checkpoint": "models/old", "steps": []})
    with pytest.raises(CheckpointError, match="has 1 NaN or infinite values"):
        build_candidate("nan", params, root=project)
    if not importlib.util.find_spec("gptqmodel"):
        with pytest.raises(CheckpointError, match="need the package gptqmodel"):
            build_candidate("old", params, root=project)
    assert not (project / "build/agent/candidates/nan").exists()


def test_unknown_candidate_names_the_known(project: Path) -> None:
    with pytest.raises(SettingsError, match="expected one of reference, released, got 'refrence'"):
        build_candidate("refrence", make_params(), root=project)


def test_disk_full_is_one_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(candidate_module, "write_record", fail)
    with pytest.raises(CheckpointError, match="build/agent/candidates/reference: can't be written: .*No space left"):
        build_candidate("reference", make_params(), root=project)
