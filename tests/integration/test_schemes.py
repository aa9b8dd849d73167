"""Every scheme made by the library from a tiny checkpoint: what is stored, and what a planted defect says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.offload.module import offload_module
from safetensors.torch import load_file, save_file

from pipeline.errors import EngineError, QuantgateError, QuantizationError
from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.model_loading import load_model
from pipeline.products.text.optimize import llm_compressor
from pipeline.products.text.optimize import quantize as quantize_module
from pipeline.products.text.optimize.coverage import check_coverage
from pipeline.products.text.optimize.layers import plan_folder
from pipeline.products.text.optimize.progress import StepLog
from pipeline.products.text.optimize.quantize import quantize
from pipeline.products.text.optimize.ranges import check_ranges
from pipeline.products.text.optimize.reconstruction import check_reconstruction
from pipeline.products.text.schemes import PRESETS
from pipeline.products.text.serving.loading import choose_load_dtype, load_candidate
from pipeline.products.text.step_settings import Calibration, QuantizeStep
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig
from tests.fakes.tiny_architectures import write_tiny_model
from tests.fakes.tiny_llama import write_documents, write_tiny_llama

LAYER, ATTENTION = "model.layers.1.mlp.up_proj", "model.layers.1.self_attn"
CALIBRATION = Calibration(sources=["prose"], num_samples=16, max_tokens=64, length_exponent=0.0)
CACHE = {"kv_cache": {"dtype": "fp8"}, "calibration": CALIBRATION}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16, as transformers unpacks floats of four bits into it alone."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Evalset:
    words = "courier parcel north gate before market opens call room blue wait result".split()
    documents = [" ".join(words[i % 12 :] + words[: i % 7]) * 3 for i in range(30)]
    return load_evalset(write_documents(tmp_path_factory.mktemp("texts") / "calibration", {"prose": documents}))


def make_step(scheme: str | None, **changes: Any) -> QuantizeStep:
    settings: dict[str, Any] = {"scheme": scheme}
    if scheme and PRESETS[scheme].needs_calibration:
        settings["calibration"] = CALIBRATION
    if scheme == "FP8_BLOCK":
        settings["exclude"] = ["lm_head", "re:.*[qkv]_proj"]
    return QuantizeStep(kind="quantize", **settings | changes)


@pytest.fixture(scope="module")
def make(source: Path, texts: Evalset, tmp_path_factory: pytest.TempPathFactory) -> Callable[[QuantizeStep], Path]:
    made: dict[str, Path] = {}

    def make_once(step: QuantizeStep) -> Path:
        key = step.model_dump_json()
        if key not in made:
            folder = tmp_path_factory.mktemp("made") / "checkpoint"
            quantize(source, folder, step=step, calibration_set=texts)
            made[key] = folder
        return made[key]

    return make_once


@pytest.mark.parametrize("name", PRESETS)
def test_a_scheme_is_stored_as_it_is_described(name: str, source: Path, make: Callable[[QuantizeStep], Path]) -> None:
    step = make_step(name, **({"group_size": 64} if name.startswith("W4") or name == "W8A16" else {}))
    tensors = load_file(make(step) / "model.safetensors")
    stored = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{LAYER}.")}
    shape = plan_folder(source, step).asked[LAYER]
    assert {part: tuple(t.shape) for part, t in stored.items()} == {
        part: size for part, (_, size) in step.resolve().list_parts(shape).items()
    }
    assert sum(t.nbytes for t in stored.values()) == step.resolve().count_bytes(shape)


def test_rules_mix_schemes_and_the_first_that_matches_counts(source: Path, texts: Evalset, tmp_path: Path) -> None:
    rules = [
        {"layers": ["model.layers.0.mlp.down_proj"], "scheme": "W8A8"},
        {"layers": ["re:.*down_proj"], "scheme": "W4A16", "group_size": 64},
    ]
    step = make_step("FP8_DYNAMIC", rules=rules)
    result = quantize(source, tmp_path / "out", step=step, calibration_set=texts)
    formats = {layer.layer: layer.format for layer in result.coverage}
    assert formats["model.layers.0.mlp.down_proj"] == PRESETS["W8A8"].name
    assert formats["model.layers.1.mlp.down_proj"] == "int4-g64-symmetric"
    assert formats[LAYER] == PRESETS["FP8_DYNAMIC"].name


def test_what_is_made_in_several_files_is_checked_as_one(
    source: Path, texts: Evalset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_compressor, "MAX_SHARD", "60KB")
    quantize(source, tmp_path / "made", step=make_step("FP8", **CACHE), calibration_set=texts)
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 2


def edit(folder: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def cast(source: Path, target: Path, dtype: torch.dtype, change: Callable[[dict[str, Any]], object] = id) -> Path:
    """Copy a checkpoint in another number format."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    tensors = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    (target / "config.json").write_text(json.dumps(config))
    return target


