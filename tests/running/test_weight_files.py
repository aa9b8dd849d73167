"""Weights are read a tensor at a time, and one value that is not finite is noticed wherever it is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.errors import CheckpointError
from pipeline.running.weight_files import INDEX_FILE, check_finite, iterate_weights, open_weights

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("place", [0, 17, 1022])
def test_one_broken_value_is_refused_wherever_it_is(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = torch.linspace(-1, 1, 1023).to(dtype)
    check_finite([("w", tensor)], where="here")
    tensor[place] = value
    with pytest.raises(CheckpointError, match="here: tensor 'w' has 1 NaN or infinite values of 1023"):
        check_finite([("w", tensor)], where="here")


def test_the_largest_values_no_values_and_integers_are_finite() -> None:
    largest = [(str(d), torch.full((9,), torch.finfo(d).max, dtype=d)) for d in DTYPES]
    check_finite([*largest, ("none", torch.zeros(0)), ("packed", torch.zeros(3, dtype=torch.int32))], where="here")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"])
def test_every_float_of_eight_bits_is_looked_at(name: str) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    finite = values.float().isfinite()
    check_finite([("w", values[finite])], where="here")
    assert 0 < int((~finite).sum()) < 10
    for broken in values[~finite]:
        with pytest.raises(CheckpointError, match="'w' has 1 NaN or infinite values of "):
            check_finite(
                [
                    (
                        "w",
                        torch.cat([values[finite].view(torch.uint8), broken.view(1).view(torch.uint8)]).view(
                            values.dtype
                        ),
                    )
                ],
                where="here",
            )


def test_a_tensor_is_read_by_its_name_from_the_shard_that_has_it(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(3)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tensors}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with open_weights(tmp_path) as read:
        assert {name: read(name).tolist() for name in tensors} == {"b": [1, 1], "a": [0, 0, 0]}
    assert {name: tensor.tolist() for name, tensor in iterate_weights(tmp_path)} == {"b": [1, 1], "a": [0, 0, 0]}


def test_a_whole_file_beside_an_index_is_refused(tmp_path: Path) -> None:
    """An engine that follows the index would serve other weights than those that were checked."""
    save_file({"w": torch.ones(2), "v": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys("wv", "model.safetensors")}))
    assert [name for name, _ in iterate_weights(tmp_path)] == ["v", "w"]  # the same, as some tools write it
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match="found both"):
        list(iterate_weights(tmp_path))
