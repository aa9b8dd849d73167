"""A 3x3 stride-1 convolution as a Winograd kernel computes it, every intermediate rounded to the arithmetic's dtype.

Output tiles of m x m pixels come from input tiles d of (m + 2) x (m + 2), Y = A^T [sum_c (G g G^T) * (B^T d B)] A,
with 2.25 (m = 2) or 4 (m = 4) times fewer multiplications than the direct sum. The price is range and rounding: for
m = 4 the transforms add up to 100 times the input and 361 times the products before they cancel, and shrink weights
up to 576 times. In fp16 the first overflows, and the last underflows, where a direct convolution does neither.

Where it is rounded: input and output transforms after each of their two passes, one along rows and one along columns,
as a kernel does that holds tiles in registers of the dtype; the bias is in the last pass. The weights once, as they
are transformed ahead of time in float32. The sum over channels once, after `accumulate`. Coefficients of zero are
skipped, so an infinite value stays where a kernel would have it. Values are held in float32, which holds products of
fp16 and bf16 exactly.

`accumulate` is float32 by default: tensor cores sum fp16 products in float32. Kernels for mobile chips sum in fp16;
accumulate=torch.float16 rounds after every channel. This is an emulation: it says what a kernel loses, not how fast it
is. Not covered: other kernel sizes, strides, dilation, groups, float32's own last bits.

Reference: Lavin and Gray 2015, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308, sections 4.1 for
F(2x2, 3x3) and 4.3 for F(4x4, 3x3). We differ in nothing but the roundings.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from pipeline.errors import NumericsError

Matrix = tuple[tuple[float, ...], ...]

INPUT_TRANSFORMS: dict[int, Matrix] = {  # B^T, (m + 2, m + 2)
    2: ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    4: (
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
}
WEIGHT_TRANSFORMS: dict[int, Matrix] = {  # G, (m + 2, 3)
    2: ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    4: (
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    ),
}
OUTPUT_TRANSFORMS: dict[int, Matrix] = {  # A^T, (m, m + 2)
    2: ((1, 1, 1, 0), (0, 1, -1, -1)),
    4: ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NAMES = "float32, float16 or bfloat16"


def winograd_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: int,
    dtype: torch.dtype,
    accumulate: torch.dtype = torch.float32,
    padding: int = 1,
) -> torch.Tensor:
    """Convolve with F(tile x tile, 3 x 3) in the arithmetic of a dtype.

    Args:
        x: (images, channels in, rows, columns), of any floating dtype; rounded to `dtype` first.
        weight: (channels out, channels in, 3, 3); rounded to `dtype` before and after its transform.
        bias: (channels out,).
        tile: output pixels a side of a tile, 2 or 4.
        dtype: float32, float16 or bfloat16: of everything that is stored.
        accumulate: of the sum over channels: float32, or `dtype`, rounded after each channel.
        padding: rows and columns of zeros on each side, from 0.

    Returns:
        float32 (images, channels out, rows + 2 padding - 2, columns + 2 padding - 2) with values of `dtype`;
        infinite or NaN where the arithmetic overflows.

    Raises:
        NumericsError: another kind of convolution, an unknown tile or dtype, or an input that is too small.
    """
    for _, stored in store_winograd(x, weight, bias, tile=tile, dtype=dtype, accumulate=accumulate, padding=padding):
        output = stored
    rows, columns = x.shape[2] + 2 * padding - 2, x.shape[3] + 2 * padding - 2
    return _join_tiles(output)[:, :, :rows, :columns]


def store_winograd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: int,
    dtype: torch.dtype,
    accumulate: torch.dtype = torch.float32,
    padding: int = 1,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield everything that `winograd_conv2d` stores on its way, in order, with the name of the step that stored it.

    With float32 it says how large the numbers are that a narrower dtype would have to hold.

    Args:
        x, weight, bias, tile, dtype, accumulate, padding: as in `winograd_conv2d`.

    Yields:
        "input", "input transform" (one after each of two passes), "sum of products" and "output transform" (two): each
        of tiles, (side, side, images, tile rows, tile columns, channels); the last is the output, before it is cut.

    Raises:
        NumericsError: as `winograd_conv2d`.
    """
    _check(x, weight, padding=padding, dtype=dtype, accumulate=accumulate)
    if tile not in INPUT_TRANSFORMS:
        raise NumericsError(f"winograd tile: expected 2 or 4 output pixels a side, got {tile!r}")
    values = _cut_tiles(_rounded(x.float(), dtype), tile, padding)
    yield "input", values
    for axis in (0, 1):
        values = _apply(values, INPUT_TRANSFORMS[tile], axis=axis, dtype=dtype)
        yield "input transform", values
    values = _sum_channels(values, transform_weight(weight, tile=tile, dtype=dtype), dtype, accumulate)
    yield "sum of products", values
    for axis, added in ((0, None), (1, bias)):
        values = _apply(values, OUTPUT_TRANSFORMS[tile], axis=axis, dtype=dtype, bias=added)
        yield "output transform", values


