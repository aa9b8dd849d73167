"""Inputs of few bits: what a layer rounds them to is compressed-tensors' own result, in every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle import forward as library
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization

from pipeline.products.text.serving.input_rounding import (
    InputRounding,
    RoundedLinear,
    find_rounding,
    leaves_the_gpu,
    use_own_rounding,
)

CHANNELS = 256
OWN = ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "W4AFP8"]
LEFT = ["MXFP8", "MXFP4", "FP8"]  # scales that are powers of two, and a stored one


def build_layer(preset: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a linear layer as one of a checkpoint is when it was decompressed."""
    layer = torch.nn.Linear(CHANNELS, 128, bias=False, dtype=dtype)
    initialize_module_for_quantization(layer, preset_name_to_scheme(preset, ["Linear"]))
    for name, value in layer.named_parameters():
        if name != "weight" and value.is_floating_point():
            value.data = torch.full_like(value, 300.0 if "global" in name else 0.02)
    layer.quantization_status = QuantizationStatus.COMPRESSED
    return layer


def draw(dtype: torch.dtype, *, size: float, seed: int) -> torch.Tensor:
    """Return inputs of some size with outliers, and one token of zeros."""
    x = torch.randn(2, 37, CHANNELS, generator=torch.Generator().manual_seed(seed)) * size
    x[0, ::5, ::17] *= 40
    x[1, 3] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", OWN)
def test_values_are_those_of_the_library_in_every_bit(preset: str, dtype: torch.dtype) -> None:
    layer = build_layer(preset, dtype)
    rounding = find_rounding(layer)
    assert isinstance(rounding, InputRounding)
    for seed, size in enumerate((1e-6, 0.02, 1.0, 30.0, 200.0)):
        x = draw(dtype, size=size, seed=seed)
        expected = library.forward_quantize(layer, x, "input", layer.quantization_scheme.input_activations)
        assert rounding(x).dtype == expected.dtype
        assert torch.equal(rounding(x), expected)


@pytest.mark.parametrize("preset", OWN)
def test_broken_and_tiny_values_are_rounded_alike_and_inputs_stay_as_they_are(preset: str) -> None:
    """What is no number must not become one: a served NaN would be hidden."""
    layer = build_layer(preset)
    x = torch.randn(1, 12, 2 * CHANNELS, generator=torch.Generator().manual_seed(0))[..., ::2]  # not contiguous
    x[0, 0, 0], x[0, 1, 5], x[0, 2, 5] = float("nan"), float("inf"), -float("inf")
    x[0, 3], x[0, 4], x[0, 5] = x[0, 3] * 1e-45, x[0, 4] * 1e-39, -0.0
    before = x.clone()
    expected = library.forward_quantize(layer, x, "input", layer.quantization_scheme.input_activations)
    torch.testing.assert_close(find_rounding(layer)(x), expected, rtol=0, atol=0, equal_nan=True)  # type: ignore[misc]
    assert expected.isnan().any() and torch.equal(x.nan_to_num(), before.nan_to_num())


def test_ties_go_where_the_library_has_them_go() -> None:
    layer = build_layer("NVFP4")
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(CHANNELS // 8)
    x = torch.stack([ties, -ties])[None] * 0.5
    expected = library.forward_quantize(layer, x, "input", layer.quantization_scheme.input_activations)
    assert len(set(expected.flatten().tolist())) > 8  # not all on one value
    assert torch.equal(find_rounding(layer)(x), expected)  # type: ignore[misc]


@pytest.mark.parametrize("preset", LEFT)
def test_other_formats_are_left_to_the_library(preset: str) -> None:
    layer = build_layer(preset)
    rounding = find_rounding(layer)
    assert rounding is not None and not isinstance(rounding, InputRounding)


def test_a_layer_without_rounding_has_none() -> None:
    assert find_rounding(build_layer("W4A16")) is None
    assert find_rounding(torch.nn.Linear(4, 4)) is None


def test_a_layer_is_held_against_the_library_once() -> None:
    """Packing asks for the rounding that the layer has by then."""
    layer = build_layer("W8A8")
    use_own_rounding([torch.nn.ModuleList([layer])])
    assert find_rounding(layer) is layer.forward.round_input


def test_a_library_that_rounds_otherwise_keeps_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, plain = build_layer("W8A8"), library.forward_quantize
    monkeypatch.setattr(library, "forward_quantize", lambda *args, **kwargs: plain(*args, **kwargs) * (1 + 1e-6))
    assert not isinstance(find_rounding(layer), InputRounding)


@pytest.mark.parametrize("shape", [(5, CHANNELS), (1, 0, CHANNELS)])
def test_other_shapes_are_rounded_by_the_library(shape: tuple[int, ...]) -> None:
    layer = build_layer("W8A8")  # of two dimensions it has all tokens share a scale
    x = torch.randn(shape)
    expected = library.forward_quantize(layer, x, "input", layer.quantization_scheme.input_activations)
    assert torch.equal(find_rounding(layer)(x), expected)  # type: ignore[misc]


@pytest.mark.parametrize("preset", OWN)
def test_what_several_layers_take_is_rounded_once(preset: str) -> None:
    queries, keys, other = (find_rounding(build_layer(name)) for name in (preset, preset, "W8A8"))
    x = draw(torch.float32, size=1.0, seed=0)
    assert keys(x) is not keys(x.clone())  # type: ignore[misc]
    assert queries(x) is keys(x)  # type: ignore[misc]
    assert torch.equal(other(x), other(x.clone()))  # type: ignore[misc]


def test_layers_of_another_scale_round_for_themselves() -> None:
    """One of NVFP4 is stored for each layer."""
    layers = [build_layer("NVFP4"), build_layer("NVFP4")]
    layers[1].input_global_scale.data *= 0.37
    x = draw(torch.float32, size=1.0, seed=0)
    first, second = (find_rounding(layer)(x) for layer in layers)  # type: ignore[misc]
    assert not torch.equal(first, second)
    assert torch.equal(second, find_rounding(layers[1])(x.clone()))  # type: ignore[misc]


def test_a_model_answers_as_before_and_stays_on_the_gpu() -> None:
    layers = [build_layer("FP8_DYNAMIC"), build_layer("MXFP8"), build_layer("FP8"), build_layer("W4A16")]
    for layer in layers:
        library.set_forward_quantized(layer)
    x = draw(torch.float32, size=1.0, seed=0)
    before = [layer(x) for layer in layers]
    assert [leaves_the_gpu(layer) for layer in layers] == [True, True, False, False]
    use_own_rounding([torch.nn.ModuleList(layers)])
    assert [leaves_the_gpu(layer) for layer in layers] == [False, True, False, False]
    assert [isinstance(layer.forward, RoundedLinear) for layer in layers] == [True, False, False, False]
    assert all(torch.equal(layer(x), old) for layer, old in zip(layers, before, strict=True))
