"""Planning a step from names and shapes: every refusal names the layers and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.errors import QuantizationError
from pipeline.products.text.optimize.layers import plan_folder, plan_layers
from pipeline.products.text.step_settings import Calibration, QuantizeStep

CALIBRATION = Calibration(sources=["prose"], num_samples=8, max_tokens=64, length_exponent=0.0)


def shapes(num_layers: int = 2, hidden: int = 128, inner: int = 256) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for i in range(num_layers):
        found |= {f"model.layers.{i}.self_attn.{p}_proj": (hidden, hidden) for p in "qkvo"}
        found |= {f"model.layers.{i}.mlp.{p}_proj": (inner, hidden) for p in ("gate", "up")}
        found[f"model.layers.{i}.mlp.down_proj"] = (hidden, inner)
    return found | {"lm_head": (320, hidden)}


def step(**changes: Any) -> QuantizeStep:
    settings: dict[str, Any] = {"group_size": 64} | changes
    return QuantizeStep(kind="gptq", calibration=CALIBRATION, **settings)


def test_default_leaves_only_the_head_out() -> None:
    plan = plan_layers(shapes(), step())
    assert list(plan.excluded) == ["lm_head"]
    assert len(plan.asked) == 14


def test_shell_patterns_name_layers_too() -> None:
    """They are what the convolution policies of kind vision take, and matched nothing."""
    plan = plan_layers(shapes(), step(exclude=["lm_*", "*.down_proj"]))
    assert sorted(plan.excluded) == ["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(2))]
    rules = [{"layers": ["*.[0]*"], "scheme": "W8A16"}]
    plan = plan_layers(shapes(), QuantizeStep.model_validate({"kind": "quantize", "scheme": "W4A16", "rules": rules}))
    assert all((scheme.weights.num_bits == 8) == (".0." in name) for name, scheme in plan.schemes.items())
    assert not any(name.startswith("*") for _, layers in plan.groups for name in layers)
    with pytest.raises(
        QuantizationError, match=r"write a name, a shell pattern such as '\*\.down_proj', or re: and a reg"
    ):
        plan_layers(shapes(), step(exclude=["*.downproj"]))


def test_patterns_are_exact_names_or_regexes_from_the_start() -> None:
    plan = plan_layers(shapes(), step(exclude=["lm_head", r"re:.*\.0\.mlp\.(gate|up)_proj", "re:lm"]))
    assert sorted(plan.excluded) == ["lm_head", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("model.layers.0.mlp.downproj", "model.layers.0.mlp.down_proj"),
        ("lmhead", "lm_head"),
        ("re:.*o_projj$", "o_proj"),
        ("re:layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest_layers(pattern: str, nearest: str) -> None:
    with pytest.raises(QuantizationError) as caught:
        plan_layers(shapes(), step(exclude=[pattern]))
    message = str(caught.value)
    assert message.startswith(f"exclude: {pattern!r} matches no linear layer; the nearest are ")
    assert nearest in message


def test_a_broken_regex_is_refused() -> None:
    with pytest.raises(QuantizationError, match=r"exclude: 're:\(' is not a regular expression"):
        plan_layers(shapes(), step(exclude=["re:("]))


def test_group_size_offers_what_divides() -> None:
    with pytest.raises(
        QuantizationError,
        match=r"128 does not divide .* of 2 layers: .*down_proj \(192\).*; use "
        "group_size 64 or 32 or 16, or exclude them",
    ):
        plan_layers(shapes(inner=192), step(group_size=128))
    with pytest.raises(QuantizationError, match=r"down_proj \(172\); use group_size 4, or exclude them$"):
        plan_layers(shapes(inner=172), step())
    with pytest.raises(QuantizationError, match=r"down_proj \(174\); exclude them$"):
        plan_layers(shapes(inner=174), step())


def test_a_group_wider_than_the_layer_is_refused() -> None:
    """The library lets it through and rounds the whole row as one group."""
    with pytest.raises(QuantizationError, match="group_size: 256 does not divide"):
        plan_layers(shapes(hidden=128), step(group_size=256))


@pytest.mark.parametrize("member", ["k_proj", "up_proj"])
def test_fused_groups_must_agree(member: str) -> None:
    with pytest.raises(QuantizationError, match=f"fused by vLLM and need one format, but {member} would be excluded"):
        plan_layers(shapes(), step(exclude=["lm_head", f"re:.*1.*{member}"]))


def test_tied_head_must_be_excluded() -> None:
    with pytest.raises(QuantizationError, match="'lm_head' shares its weights with the embedding"):
        plan_layers(shapes(), step(exclude=[]), tied_head="lm_head")
    assert "lm_head" in plan_layers(shapes(), step(exclude=[])).asked


def test_nothing_left_is_refused() -> None:
    with pytest.raises(QuantizationError, match="leaves none of 15 linear layers"):
        plan_layers(shapes(), step(exclude=["re:"]))


def test_format_name() -> None:
    assert step().resolve().name == "int4-g64-symmetric"
    assert step(bits=8, symmetric=False, group_size=32).resolve().name == "int8-g32-asymmetric"


def test_a_rule_that_earlier_ones_shadow_is_refused() -> None:
    """It had no effect, and nothing said so."""
    first, second = (
        {"layers": ["re:.*mlp.*"], "scheme": "W8A16"},
        {"layers": ["re:.*down_proj"], "scheme": "FP8_DYNAMIC"},
    )
    rules = {"kind": "quantize", "scheme": "W8A8", "rules": [first, second]}
    with pytest.raises(QuantizationError, match=r"^rules\.1\.layers: expected a layer that no earlier rule matches"):
        plan_layers(shapes(), QuantizeStep.model_validate(rules))
    plan = plan_layers(shapes(), QuantizeStep.model_validate(rules | {"rules": [second, first]}))
    down, up = (plan.schemes[f"model.layers.0.mlp.{name}_proj"].name for name in ("down", "up"))
    assert (down, up) == ("fp8-channel/fp8-token-dynamic", "int8-g128-symmetric")


def test_groups_of_inputs_that_do_not_divide_are_named_as_such() -> None:
    """The weights' key and number were named."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 96, "dynamic": True}
    asked = QuantizeStep.model_validate({"kind": "quantize", "weights": weights, "input_activations": inputs})
    with pytest.raises(QuantizationError, match=r"^input_activations\.group_size: 96 does not divide .*exclude them$"):
        plan_layers(shapes(), asked)


