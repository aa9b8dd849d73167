"""Schemes: the presets are the library's, and what is stored of a layer is what the library stores."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from ruamel.yaml import YAML

from pipeline.errors import SettingsError
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.hardware import (
    FALLS_BACK,
    NO_KERNEL,
    RUNS,
    check_ranks,
    predict_run,
    warn_of_fallbacks,
    warn_of_score_caps,
)
from pipeline.products.text.problems import find_text_problems
from pipeline.products.text.schemes import PRESETS, NumberFormat, find_preset, list_rounded
from pipeline.products.text.serving.loading import load_candidate
from pipeline.products.text.settings import TextProduct, VllmEngine
from pipeline.products.text.step_settings import QuantizeStep
from pipeline.records.evaluations import Candidate
from pipeline.records.serving import ServingConfig
from tests.fakes.tiny_architectures import write_tiny_model
from tests.paths import ROOT

FIELDS = tuple(NumberFormat.model_fields)


def as_fields(arguments: QuantizationArgs | NumberFormat | None) -> dict[str, Any] | None:
    if arguments is None:
        return None
    data = {name: getattr(arguments, name) for name in FIELDS}
    data = {name: str(getattr(value, "value", value)).removeprefix("torch.") for name, value in data.items()}
    return data | {"block_structure": str(list(arguments.block_structure or ()))}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_librarys_of_that_name(name: str) -> None:
    theirs = PRESET_SCHEMES[name]
    assert as_fields(PRESETS[name].weights) == as_fields(theirs["weights"])
    assert as_fields(PRESETS[name].input_activations) == as_fields(theirs.get("input_activations"))


def test_sizes_by_hand() -> None:
    scheme = find_preset("W4A16_ASYM", 32)
    # 24 x 64 weights of 4 bits; 2 groups a row; zero points packed along 24 rows: 3 words a group
    assert scheme.list_parts((24, 64), float_type="F16") == {
        "weight_packed": ("I32", (24, 8)),
        "weight_scale": ("F16", (24, 2)),
        "weight_shape": ("I64", (2,)),
        "weight_zero_point": ("I32", (3, 2)),
    }
    assert scheme.count_bytes((24, 64)) == 24 * 64 // 2 + 24 * 2 * 2 + 16 + 3 * 2 * 4


@pytest.mark.parametrize(
    ("name", "bytes_a_weight"),
    [("W4A8", 1 + 2 / 128), ("NVFP4A16", 0.5 + 1 / 16), ("MXFP4", 0.5 + 1 / 32), ("FP8_BLOCK", 1 + 2 / 128**2)],
)
def test_bytes_a_weight(name: str, bytes_a_weight: float) -> None:
    shape = (256, 512)
    overhead = 4 if "NVFP4" in name else 0  # the scale of the whole layer
    assert PRESETS[name].count_bytes(shape) - overhead == bytes_a_weight * 256 * 512


def test_names_tell_schemes_apart() -> None:
    assert len({scheme.name for scheme in PRESETS.values()}) == len(PRESETS)
    assert PRESETS["NVFP4"].name == "nvfp4/nvfp4"
    assert PRESETS["FP8_DYNAMIC"].name == "fp8-channel/fp8-token-dynamic"


def test_only_scales_that_are_stored_need_texts() -> None:
    assert {name for name, scheme in PRESETS.items() if scheme.needs_calibration} == {"FP8", "NVFP4"}


CALIBRATION = {"sources": ["prose"], "num_samples": 8, "max_tokens": 64, "length_exponent": 0.0}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FP8_INPUTS = {"num_bits": 8, "type": "float"}
BLOCKS = {"block_structure": [128, 128]}
NVFP4 = PRESETS["NVFP4A16"].weights.model_dump()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scheme": "FP9"}, "scheme: expected one of W4A16, .*, got 'FP9'"),
        ({}, "scheme: expected one of W4A16, .*, or weights spelt out, found none"),
        ({"scheme": "W8A8", "weights": INT4}, "weights: expected none beside the scheme W8A8; remove one"),
        ({"scheme": "W8A8", "group_size": 64}, "group_size: expected none with scheme W8A8, which has its own"),
        ({"scheme": "MXFP4", "group_size": 64}, "group_size: expected none with scheme MXFP4"),
        ({"weights": INT4, "group_size": 64}, "group_size: expected it in weights"),
        ({"weights": INT4 | {"group_size": None}}, "weights.group_size: expected a value with strategy group"),
        (
            {"weights": INT4 | {"strategy": "channel"}},
            "weights.group_size: expected none with strategy channel",
        ),
        (
            {"weights": INT4 | {"type": "float", "num_bits": 8, "symmetric": False}},
            "weights.symmetric: expected true with type float",
        ),
        ({"weights": INT4 | {"dynamic": True}}, "weights: expected scales that are stored"),
        ({"scheme": "W8A8", "rules": [{"layers": ["x"], "scheme": "W5"}]}, "rules.0.scheme: expected one of W4A16"),
        ({"scheme": "FP8"}, "calibration: expected the texts that fp8-tensor/fp8-tensor is calibrated on"),
        ({"scheme": "W4A16", "algorithm": "awq"}, "calibration: expected the texts that awq is calibrated on"),
        ({"scheme": "W4A16", "calibration": CALIBRATION}, "calibration: expected none, as rounding to nearest"),
        (
            {"scheme": "W8A8", "kv_cache": {"dtype": "fp8"}},
            "calibration: expected the texts that kv_cache with",
        ),
        ({"scheme": "W8A8", "smoothing_strength": 0.5}, "calibration: expected the texts that smoothing_strength is"),
        (
            {"scheme": "W4A16", "algorithm": "awq", "smoothing_strength": 0.5, "calibration": CALIBRATION},
            "smoothing_strength: expected none with algorithm awq",
        ),
        (
            {"scheme": "FP8", "algorithm": "awq", "calibration": CALIBRATION},
            "algorithm: expected rtn or gptq, as fp8-tensor has one scale a layer",
        ),
        (
            {"weights": INT4, "input_activations": FP8_INPUTS | {"strategy": "attn_head"}},
            "input_activations.strategy: expected one of tensor, .*, got 'attn_head', which kv_cache has",
        ),
        (
            {"weights": INT4, "input_activations": FP8_INPUTS | {"strategy": "channel"}},
            "input_activations.strategy: expected one of tensor, token, group, tensor_group, got 'channel'",
        ),
        (
            {"weights": INT4, "input_activations": FP8_INPUTS | {"strategy": "token"}},
            "input_activations.dynamic: expected true with strategy token, got false",
        ),
        (
            {"weights": INT4, "input_activations": FP8_INPUTS | {"strategy": "tensor", "dynamic": "local"}},
            "input_activations.dynamic: expected false or true with strategy tensor, got local",
        ),
        (
            {"weights": NVFP4, "input_activations": NVFP4 | {"dynamic": "local", "group_size": 32}},
            "input_activations.scale_dtype: expected the numbers of NVFP4 .*, got num_bits 4, .*group_size 32",
        ),
        ({"weights": INT4 | {"scale_dtype": "uint8"}}, "weights.scale_dtype: expected the numbers of NVFP4"),
        ({"weights": NVFP4 | {"strategy": "group"}}, "weights.scale_dtype: expected the numbers of NVFP4"),
        ({"weights": NVFP4 | {"scale_dtype": None}}, "weights.scale_dtype: expected the numbers of NVFP4"),
        ({"weights": {"num_bits": 4, "type": "float", "strategy": "channel"}}, "weights.scale_dtype: expected the num"),
        (
            {"weights": {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}},
            "weights.symmetric: expected true with strategy tensor, whose values would share a zero-point",
        ),
        (
            {"weights": {"num_bits": 8, "type": "int", "strategy": "block", "symmetric": False, **BLOCKS}},
            "weights.symmetric: expected true with strategy block",
        ),
        ({"scheme": "W4A16", "damping_fraction": 0.1}, "damping_fraction: gptq alone has it, got algorithm rtn"),
        ({"scheme": "W4A16", "num_grid_points": 9}, "num_grid_points: awq alone has it, got algorithm rtn"),
        ({"scheme": "W4A16", "world_size": 2}, "world_size: expected 1 without calibration, .*, got 2"),
        (
            {"scheme": "W4A16", "algorithm": "gptq", "calibration": CALIBRATION, "world_size": 9},
            "world_size: expected at most a rank for each of 8 samples, got 9",
        ),
    ],
)
def test_a_step_that_contradicts_itself_is_one_line(settings: dict[str, Any], said: str) -> None:
    problems = list(QuantizeStep.model_validate({"kind": "quantize"} | settings).find_problems())
    assert len(problems) == 1
    assert re.match(said, problems[0])


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_settings_of_old_releases_are_read_as_they_were_meant(algorithm: str, bits: int, symmetric: bool) -> None:
    old = {"kind": algorithm, "bits": bits, "symmetric": symmetric, "group_size": 32, "calibration": CALIBRATION}
    step = QuantizeStep.model_validate(old)
    weights = step.resolve().weights
    assert (step.kind, step.algorithm) == ("quantize", algorithm)
    assert (weights.num_bits, weights.symmetric, weights.group_size) == (bits, symmetric, 32)
    assert step.resolve().input_activations is None
    assert QuantizeStep.model_validate(step.model_dump(mode="json")) == step
    assert not list(step.find_problems())


def make_product(step: dict[str, Any], **changes: Any) -> TextProduct:
    data = YAML(typ="safe").load(ROOT / "params.yaml")
    candidates: dict[str, Any] = {"agent": {"checkpoint": "models/agent", "steps": []}}
    candidates["made"] = {"checkpoint": "models/agent", "steps": [{"kind": "quantize", **step}]}
    product = data["products"]["agent"] | {"name": "agent", "candidates": candidates, "release": ["made"]} | changes
    product["benchmark"] |= {"candidates": ["made"]}
    return TextProduct.model_validate(product)


def test_a_release_on_imitated_numbers_needs_a_reason() -> None:
    (problem,) = find_text_problems(make_product({"scheme": "W8A8"}))
    assert problem.startswith("release: expected candidates whose numbers their engine runs, got made: ")
    assert "imitates int8-token-symmetric-dynamic inputs in float32" in problem
    assert not find_text_problems(make_product({"scheme": "W8A8"}, allow_emulated="measured on the target as well"))
    assert not any(
        "imitates" in text for text in find_text_problems(make_product({"scheme": "W8A8"}, release=["agent"]))
    )
    assert not find_text_problems(make_product({"scheme": "W8A16"}))


SMOOTHED = {"algorithm": "gptq", "smoothing_strength": 0.5}


@pytest.mark.parametrize(
    ("way", "num_gpus", "said"),
    [
        ({"algorithm": "gptq"}, 0, None),
        ({"algorithm": "gptq"}, 2, None),
        ({"algorithm": "gptq"}, 1, "expected at most 1, one rank a GPU, got 2"),
        ({"algorithm": "awq"}, 2, None),
        ({"algorithm": "awq"}, 0, "expected 1, as llm-compressor shares AWQ and SmoothQuant among GPUs alone"),
        (SMOOTHED, 2, None),
        (SMOOTHED, 0, "expected 1, as llm-compressor shares AWQ and SmoothQuant among GPUs alone"),
    ],
)
def test_ranks_need_a_gpu_each_or_none(way: dict[str, Any], num_gpus: int, said: str | None) -> None:
    """On a CPU ranks share the weights, and each moved SmoothQuant's scales: refused at the end."""
    step = {"scheme": "W4A16", "calibration": CALIBRATION, "world_size": 2, **way}
    if said is None:
        check_ranks(make_product(step), num_gpus)
        return
    with pytest.raises(SettingsError, match=rf"^candidates\.made\.steps\.0\.world_size: {said}"):
        check_ranks(make_product(step), num_gpus)