def change_one(name: str, change: Callable[[Any], object], tensors: dict[str, Any]) -> None:
    change(tensors[name])


def check(folder: Path, source: Path, step: QuantizeStep, log: StepLog | None = None) -> None:
    plan, log = plan_folder(source, step), log or StepLog(step.algorithm)
    check_coverage(folder, source=source, plan=plan, log=log)
    check_reconstruction(folder, source=source, step=step, plan=plan, log=log)
    if log.ranges:
        check_ranges(folder, plan=plan, log=log)


def double(tensor: Any, *place: int) -> None:
    if tensor.dtype == torch.uint8:  # a power of two by its exponent
        tensor[place] += 1
    else:
        tensor[place] = (tensor[place].float() * 2).to(tensor.dtype)


@pytest.mark.parametrize("name", PRESETS)
def test_one_scale_twice_as_large_is_refused(
    name: str, source: Path, make: Callable[[QuantizeStep], Path], tmp_path: Path
) -> None:
    step = make_step(name, **({"group_size": 64} if name.startswith("W4") or name == "W8A16" else {}))

    def change(tensors: dict[str, Any]) -> None:
        scale = tensors[f"{LAYER}.weight_scale"]
        double(scale, *(0,) * scale.dim())

    folder = edit(make(step), tmp_path / "out", change)
    with pytest.raises(QuantizationError, match=rf"layer '{LAYER}': (group 0 of row \d+ is|its weights are) "):
        check(folder, source, step)


@pytest.mark.parametrize("name", ["W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4"])
def test_a_layer_left_dense_is_refused(
    name: str, source: Path, make: Callable[[QuantizeStep], Path], tmp_path: Path
) -> None:
    dense = load_file(source / "model.safetensors")[f"{LAYER}.weight"]

    def change(tensors: dict[str, Any]) -> None:
        for key in [key for key in tensors if key.startswith(f"{LAYER}.")]:
            del tensors[key]
        tensors[f"{LAYER}.weight"] = dense

    folder = edit(make(make_step(name)), tmp_path / "out", change)
    with pytest.raises(QuantizationError, match=rf"layer '{LAYER}': expected .*, found weight BF16"):
        check(folder, source, make_step(name))


@pytest.mark.parametrize("name", ["W8A8", "FP8_DYNAMIC"])
def test_values_that_were_rounded_by_twice_the_scale_are_refused(
    name: str, source: Path, make: Callable[[QuantizeStep], Path], tmp_path: Path
) -> None:
    """They fit their scale, and the bound is in steps of it."""

    def coarsen(tensors: dict[str, Any]) -> None:
        values, scale = tensors[f"{LAYER}.weight"], tensors[f"{LAYER}.weight_scale"]
        halves = values.float() / 2
        tensors[f"{LAYER}.weight"] = (halves.round() if values.dtype == torch.int8 else halves).to(values.dtype)
        scale *= 2

    folder = edit(make(make_step(name)), tmp_path / "out", coarsen)
    with pytest.raises(QuantizationError, match=rf"layer '{LAYER}': group 0 of row \d+: expected a scale of about "):
        check(folder, source, make_step(name))


def zero_values(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}.weight_packed"].fill_(-0x77777778)  # eight times the value 8, which stands for 0


def swap_layers(tensors: dict[str, Any]) -> None:
    other = LAYER.replace("layers.1", "layers.0")
    for part in ("weight_packed", "weight_scale"):
        mine, theirs = f"{LAYER}.{part}", f"{other}.{part}"
        tensors[mine], tensors[theirs] = tensors[theirs], tensors[mine]


def double_scales(tensors: dict[str, Any]) -> None:
    tensors[f"{LAYER}.weight_scale"] *= 2