def write_headers(folder: Path, kind: str, tensors: Mapping[str, tuple[int, ...]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file({name: np.zeros(shape, np.float16) for name, shape in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("head", [{}, {"lm_head.weight": (64, 128)}], ids=["tied", "untied"])
def test_layers_that_are_transformers_own_are_refused_by_name(tmp_path: Path, head: dict[str, tuple[int, ...]]) -> None:
    """With a head of its own one layer of GPT-2 was quantised, and the step succeeded; else `exclude` was blamed."""
    tensors = {"transformer.wte.weight": (64, 128), "transformer.h.0.attn.c_attn.weight": (128, 384)}
    folder = write_headers(tmp_path / "gpt2", "gpt2", tensors | head)
    with pytest.raises(QuantizationError, match="expected linear layers, got model type 'gpt2', whose .* Conv1D"):
        plan_folder(folder, QuantizeStep.model_validate({"kind": "quantize", "scheme": "W8A8", "exclude": []}))


def test_layers_that_compute_in_a_way_of_their_own_are_refused_by_name(tmp_path: Path) -> None:
    """Falcon's were calibrated, saved unpacked, and then refused for what config.json said of them."""
    tensors = {"transformer.word_embeddings.weight": (64, 128), "transformer.h.0.mlp.dense_h_to_4h.weight": (512, 128)}
    folder = write_headers(tmp_path / "falcon", "falcon", tensors)
    with pytest.raises(
        QuantizationError, match="expected linear layers, got model type 'falcon', whose .* FalconLinear"
    ):
        plan_folder(folder, QuantizeStep.model_validate({"kind": "quantize", "scheme": "W8A8"}))


def test_an_embedding_that_mamba_has_is_none_of_the_layers(tmp_path: Path) -> None:
    """Its head is tied, so `lm_head` matched nothing, and the embedding would have been quantised."""
    tensors = {"backbone.embeddings.weight": (64, 128), "backbone.layers.0.mixer.in_proj.weight": (512, 128)}
    folder = write_headers(tmp_path / "mamba", "mamba", tensors)
    plan = plan_folder(folder, QuantizeStep.model_validate({"kind": "quantize", "scheme": "W8A8"}))
    assert list(plan.asked) == ["backbone.layers.0.mixer.in_proj"] and list(plan.excluded) == ["lm_head"]
