"""Emulated Winograd convolutions against exact arithmetic, a float64 direct convolution, and how they must fail."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from pipeline.errors import NumericsError
from pipeline.numerics.winograd import (
    INPUT_TRANSFORMS,
    OUTPUT_TRANSFORMS,
    WEIGHT_TRANSFORMS,
    direct_conv2d,
    store_winograd,
    transform_weight,
    winograd_conv2d,
)

SHAPES = [(3, 3), (4, 4), (5, 8), (13, 17), (32, 30)]
by_tile = pytest.mark.parametrize("tile", [2, 4])
by_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def draw(channels: int = 64, size: tuple[int, int] = (28, 28), seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return inputs of one unit and weights that keep it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, channels, *size, generator=generator)
    weight = torch.randn(channels, channels, 3, 3, generator=generator) / (9 * channels) ** 0.5
    return x, weight, torch.randn(channels, generator=generator)


def relative_rms(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    return float(((found.double() - exact).square().mean() / exact.square().mean()).sqrt())


@by_tile
def test_the_transforms_are_the_identity_they_claim(tile: int) -> None:
    """A^T [(G g) * (B^T d)] is the correlation of d and g, in fractions, for every pair of unit vectors."""
    size = tile + 2
    for i in range(size):
        for j in range(3):
            data = [Fraction(row[i]) for row in INPUT_TRANSFORMS[tile]]
            kernel = [Fraction(row[j]).limit_denominator(24) for row in WEIGHT_TRANSFORMS[tile]]
            found = [
                sum(Fraction(c) * d * k for c, d, k in zip(row, data, kernel, strict=True))
                for row in OUTPUT_TRANSFORMS[tile]
            ]
            assert found == [int(i == out + j) for out in range(tile)]


@by_tile
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("size", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_float32_equals_a_float64_direct_convolution(tile: int, padding: int, size: tuple[int, int]) -> None:
    x, weight, bias = draw(channels=7, size=size)
    weight, bias = weight[:5], bias[:5]
    found = winograd_conv2d(x, weight, bias, tile=tile, dtype=torch.float32, padding=padding)
    exact = F.conv2d(x.double(), weight.double(), bias.double(), padding=padding)
    assert found.dtype == torch.float32 and found.shape == exact.shape
    assert (found - exact).abs().max() < (2e-6 if tile == 2 else 2e-5)


@by_tile
@by_dtype
@pytest.mark.parametrize("is_narrow", [False, True], ids=["sum-fp32", "sum-narrow"])
def test_small_whole_numbers_come_out_exactly(tile: int, dtype: torch.dtype, is_narrow: bool) -> None:
    """Nothing is rounded where every intermediate fits: a wrong shift or a tile too few shows, whatever the dtype."""
    x = torch.zeros(1, 2, 9, 11)
    x[0, 0, 2, 3], x[0, 1, 8, 10], x[0, 0, 5, 5] = 1.0, 2.0, -1.0
    weight = torch.zeros(3, 2, 3, 3)
    weight[:, :, 1, 1] = torch.tensor([[36.0, 0], [0, 72], [36, -36]])  # 36 is what the centre is divided by for m = 4
    found = winograd_conv2d(x, weight, tile=tile, dtype=dtype, accumulate=dtype if is_narrow else torch.float32)
    assert torch.equal(found, F.conv2d(x, weight, padding=1))


@by_dtype
def test_the_fewer_multiplications_the_larger_the_error(dtype: torch.dtype) -> None:
    x, weight, _ = draw()
    direct = relative_rms(direct_conv2d(x, weight, dtype=dtype), x, weight)
    two, four = (relative_rms(winograd_conv2d(x, weight, tile=t, dtype=dtype), x, weight) for t in (2, 4))
    assert 1.5 * direct < two and 3 * two < four


@pytest.mark.parametrize(
    ("tile", "accumulate", "expected"),
    [(2, torch.float32, 8.1e-4), (4, torch.float32, 4.0e-3), (2, torch.float16, 2.1e-3), (4, torch.float16, 1.3e-2)],
)
def test_errors_at_64_channels_in_fp16(tile: int, accumulate: torch.dtype, expected: float) -> None:
    """Direct: 3.6e-4. The numbers are ours: they must not move unnoticed."""
    x, weight, _ = draw()
    found = winograd_conv2d(x, weight, tile=tile, dtype=torch.float16, accumulate=accumulate)
    assert relative_rms(found, x, weight) == pytest.approx(expected, rel=0.1)
    assert relative_rms(direct_conv2d(x, weight, dtype=torch.float16), x, weight) == pytest.approx(3.6e-4, rel=0.1)


@by_tile
@by_dtype
def test_every_result_is_a_number_of_the_dtype(tile: int, dtype: torch.dtype) -> None:
    x, weight, bias = draw(channels=8)
    for found in (
        winograd_conv2d(x, weight, bias, tile=tile, dtype=dtype),
        direct_conv2d(x, weight, bias, dtype=dtype),
        transform_weight(weight, tile=tile, dtype=dtype),
    ):
        assert torch.equal(found, found.to(dtype).float())


@by_tile
@by_dtype
def test_operands_are_rounded_before_anything_else(tile: int, dtype: torch.dtype) -> None:
    """The checkpoint and the layer before are of the dtype, too."""
    x, weight, bias = draw(channels=8)
    stored = [value.to(dtype).float() for value in (x, weight, bias)]
    for changed in range(3):
        operands = [s if i == changed else v for i, (v, s) in enumerate(zip((x, weight, bias), stored, strict=True))]
        assert torch.equal(
            winograd_conv2d(*operands, tile=tile, dtype=dtype), winograd_conv2d(x, weight, bias, tile=tile, dtype=dtype)
        )


@by_dtype
def test_the_direct_convolution_is_torchs_within_one_last_place(dtype: torch.dtype) -> None:
    x, weight, bias = draw(channels=16)
    found = direct_conv2d(x, weight, bias, dtype=dtype, stride=2)
    expected = F.conv2d(x.to(dtype), weight.to(dtype), bias.to(dtype), padding=1, stride=2).float()
    assert torch.allclose(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [{"groups": 4}, {"dilation": (2, 1)}, {"padding": "same", "dilation": 2}, {"padding": (0, 2), "stride": (2, 1)}],
    ids=["groups", "dilation", "same", "unequal"],
)
def test_a_direct_convolution_takes_what_torch_takes(settings: dict[str, Any]) -> None:
    """Groups or dilation that are dropped on the way give an output of another shape or another sum."""
    x, weight, bias = draw(channels=8)
    weight = weight[:, : 8 // settings.get("groups", 1)]
    found = direct_conv2d(x, weight, bias, dtype=torch.float16, **settings)
    stored = [value.half().float() for value in (x, weight, bias)]
    assert torch.equal(found, F.conv2d(*stored, **({"padding": 1} | settings)).half().float())


@by_tile
def test_what_is_stored_on_the_way_shows_where_it_is_largest(tile: int) -> None:
    """A chequered tile: 4 and 10 times the input a pass; the largest number is not in what comes out."""
    signs = torch.tensor([1.0, 0, -1, 0, 1, 0])[: tile + 2]
    x = torch.outer(signs, signs).view(1, 1, tile + 2, tile + 2)
    weight = torch.full((1, 1, 3, 3), 1e-2)
    stored = list(store_winograd(x, weight, tile=tile, dtype=torch.float32, padding=0))
    assert [name for name, _ in stored] == [
        "input",
        "input transform",
        "input transform",
        "sum of products",
        "output transform",
        "output transform",
    ]
    gain = {2: 2, 4: 10}[tile]
    assert [values.abs().max().item() for _, values in stored[:3]] == [1, gain, gain**2]


def test_four_overflows_where_two_and_direct_do_not() -> None:
    """B^T d B of a chequered tile is 100 times the input for m = 4, and 4 times for m = 2."""
    signs = torch.tensor([1.0, 0, -1, 0, 1, 0])
    x = 1000 * torch.outer(signs, signs).view(1, 1, 6, 6)
    weight = torch.full((1, 1, 3, 3), 1e-2)
    is_finite = [bool(direct_conv2d(x, weight, dtype=torch.float16, padding=0).isfinite().all())]
    for tile, dtype in [(2, torch.float16), (4, torch.float16), (4, torch.bfloat16), (4, torch.float32)]:
        is_finite.append(bool(winograd_conv2d(x, weight, tile=tile, dtype=dtype, padding=0).isfinite().all()))
    assert is_finite == [True, True, False, True, True]


def test_an_overflow_stays_in_its_tile() -> None:
    x = torch.ones(1, 1, 16, 16)
    x[0, 0, 1, 1] = 60_000.0  # only in the first tile: the next begins at row and column 4, less one of padding
    found = winograd_conv2d(x, torch.full((1, 1, 3, 3), 0.1), tile=4, dtype=torch.float16)
    assert not found[..., :4, :4].isfinite().all()
    assert found[..., 4:, :].isfinite().all() and found[..., :, 4:].isfinite().all()


@by_tile
def test_an_infinite_input_breaks_what_reads_it_and_no_more(tile: int) -> None:
    """The corner of a tile is in one row and one column of the transforms; elsewhere its coefficient is zero."""
    x = torch.ones(1, 1, tile + 2, tile + 2)
    x[0, 0, 0, 0] = 1e5
    found = winograd_conv2d(x, torch.full((1, 1, 3, 3), 0.1), tile=tile, dtype=torch.float16, padding=0)
    assert (~found.isfinite()).flatten().tolist() == [True] + [False] * (tile * tile - 1)


def test_channels_of_unlike_size_cost_a_direct_convolution_nothing_and_four_much() -> None:
    """Inputs times 2^k, weights divided by it: F(4, 3) loses its transformed weights to fp16's subnormals."""
    x, weight, _ = draw(channels=16)
    x = x.abs() / 1000  # far from overflow: what is left is underflow
    factor = 2.0**10
    errors = {}
    for name, scale in (("even", 1.0), ("uneven", factor)):
        errors[name] = [
            relative_rms(f, x, weight)
            for f in (
                direct_conv2d(x * scale, weight / scale, dtype=torch.float16),
                winograd_conv2d(x * scale, weight / scale, tile=4, dtype=torch.float16),
            )
        ]
    assert errors["uneven"][0] < 2 * errors["even"][0]
    assert errors["uneven"][1] > 5 * errors["even"][1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tile": 3}, "expected 2 or 4"),
        ({"weight": torch.zeros(4, 4, 5, 5)}, r"\(out, in, 3, 3\)"),
        ({"weight": torch.zeros(4, 2, 3, 3)}, "groups are not covered"),
        ({"padding": -1}, "padding from 0"),
        ({"x": torch.zeros(1, 4, 2, 2), "padding": 0}, "at least 3 rows"),
        ({"dtype": torch.float64}, "float32, float16 or bfloat16"),
        ({"accumulate": torch.bfloat16}, "accumulate float32 or the same"),
    ],
)
def test_what_it_does_not_do_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.zeros(1, 4, 8, 8), "weight": torch.zeros(4, 4, 3, 3), "tile": 2, "dtype": torch.float16}
    arguments |= changed
    with pytest.raises(NumericsError, match=message):
        winograd_conv2d(arguments.pop("x"), arguments.pop("weight"), **arguments)


def test_a_direct_convolution_refuses_an_unknown_dtype() -> None:
    with pytest.raises(NumericsError, match="float32, float16 or bfloat16"):
        direct_conv2d(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 3, 3), dtype=torch.float64)
