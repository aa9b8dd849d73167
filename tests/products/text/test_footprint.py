"""Bytes are counted tensor by tensor as stored, and a cache by the architecture."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.products.text.footprint import count_cache_bytes, count_load_bytes, find_block_linears, max_of_blocks
from pipeline.running.weight_files import TensorInfo

BYTES = {"F32": 4, "BF16": 2, "I32": 4, "I8": 1, "F8_E4M3": 1}
LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


def tensor(*shape: int, dtype: str = "F32") -> TensorInfo:
    num_bytes = BYTES[dtype]
    for size in shape:
        num_bytes *= size
    return TensorInfo(dtype=dtype, shape=shape, num_bytes=num_bytes, file="model.safetensors")


def test_each_tensor_counts_in_its_own_type() -> None:
    tensors = {"a.weight": tensor(64, 256, dtype="BF16"), "norm.weight": tensor(256)}
    assert count_load_bytes(tensors, {}) == 64 * 256 * 2 + 256 * 4
    assert count_load_bytes(tensors, {}, dtype="float32") == (64 * 256 + 256) * 4


@pytest.mark.parametrize(("bits", "values"), [(4, 8), (8, 4)])
def test_packed_weights_count_as_they_unpack_or_as_they_are_stored(bits: int, values: int) -> None:
    tensors = {
        "a.weight_packed": tensor(64, 32, dtype="I32"),
        "a.weight_scale": tensor(64, 2, dtype="BF16"),
        "a.weight_shape": tensor(4, dtype="I32"),
    }
    config = {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}}}
    rest = 64 * 2 * 2 + 16
    assert count_load_bytes(tensors, config) == 64 * 32 * values * 2 + rest
    assert count_load_bytes(tensors, config, dtype="float32") == 64 * 32 * values * 4 + rest
    assert count_load_bytes(tensors, config, dtype="float32", keeps_packed=True) == 64 * 32 * 4 + rest


def test_layers_of_a_mixed_recipe_count_by_the_group_that_names_them() -> None:
    tensors = {f"{layer}.weight_packed": tensor(64, 32, dtype="I32") for layer in ("model.a", "model.b", "model.c")}
    groups = {
        "group_0": {"weights": {"num_bits": 4}, "targets": ["model.a"]},
        "group_1": {"weights": {"num_bits": 8}, "targets": ["re:.*b"]},
    }
    config = {"quantization_config": {"config_groups": groups}}
    # one that none names counts as the first group's: 8 values a word, 4, and 8
    assert count_load_bytes(tensors, config, dtype="float32") == 64 * 32 * (8 + 4 + 8) * 4


def test_old_formats_stay_packed() -> None:
    tensors = {"a.qweight": tensor(64, 32, dtype="I32"), "a.scales": tensor(64, 2, dtype="BF16")}
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert count_load_bytes(tensors, config, dtype="float32") == 64 * 32 * 4 + 64 * 2 * 2


def test_eight_bit_integers_with_a_scale_are_weights_that_are_unpacked() -> None:
    tensors = {"a.weight": tensor(8, 16, dtype="I8"), "a.weight_scale": tensor(8, 1, dtype="BF16")}
    other = {"a.weight_zero_point": tensor(8, 1, dtype="I8")}
    assert count_load_bytes(tensors | other, {}) == 8 * 16 * 2 + 8 * 2 + 8
    assert count_load_bytes(tensors, {}, dtype="float32") == 8 * 16 * 4 + 8 * 2
    assert count_load_bytes(tensors, {}, dtype="float32", keeps_packed=True) == 8 * 16 + 8 * 2


def test_eight_bit_floats_are_wider_where_nothing_computes_with_them() -> None:
    tensors = {"a.weight": tensor(8, 8, dtype="F8_E4M3")}
    assert count_load_bytes(tensors, {}) == 128
    assert count_load_bytes(tensors, {}, keeps_packed=True) == 64


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, 1000 * 32),
        ({"sliding_window": 100}, 100 * 32),
        ({"sliding_window": 100, "model_type": "gemma2"}, 1100 * 16),
        ({"sliding_window": 100, "sliding_window_pattern": 4}, 100 * 24 + 1000 * 8),
        ({"sliding_window": 100, "use_sliding_window": False}, 1000 * 32),
        ({"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"] * 16}, 1100 * 16),
    ],
    ids=["grouped", "window", "gemma2", "pattern", "window-off", "every-other"],
)
def test_a_cache_holds_keys_and_values_of_each_layer(config: dict[str, Any], tokens: int) -> None:
    expected = 3 * tokens * 2 * 8 * 128 * 2
    assert count_cache_bytes(LLAMA | config, num_requests=3, context_length=1000) == expected
    composite = {"text_config": LLAMA | config}
    assert count_cache_bytes(composite, num_requests=3, context_length=1000) == expected


def test_an_8b_model_takes_8_gib_for_64_requests_of_1024_tokens() -> None:
    assert count_cache_bytes(LLAMA, num_requests=64, context_length=1024) == 8 << 30
    assert count_cache_bytes({"model_type": "unknown"}, num_requests=64, context_length=1024) == 0


def test_blocks_are_summed_and_the_largest_counts() -> None:
    names = ["model.layers.0.a.weight", "model.layers.0.b.weight", "model.layers.1.a.weight", "lm_head.weight"]
    linears = find_block_linears({name: tensor(2, 3) for name in names} | {"model.layers.0.norm": tensor(3)})
    assert list(linears) == names[:3]
    assert max_of_blocks({names[0]: 5, names[1]: 6, names[2]: 9}) == 11
    assert max_of_blocks({}) == 0