@pytest.mark.parametrize("change", [zero_values, swap_layers, double_scales])
def test_a_layer_of_gptq_that_is_another_one_is_refused(
    change: Callable[[dict[str, Any]], None], source: Path, make: Callable[[QuantizeStep], Path], tmp_path: Path
) -> None:
    """Only its mean was looked at, which is near zero for any layer."""
    step = make_step("W4A16", algorithm="gptq", calibration=CALIBRATION, group_size=64)
    check(make(step), source, step)
    folder = edit(make(step), tmp_path / "out", change)
    with pytest.raises(QuantizationError, match=r"layer '.*': (its error is|group \d+ of row \d+: expected a scale)"):
        check(folder, source, step)


@pytest.mark.parametrize("scheme", ["W8A8", "W8A16", "W4A16", "FP8_DYNAMIC"])
def test_a_scale_that_float16_can_not_hold_is_refused(
    scheme: str, source: Path, texts: Evalset, tmp_path: Path
) -> None:
    """The library puts 0.001 there: every weight became zero, and the step said nothing."""
    other = cast(source, tmp_path / "source", torch.float16, lambda tensors: tensors[f"{LAYER}.weight"].mul_(1e-6))
    step = make_step(scheme, **({"group_size": 64} if scheme == "W4A16" else {}))
    with pytest.raises(QuantizationError, match=rf"layer '{LAYER}': group 0 of row \d+: expected a scale of about "):
        quantize(other, tmp_path / "made", step=step, calibration_set=texts)


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4", "MXFP8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_formats_that_are_unpacked_into_bfloat16_are_made_of_any_source(
    name: str, dtype: torch.dtype, source: Path, texts: Evalset, tmp_path: Path
) -> None:
    """The forward pass that proves finite logits mixed two types, and ended in a traceback."""
    other = cast(source, tmp_path / "source", dtype)
    quantize(other, tmp_path / "made", step=make_step(name), calibration_set=texts)