def test_one_rank_is_recorded_as_before_there_were_several() -> None:
    """Else every released INT4 candidate would be another recipe."""
    settings = {"kind": "quantize", "scheme": "W4A16", "algorithm": "gptq", "calibration": CALIBRATION}
    assert "world_size" not in QuantizeStep.model_validate(settings).build_record()
    assert QuantizeStep.model_validate(settings | {"world_size": 2}).build_record()["world_size"] == 2


def serve_by_vllm(step: dict[str, Any], *, report_kernels: bool, **changes: Any) -> list[str]:
    product = make_product(step, **changes)
    engine = VllmEngine(kind="vllm", command=["vllm", "serve"], version="0.26.0", report_kernels=report_kernels)
    made = product.candidates["made"].model_copy(update={"engine": engine})
    return find_text_problems(product.model_copy(update={"candidates": product.candidates | {"made": made}}))


def test_a_release_by_vllm_needs_proof_that_its_inputs_were_rounded() -> None:
    (problem,) = serve_by_vllm({"scheme": "W8A8"}, report_kernels=False)
    assert problem.startswith("release: expected proof that int8-token-symmetric-dynamic inputs of made run as asked; ")
    assert not serve_by_vllm({"scheme": "W8A8"}, report_kernels=True)
    assert not serve_by_vllm({"scheme": "W8A8"}, report_kernels=False, allow_emulated="measured on the target")
    others = serve_by_vllm({"scheme": "W8A8"}, report_kernels=False, release=["agent"])
    assert not any("proof" in problem for problem in others)
    assert not serve_by_vllm({"scheme": "W8A16"}, report_kernels=False)


