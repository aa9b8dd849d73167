"""Planning a step from names and shapes: every refusal names the layers and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import QuantizationError
from pipeline.products.text.optimize.layers import plan_layers
from pipeline.products.text.settings import Calibration, QuantizeStep

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
    with pytest.raises(QuantizationError, match=r"down_proj \(172\) and 1 more; exclude them|; exclude them$"):
        plan_layers(shapes(inner=172), step())


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


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_a_whole_layer_is_refused(bits: int) -> None:
    """It ended in a traceback, after the library had quantised."""
    weights = {"num_bits": bits, "type": "int", "strategy": "tensor"}
    asked = QuantizeStep.model_validate({"kind": "quantize", "weights": weights | {"symmetric": False}})
    with pytest.raises(QuantizationError, match=r"weights\.symmetric: expected true with strategy tensor, got false"):
        plan_layers(shapes(), asked)
    assert plan_layers(shapes(), QuantizeStep.model_validate({"kind": "quantize", "weights": weights}))