def test_an_input_that_is_always_zero_may_have_any_scale_and_an_infinite_one_none(
    source: Path, texts: Evalset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead layer was refused, as if the library's floor were a wrong scale."""
    step, name = make_step("FP8", calibration=CALIBRATION), "model.layers.0.input_layernorm.weight"
    dead = edit(source, tmp_path / "dead", lambda tensors: tensors[name].zero_())
    log = make_with_ranges(step, dead, texts, tmp_path / "made", monkeypatch)
    asleep = f"{name.removesuffix('input_layernorm.weight')}self_attn.q_proj"
    assert float(log.ranges[f"{asleep}.input"]) == 0
    for scale in (0.0, -1.0, float("nan")):
        fill = partial(torch.Tensor.fill_, value=scale)
        broken = edit(
            tmp_path / "made", tmp_path / f"scale {scale}", partial(change_one, f"{asleep}.input_scale", fill)
        )
        with pytest.raises(QuantizationError, match=rf"layer '{asleep}': its input_scale is "):
            check_ranges(broken, plan=plan_folder(dead, step), log=log)
    log.ranges[f"{asleep}.input"] = torch.tensor(float("inf"))
    with pytest.raises(QuantizationError, match="expected finite values in calibration, found inf"):
        check_ranges(tmp_path / "made", plan=plan_folder(dead, step), log=log)


def make_with_ranges(
    step: QuantizeStep, source: Path, texts: Evalset, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> StepLog:
    """Run a step, and return its log with what calibration saw."""
    logs: list[StepLog] = []

    def keep(kind: str) -> StepLog:
        logs.append(StepLog(kind))
        return logs[-1]

    monkeypatch.setattr(quantize_module, "StepLog", keep)
    quantize(source, folder, step=step, calibration_set=texts)
    return logs[0]


def set_to(value: float) -> Callable[[Any], Any]:
    return lambda tensor: tensor.fill_(value)


@pytest.mark.parametrize(
    ("scheme", "changes", "name", "change"),
    [
        ("FP8", {}, f"{LAYER}.input_scale", lambda tensor: tensor.mul_(2)),
        ("FP8", {}, f"{LAYER}.input_scale", lambda tensor: tensor.mul_(0.5)),
        ("FP8", {"algorithm": "gptq"}, f"{LAYER}.input_scale", lambda tensor: tensor.mul_(2)),
        ("FP8", {"smoothing_strength": 0.5}, f"{LAYER}.input_scale", lambda tensor: tensor.mul_(2)),
        ("NVFP4", {}, f"{LAYER}.input_global_scale", lambda tensor: tensor.mul_(2)),
        ("FP8_DYNAMIC", CACHE, f"{ATTENTION}.k_scale", set_to(1)),
        ("FP8_DYNAMIC", CACHE, f"{ATTENTION}.v_scale", set_to(1)),
        ("W4A16", CACHE | {"group_size": 64, "algorithm": "gptq"}, f"{ATTENTION}.v_scale", set_to(1)),
        (
            "W8A8",
            CACHE | {"kv_cache": {"dtype": "fp8", "strategy": "attn_head"}},
            f"{ATTENTION}.k_scale",
            lambda tensor: tensor[1].mul_(2),
        ),
        ("W8A8", CACHE, f"{ATTENTION}.k_scale", set_to(float("nan"))),
    ],
)
def test_a_stored_scale_must_reach_what_calibration_saw(
    scheme: str,
    changes: dict[str, Any],
    name: str,
    change: Callable[[Any], Any],
    source: Path,
    texts: Evalset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = make_step(scheme, **changes)
    log = make_with_ranges(step, source, texts, tmp_path / "made", monkeypatch)
    check(tmp_path / "made", source, step, log)
    folder = edit(tmp_path / "made", tmp_path / "edited", lambda tensors: change(tensors[name]))
    layer, _, part = name.rpartition(".")
    with pytest.raises(QuantizationError, match=rf"layer '{layer}': its {part} is .*, expected .* calibration saw"):
        check(folder, source, step, log)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head", "token"])
def test_a_cache_is_covered_layer_by_layer(strategy: str, source: Path, texts: Evalset, tmp_path: Path) -> None:
    calibration = {} if strategy == "token" else {"calibration": CALIBRATION}
    step = make_step("FP8_DYNAMIC", kv_cache={"dtype": "fp8", "strategy": strategy}, **calibration)
    result = quantize(source, tmp_path / "made", step=step, calibration_set=texts)
    caches = {layer.layer: layer.format for layer in result.coverage if layer.format.startswith("kv-")}
    name = f"kv-fp8-{strategy}" + ("-dynamic" if strategy == "token" else "")
    assert caches == {f"model.layers.{i}.self_attn": name for i in range(2)}
    rounded = read_checkpoint(tmp_path / "made", root=tmp_path).rounded
    assert rounded == ("fp8-token-dynamic inputs", f"{name.removeprefix('kv-')} keys and values")


def test_a_cache_scale_that_is_missing_or_was_not_asked_for_is_refused(
    source: Path, make: Callable[[QuantizeStep], Path], tmp_path: Path
) -> None:
    cached, plain = make_step("FP8_DYNAMIC", **CACHE), make_step("FP8_DYNAMIC")
    folder = edit(make(cached), tmp_path / "less", lambda tensors: tensors.pop(f"{ATTENTION}.k_scale"))
    with pytest.raises(QuantizationError, match=f"layer '{ATTENTION}': expected scales of keys and values"):
        check(folder, source, cached)
    with pytest.raises(QuantizationError, match=r"config\.json: quantization_config: expected .*, found .*num_bits 8"):
        check(make(cached), source, plain)
    with pytest.raises(QuantizationError, match=r"config\.json: quantization_config: expected "):
        check(make(plain), source, cached)


def test_smoothing_moves_scales_that_are_undone_before_weights_are_compared(
    source: Path, texts: Evalset, tmp_path: Path
) -> None:
    step = make_step("W8A8", smoothing_strength=0.5, calibration=CALIBRATION)
    quantize(source, tmp_path / "made", step=step, calibration_set=texts)  # refuses what it can't explain
    norm = "model.layers.0.input_layernorm.weight"
    before, after = (load_file(folder / "model.safetensors")[norm] for folder in (source, tmp_path / "made"))
    assert not torch.equal(before, after)


def test_norms_that_are_stored_as_a_distance_from_one_stay_where_nothing_is_moved_into_them(
    texts: Evalset, tmp_path: Path
) -> None:
    """The library adds one in bfloat16 and takes it off again: rounding to nearest changed each by up to 0.0039."""
    source = write_tiny_model(tmp_path / "gemma2", "gemma2", dtype="bfloat16")
    edited = edit(source, tmp_path / "source", scatter_norms)
    quantize(edited, tmp_path / "made", step=make_step("W8A8"), calibration_set=texts)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "made"))
    norms = [name for name in before if name.endswith("norm.weight")]
    assert len(norms) > 4 and all(before[name].equal(after[name]) for name in norms)
    awq = make_step("W4A16", group_size=32, algorithm="awq", calibration=CALIBRATION)
    quantize(edited, tmp_path / "moved", step=awq, calibration_set=texts)  # refuses what it can't explain
    moved = load_file(tmp_path / "moved/model.safetensors")
    changed = {name.split(".")[-2] for name in norms if not before[name].equal(moved[name])}
    assert changed == {"input_layernorm", "pre_feedforward_layernorm"}


def write_phi(folder: Path, source: Path) -> Path:
    import transformers

    size = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = transformers.PhiForCausalLM(
        transformers.PhiConfig(**size, num_attention_heads=4, max_position_embeddings=256)
    )
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "gemma2",
            "model.layers.0.post_attention_layernorm to model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj",
        ),
        ("phi", "model.layers.0.input_layernorm to model.layers.0.self_attn.q_proj, .*v_proj"),
    ],
)
def test_scales_that_would_change_answers_are_not_moved(
    model: str, said: str, source: Path, texts: Evalset, tmp_path: Path
) -> None:
    """By Llama's names scales went from Gemma's norm behind attention to the layers behind another one.

    Phi's norm feeds its other layers as well, which got none: logits changed by a third.
    """
    folder = tmp_path / "model"
    write_phi(folder, source) if model == "phi" else write_tiny_model(folder, model, dtype="bfloat16")
    step = make_step("W8A8", smoothing_strength=0.5, calibration=CALIBRATION)
    with pytest.raises(
        QuantizationError, match=f"^llm-compressor would move scales from {said}, which changes the answ"
    ):
        quantize(folder, tmp_path / "made", step=step, calibration_set=texts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_trying_a_move_leaves_the_model_as_it_is(source: Path, tmp_path: Path, dtype: str) -> None:
    model = load_model(write_tiny_model(tmp_path / "qwen2", "qwen2", dtype=dtype), dtype=dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    block = model.model.layers[0]
    attention = block.self_attn
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    moves = [
        llm_compressor.Move("norm", block.input_layernorm, projections),
        llm_compressor.Move("up", block.mlp.up_proj, [block.mlp.down_proj]),
    ]
    llm_compressor._check_moves(model, moves)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    with pytest.raises(
        QuantizationError, match=r"from norm to model.layers.0.self_attn.q_proj, .*k_proj, which changes"
    ):
        llm_compressor._check_moves(
            model, [moves[1], llm_compressor.Move("norm", block.input_layernorm, projections[:2])]
        )
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_trying_a_move_reaches_weights_that_lie_elsewhere(source: Path, tmp_path: Path) -> None:
    """On a GPU the library keeps weights on the host, and each look makes a new copy: what was written there was lost.

    Here they lie on the disk, which is as far away.
    """
    model = load_model(write_tiny_model(tmp_path / "qwen2", "qwen2", dtype="bfloat16"), dtype="bfloat16")
    block = model.model.layers[0]
    norm, attention = block.input_layernorm, block.self_attn
    before = norm.weight.detach().clone()
    (tmp_path / "away").mkdir()
    offload_module(norm, "cpu", "disk", offload_dir=str(tmp_path / "away"))
    llm_compressor._check_moves(
        model, [llm_compressor.Move("norm", norm, [attention.q_proj, attention.k_proj, attention.v_proj])]
    )
    assert norm.weight.equal(before)


def scatter_norms(tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor += torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * 0.05


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("mamba", {"smoothing_strength": 0.5}, "smoothing_strength: expected norms that llm-compressor knows .* Mamba"),
        (
            "bloom",
            {"scheme": "W4A16", "group_size": 32, "algorithm": "awq"},
            "llm-compressor would move scales from .*gelu",
        ),
    ],
)
def test_what_the_library_does_not_know_of_a_model_is_one_line(
    model: str, changes: dict[str, Any], said: str, texts: Evalset, source: Path, tmp_path: Path
) -> None:
    """Smoothing did nothing and said nothing, and AWQ ended in a traceback."""
    import transformers

    size = {"vocab_size": 320, "hidden_size": 64}
    made = {
        "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**size, num_hidden_layers=1)),
        "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**size, n_layer=1, n_head=2)),
    }[model]()
    made.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / "model" / name)
    step = make_step(changes.pop("scheme", "W8A8"), calibration=CALIBRATION, **changes)
    with pytest.raises(QuantizationError, match=f"^{said}"):
        quantize(tmp_path / "model", tmp_path / "made", step=step, calibration_set=texts)