@pytest.mark.parametrize(("strategy", "is_served"), [("tensor", True), ("attn_head", True), ("token", False)])
def test_a_cache_with_a_scale_a_token_is_not_served_by_vllm(strategy: str, is_served: bool) -> None:
    cache = {"dtype": "fp8", "strategy": strategy}
    step = {"scheme": "W8A16", "kv_cache": cache}
    if strategy != "token":
        step["calibration"] = CALIBRATION
    problems = serve_by_vllm(step, report_kernels=True)
    assert len(problems) == (0 if is_served else 1)
    assert is_served or problems[0].startswith("candidates.made.steps: expected kv_cache.strategy tensor or attn_head")


def test_floats_of_four_bits_are_not_served_in_float16() -> None:
    data = YAML(typ="safe").load(ROOT / "params.yaml")["products"]["agent"]["serving"]
    (problem,) = find_text_problems(make_product({"scheme": "NVFP4A16"}, serving=data | {"dtype": "float16"}))
    assert problem.startswith("candidates.made.steps.0.scheme: expected serving.dtype bfloat16 or float32 with nvfp4, ")
    assert not find_text_problems(make_product({"scheme": "NVFP4A16"}))


def test_a_cache_of_few_bits_is_imitated_as_well() -> None:
    step = {"scheme": "W8A16", "kv_cache": {"dtype": "fp8"}, "calibration": CALIBRATION}
    (problem,) = find_text_problems(make_product(step))
    assert "imitates fp8-tensor keys and values in float32" in problem