def direct_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    padding: int | tuple[int, int] | str = 1,
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Convolve by the direct sum in the arithmetic of a dtype: operands and result rounded, float32 between them.

    Args:
        x: (images, channels in, rows, columns).
        weight: (channels out, channels in / groups, height, width), of any size.
        bias: (channels out,), added before the result is rounded.
        dtype: float32, float16 or bfloat16.
        padding: rows and columns of zeros on each side; "same" or "valid" as in torch.
        stride: in pixels.
        dilation: pixels from one weight to the next.
        groups: of channels, each convolved on its own.

    Returns:
        float32 with values of `dtype`.

    Raises:
        NumericsError: an unknown dtype.
    """
    if dtype not in _DTYPES:
        raise NumericsError(f"convolution dtype: expected {_NAMES}, got {dtype}")
    added = None if bias is None else _rounded(bias.float(), dtype)
    x, weight = _rounded(x.float(), dtype), _rounded(weight.float(), dtype)
    return _rounded(F.conv2d(x, weight, added, stride, padding, dilation, groups), dtype)


def transform_weight(weight: torch.Tensor, *, tile: int, dtype: torch.dtype) -> torch.Tensor:
    """Return G g G^T, computed in float32 from rounded weights and rounded once, (tile + 2, tile + 2, in, out)."""
    matrix = torch.tensor(WEIGHT_TRANSFORMS[tile], device=weight.device)
    kernel = _rounded(weight.float(), dtype)
    return _rounded(torch.einsum("ij,ocjk,lk->ilco", matrix, kernel, matrix), dtype)


def _cut_tiles(x: torch.Tensor, tile: int, padding: int) -> torch.Tensor:
    """Cut overlapping tiles, (tile + 2, tile + 2, images, tile rows, tile columns, channels); zeros fill the last."""
    spare = [-(size + 2 * padding - 2) % tile for size in (x.shape[3], x.shape[2])]
    padded = F.pad(x, (padding, padding + spare[0], padding, padding + spare[1]))
    return padded.unfold(2, tile + 2, tile).unfold(3, tile + 2, tile).permute(4, 5, 0, 2, 3, 1).contiguous()


def _join_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """Lay tiles of shape (tile, tile, images, tile rows, tile columns, channels) side by side."""
    side, _, images, rows, columns, channels = tiles.shape
    return tiles.permute(2, 5, 3, 0, 4, 1).reshape(images, channels, rows * side, columns * side)


def _apply(
    values: torch.Tensor, matrix: Matrix, *, axis: int, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply an axis by a matrix in float32 and round; a coefficient of zero does not touch its value."""
    parts, rows = values.unbind(axis), []
    for row in matrix:
        total = torch.zeros_like(parts[0]) if bias is None else _rounded(bias.float(), dtype).expand_as(parts[0])
        for coefficient, part in zip(row, parts, strict=True):
            if coefficient:
                total = torch.add(total, part, alpha=coefficient)
        rows.append(_rounded(total, dtype))
    return torch.stack(rows, dim=axis)


def _sum_channels(
    tiles: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, accumulate: torch.dtype
) -> torch.Tensor:
    """Multiply element by element and sum over channels; only the last dimension changes, to channels out."""
    flat = tiles.flatten(2, 4)
    if accumulate == torch.float32:
        total = flat @ weight
    else:
        total = flat.new_zeros(*flat.shape[:3], weight.shape[3])
        for channel in range(weight.shape[2]):  # one fused multiply-add a channel: product exact, sum rounded
            product = flat[..., channel : channel + 1] * weight[:, :, channel : channel + 1]
            total = _rounded(total + product, accumulate)
    return _rounded(total, dtype).unflatten(2, tiles.shape[2:5])


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 values as the dtype would hold them."""
    return values if dtype == torch.float32 else values.to(dtype).float()


def _check(x: torch.Tensor, weight: torch.Tensor, *, padding: int, dtype: torch.dtype, accumulate: torch.dtype) -> None:
    if weight.dim() != 4 or weight.shape[2:] != (3, 3):
        raise NumericsError(f"winograd: expected a weight of shape (out, in, 3, 3), got {tuple(weight.shape)}")
    if x.dim() != 4 or x.shape[1] != weight.shape[1]:
        raise NumericsError(
            f"winograd: expected (images, {weight.shape[1]}, rows, columns), got {tuple(x.shape)}; "
            "convolutions in groups are not covered"
        )
    if padding < 0 or min(x.shape[2:]) + 2 * padding < 3:
        raise NumericsError(
            f"winograd: expected padding from 0 and at least 3 rows and columns with it, got padding "
            f"{padding} and {tuple(x.shape[2:])} pixels"
        )
    if dtype not in _DTYPES or accumulate not in (torch.float32, dtype):
        raise NumericsError(
            f"winograd: expected dtype {_NAMES} and accumulate float32 or the same dtype, got {dtype} and {accumulate}"
        )