@pytest.mark.parametrize(
    ("scheme", "changes", "imitated"),
    [
        ("W8A16", {}, {}),
        ("NVFP4A16", {}, {}),
        ("W8A8", {}, {"int8-token-symmetric-dynamic inputs": 14}),
        ("NVFP4", {}, {"nvfp4 inputs": 14}),
        ("FP8_DYNAMIC", CACHE, {"fp8-tensor keys and values": 2, "fp8-token-dynamic inputs": 14}),
        (None, CACHE, {"fp8-tensor keys and values": 2}),
    ],
)
def test_the_server_says_what_it_imitates_and_answers_as_plain_transformers_does(
    scheme: str | None, changes: dict[str, Any], imitated: dict[str, int], make: Callable[[QuantizeStep], Path]
) -> None:
    torch.set_num_threads(1)
    folder = make(make_step(scheme, **changes))
    checkpoint = read_checkpoint(folder, root=folder.parent)
    assert bool(checkpoint.rounded) == bool(imitated)
    serving = ServingConfig(dtype="float32", concurrency=2, context_length=64, max_tokens=8)
    loaded = load_candidate(Candidate(name="tiny", checkpoint=checkpoint, serving=serving, libraries={}), folder)
    assert loaded.facts["engine"].get("imitated", {}) == imitated
    plain = load_model(folder, dtype="bfloat16" if scheme in ("NVFP4", "NVFP4A16") else "float32")
    ids = torch.arange(20, 50)[None]
    with torch.no_grad():
        plain(ids, use_cache=False)  # unpacks
        torch.nn.Module.float(plain)  # transformers refuses it, as it can't know that all is unpacked
        expected = plain(ids, use_cache=False).logits
        got = loaded.scorer(ids, use_cache=False).logits
    assert (got - expected).abs().max() <= 2e-4 * expected.abs().max()