def test_a_record_has_no_settings_of_another_algorithm() -> None:
    record = QuantizeStep(kind="quantize", scheme="W8A8").build_record()
    assert record["kv_cache"] is None  # another one that is asked for must differ
    assert not {"num_grid_points", "damping_fraction", "activation_order"} & set(record)


def test_what_is_rounded_while_it_runs_is_read_from_config_json() -> None:
    groups = {
        "group_0": {"weights": {"num_bits": 4}, "input_activations": None},
        "group_1": {"input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}},
        "group_2": {"input_activations": {"num_bits": 6, "type": "float", "strategy": "tensor"}},
    }
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    assert list_rounded({"config_groups": groups, "kv_cache_scheme": cache}) == (
        "fp6-tensor inputs",
        "fp8-token-dynamic inputs",
        "fp8-tensor keys and values",
    )
    assert list_rounded({"quant_method": "gptq", "bits": 4}) == list_rounded({}) == ()


@pytest.mark.parametrize(
    ("name", "gpu", "run"),
    [
        ("W4A16", (7, 5), RUNS),
        ("W4A16", (7, 0), NO_KERNEL),
        ("W8A8", (8, 0), RUNS),
        ("W8A8", (10, 0), NO_KERNEL),
        ("W8A8", None, RUNS),
        ("W8A16", None, NO_KERNEL),
        ("W4A16", None, RUNS),
        ("FP8_DYNAMIC", (8, 6), FALLS_BACK),
        ("FP8_DYNAMIC", (8, 9), RUNS),
        ("FP8_DYNAMIC", None, RUNS),
        ("FP8", None, NO_KERNEL),
        ("W4AFP8", None, NO_KERNEL),
        ("W4A8", None, RUNS),
        ("NVFP4", (9, 0), FALLS_BACK),
        ("NVFP4", (10, 0), RUNS),
        ("NVFP4A16", (9, 0), RUNS),
        ("MXFP8", (9, 0), FALLS_BACK),
        ("W4AFP8", (9, 0), RUNS),
        ("W4AFP8", (8, 9), NO_KERNEL),
        ("W4A8", (9, 0), NO_KERNEL),
    ],
)
def test_what_a_gpu_runs(name: str, gpu: tuple[int, int] | None, run: str) -> None:
    assert predict_run(PRESETS[name], gpu) == run


def test_the_page_says_what_the_look_up_says() -> None:
    words = {"runs": RUNS, "weights": FALLS_BACK, "no": NO_KERNEL}
    gpus = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), None)
    page = (ROOT / "docs/schemes.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|((?: (?:runs|weights|no) \|){6})$", page, re.M)
    shown = {
        name: [words[cell.strip()] for cell in cells.strip("|").split("|")]
        for names, cells in rows
        for name in re.findall(r"`([^`]*)`", names)
    }
    assert shown == {name: [predict_run(scheme, gpu) for gpu in gpus] for name, scheme in PRESETS.items()}


