"""Decode large latents in tiles and blend the results: the windows, the blend.

Where tiles lie is `pipeline/numerics/tile_grid.py`'s. Over an overlap one window falls while the other rises, and the
two sum to one: `linear` along a ramp, `hann` along a raised cosine, whose slope has no kink; `none` cuts in the middle.
Everything but the cut is float32, whatever the decoder's dtype.

Blending hides a step, it does not remove its cause: each tile is normalised by its own GroupNorm statistics,
so tiles of one image differ in colour and contrast, and a window only spreads that difference over the
overlap. Decoders that share statistics between tiles are not covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch

from pipeline.errors import NumericsError
from pipeline.numerics.images import check_images
from pipeline.numerics.tile_grid import place_tiles

Window = Literal["none", "linear", "hann"]


def window_weights(size: int, starts: list[int], tile: int, *, window: Window) -> torch.Tensor:
    """Return the weight of each tile at each position along one dimension; they sum to one everywhere.

    Args:
        size: of the dimension.
        starts: where tiles begin, from `place_tiles` (times the decoder's factor for the output).
        tile: of a tile, in the same pixels.
        window: how neighbours are mixed over their overlap.

    Returns:
        float32 of shape (number of tiles, size), zero outside a tile.

    Raises:
        NumericsError: an unknown window.
    """
    if window not in ("none", "linear", "hann"):
        raise NumericsError(f"tile window: expected none, linear or hann, got {window!r}")
    positions = torch.arange(size, dtype=torch.float64) + 0.5
    rises = [torch.ones(size, dtype=torch.float64)]
    for previous, start in zip(starts, starts[1:], strict=False):
        overlap = previous + tile - start
        fraction = (
            (positions >= start + overlap // 2).double()
            if window == "none" or overlap == 0
            else ((positions - start) / overlap).clamp(0, 1)
        )
        rises.append((1 - torch.cos(math.pi * fraction)) / 2 if window == "hann" else fraction)
    rises.append(torch.zeros(size, dtype=torch.float64))
    return torch.stack([rise - following for rise, following in zip(rises, rises[1:], strict=False)]).float()


def blend_tiles(
    decode: Callable[[torch.Tensor], torch.Tensor], latents: torch.Tensor, *, tile: int, overlap: int, window: Window
) -> torch.Tensor:
    """Decode latents tile by tile and blend the outputs in float32.

    With one tile the decoder's output is returned as it is. A decoder that works pixel by pixel gives the same
    image tiled and untiled, up to rounding.

    Args:
        decode: takes latents (n, channels, height, width), returns (n, c, height * f, width * f) for a whole f.
        latents: shape (n, channels, height, width).
        tile: side of a tile in latent pixels; cut to the latents where it is larger.
        overlap: of neighbours in latent pixels, at most half a tile.
        window: how neighbours are mixed.

    Returns:
        float32 of shape (n, c, height * f, width * f), or the decoder's dtype with one tile.

    Raises:
        NumericsError: sizes out of range, or outputs that are no whole multiple of their tile.
    """
    check_images(latents, "latents to decode in tiles", is_finite=False)
    height, width = latents.shape[-2:]
    rows, columns = place_tiles(height, tile, overlap), place_tiles(width, tile, overlap)
    if len(rows) == len(columns) == 1:
        return decode(latents)
    blended: torch.Tensor | None = None
    for i, top in enumerate(rows):
        for j, left in enumerate(columns):
            piece = latents[..., top : top + tile, left : left + tile]
            decoded = decode(piece).float()
            factor = _find_factor(decoded, piece)
            if blended is None:
                blended = decoded.new_zeros(*decoded.shape[:2], height * factor, width * factor)
                down, across = (
                    window_weights(
                        size * factor, [s * factor for s in starts], min(tile, size) * factor, window=window
                    ).to(decoded.device)
                    for size, starts in ((height, rows), (width, columns))
                )
            ys = slice(top * factor, top * factor + decoded.shape[-2])
            xs = slice(left * factor, left * factor + decoded.shape[-1])
            blended[..., ys, xs] += decoded * down[i, ys, None] * across[j, xs]
    assert blended is not None
    return blended


def _find_factor(decoded: torch.Tensor, piece: torch.Tensor) -> int:
    factor = decoded.shape[-1] // piece.shape[-1] if decoded.ndim == 4 else 0
    if factor < 1 or decoded.shape[-2:] != (piece.shape[-2] * factor, piece.shape[-1] * factor):
        raise NumericsError(
            f"tiles: expected a decoded tile of a whole multiple of {tuple(piece.shape[-2:])} pixels, "
            f"got shape {tuple(decoded.shape)}; check the decode function"
        )
    return factor