def test_floats_of_four_bits_beside_wider_weights_are_refused(
    make: Callable[[QuantizeStep], Path], tmp_path: Path
) -> None:
    name = "model.embed_tokens.weight"
    folder = edit(make(make_step("NVFP4A16")), tmp_path / "wide", lambda t: t.update({name: t[name].float()}))
    with pytest.raises(EngineError, match=f"expected serving.dtype bfloat16, .* got float32, and '{name}' is .* F32"):
        choose_load_dtype(folder, "float32")
    assert choose_load_dtype(folder, "bfloat16") == "bfloat16"
    assert choose_load_dtype(make(make_step("W8A8")), "float32") == "float32"


def test_another_scheme_than_asked_is_refused(source: Path, make: Callable[[QuantizeStep], Path]) -> None:
    with pytest.raises(QuantizationError, match=r"config\.json: quantization_config: expected .*, found .*float-quant"):
        check(make(make_step("FP8_DYNAMIC")), source, make_step("W8A8"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheme": "FP8_BLOCK", "exclude": ["lm_head"]}, r"^scheme: blocks of 128 x 128 do not divide \d+ layers: "),
        ({"scheme": "W4A16", "group_size": 48}, "^group_size: 48 does not divide"),
        ({"rules": [{"layers": ["re:.*k_proj"], "scheme": "W4A16", "group_size": 64}]}, "^rules: .* fused by vLLM"),
        ({"rules": [{"layers": ["re:.*w2"], "scheme": "W4A16"}]}, r"^rules\.0\.layers: 're:\.\*w2' matches no linear"),
        ({"rules": [{"layers": ["lm_head"], "scheme": "W8A16"}]}, r"^rules\.0\.layers: .* 'lm_head', which `exclude`"),
        ({"rules": [{"layers": ["re:("], "scheme": "W8A16"}]}, r"^rules\.0\.layers: 're:\(' is not a regular"),
    ],
)
def test_what_does_not_fit_a_checkpoint_is_one_line(source: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(QuantgateError, match=said) as caught:
        plan_folder(source, make_step(**{"scheme": "W8A8"} | changes))
    assert "\n" not in str(caught.value)
