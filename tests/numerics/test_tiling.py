"""Tiles cover, windows sum to one, and a pointwise decoder never notices."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import NumericsError
from pipeline.numerics.tile_grid import find_stitches, place_tiles
from pipeline.numerics.tiling import Window, blend_tiles, window_weights
from tests.fakes.tiny_vae import build_vae, draw_latents

WINDOWS: tuple[Window, ...] = ("none", "linear", "hann")
GRIDS = [(64, 32, 8), (65, 32, 8), (64, 32, 0), (100, 33, 16), (33, 32, 1), (20, 32, 8), (32, 32, 0), (7, 2, 1)]
by_grid = pytest.mark.parametrize(("size", "tile", "overlap"), GRIDS)


def decode_pointwise(latents: torch.Tensor) -> torch.Tensor:
    return torch.sin(3 * latents[:, :3]).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)


@by_grid
def test_tiles_cover_and_overlap_as_asked(size: int, tile: int, overlap: int) -> None:
    starts = place_tiles(size, tile, overlap)
    assert starts[0] == 0 and (starts[-1] + tile == size or tile >= size)
    shared = [a + tile - b for a, b in zip(starts, starts[1:], strict=False)]
    assert all(overlap <= s <= tile for s in shared)
    assert max(shared, default=0) - min(shared, default=0) <= 1
    assert len(starts) == max(1, -(-(size - overlap) // (tile - overlap)))  # no more tiles than needed


@by_grid
@pytest.mark.parametrize("window", WINDOWS)
def test_weights_sum_to_one_and_end_with_their_tile(size: int, tile: int, overlap: int, window: Window) -> None:
    starts = place_tiles(size, tile, overlap)
    weights = window_weights(size, starts, min(tile, size), window=window)
    assert torch.allclose(weights.sum(0), torch.ones(size), atol=1e-6)
    assert (weights >= 0).all()
    for start, row in zip(starts, weights, strict=True):
        assert not row[:start].any() and not row[start + tile :].any()


def test_the_windows_are_the_closed_forms() -> None:
    linear, hann, cut = (window_weights(12, [0, 4], 8, window=w)[1] for w in ("linear", "hann", "none"))
    assert linear.tolist() == [0] * 4 + [0.125, 0.375, 0.625, 0.875] + [1] * 4
    expected = torch.sin(torch.pi / 2 * torch.tensor([0.125, 0.375, 0.625, 0.875])) ** 2
    assert torch.allclose(hann[4:8], expected) and hann[8:].tolist() == [1] * 4
    assert cut.tolist() == [0] * 6 + [1] * 6


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("tile", "overlap"), [(6, 0), (6, 2), (6, 3), (8, 3)])
def test_a_pointwise_decoder_gives_the_untiled_image(window: Window, tile: int, overlap: int) -> None:
    latents = torch.randn(2, 4, 13, 17, generator=torch.Generator().manual_seed(0))
    blended = blend_tiles(decode_pointwise, latents, tile=tile, overlap=overlap, window=window)
    assert torch.allclose(blended, decode_pointwise(latents), atol=1e-6)


def test_one_tile_is_the_decoders_own_output() -> None:
    latents = draw_latents().half()
    calls: list[torch.Size] = []

    def decode(piece: torch.Tensor) -> torch.Tensor:
        calls.append(piece.shape)
        return decode_pointwise(piece)

    blended = blend_tiles(decode, latents, tile=8, overlap=4, window="hann")
    assert calls == [latents.shape] and blended.equal(decode_pointwise(latents)) and blended.dtype == torch.float16


def test_a_tile_longer_than_one_side_is_cut_to_it() -> None:
    latents = torch.randn(1, 4, 4, 20)
    blended = blend_tiles(decode_pointwise, latents, tile=8, overlap=2, window="linear")
    assert torch.allclose(blended, decode_pointwise(latents), atol=1e-6)


def test_stitches_are_the_middles_of_the_overlaps() -> None:
    assert find_stitches(64, 32, 0, factor=8) == [256]
    assert find_stitches(14, 8, 2, factor=4) == [28]
    assert find_stitches(8, 8, 2) == []
    cut = window_weights(56, [0, 24], 32, window="none")[1]
    assert cut.nonzero()[0].item() == 28


def test_each_tile_has_its_own_statistics_and_no_window_mends_that() -> None:
    """GroupNorm sees a tile and not the image: the tiled image is another one also far from every stitch."""
    vae, latents = build_vae(), draw_latents(n=1, size=24)
    latents[..., 12:] *= 3  # the halves differ
    with torch.no_grad():
        whole = vae.decode(latents).sample
        for window in WINDOWS:
            tiled = blend_tiles(lambda z: vae.decode(z).sample, latents, tile=12, overlap=4, window=window)
            assert tiled.shape == whole.shape
            assert (tiled - whole)[..., :8].abs().mean() > 0.01


@pytest.mark.parametrize(("tile", "overlap"), [(0, 0), (8, 5), (8, -1)])
def test_sizes_out_of_range_are_refused(tile: int, overlap: int) -> None:
    with pytest.raises(NumericsError, match="half a tile"):
        place_tiles(16, tile, overlap)


def test_unknown_windows_and_odd_outputs_are_refused() -> None:
    with pytest.raises(NumericsError, match="none, linear or hann, got 'flat'"):
        window_weights(16, [0, 8], 8, window="flat")  # type: ignore[arg-type]  # no window, as a setting may say
    with pytest.raises(NumericsError, match="whole multiple"):
        blend_tiles(lambda z: z[..., :-1], draw_latents(), tile=4, overlap=1, window="hann")