@pytest.mark.parametrize(("name", "is_told"), [("gemma2", True), ("gemma3", False)])
def test_a_cap_on_attention_scores_is_told_before_any_work_and_by_the_engine(
    tmp_path: Path, name: str, is_told: bool
) -> None:
    """transformers' own attention leaves it out, and ours does."""
    folder = write_tiny_model(tmp_path / "model", name)
    product = make_product({"scheme": "NVFP4"})
    candidates = {n: c.model_copy(update={"checkpoint": "model"}) for n, c in product.candidates.items()}
    said = warn_of_score_caps(product.model_copy(update={"candidates": candidates}), tmp_path)
    assert said == ([f"{', '.join(candidates)}: {said[0].partition(': ')[2]}"] if is_told else [])
    weights = read_checkpoint(folder, root=tmp_path)
    serving = ServingConfig(context_length=64)
    loaded = load_candidate(Candidate(name="tiny", checkpoint=weights, serving=serving), folder)
    assert loaded.facts["engine"].get("left_out") == ({"attn_logit_softcapping": 50.0} if is_told else None)


def test_candidates_that_fall_back_are_named_before_any_work() -> None:
    engine = {"kind": "vllm", "command": ["/bin/true", "serve"], "version": "0.26.0"}
    product = make_product({"scheme": "NVFP4", "calibration": CALIBRATION})
    made = product.candidates["made"].model_copy(update={"engine": VllmEngine.model_validate(engine)})
    product = product.model_copy(update={"candidates": product.candidates | {"made": made}})
    (line,) = warn_of_fallbacks(product, ROOT, ((10, 0), (9, 0)))
    assert line.startswith("candidates.made: vLLM leaves inputs as they are for nvfp4/nvfp4 on compute capability 9.0;")
    assert not warn_of_fallbacks(product, ROOT, ((10, 0),))
    assert len(warn_of_fallbacks(product, ROOT, ())) == 1
    assert not warn_of_fallbacks(make_product({"scheme": "NVFP4"}), ROOT, ())  # the embedded engine imitates
