"""What one image is scored: nothing that can't be measured may look good, and a planted seam is as high as it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipeline.errors import SettingsError
from pipeline.numerics.activation_watch import ModuleRange
from pipeline.numerics.seams import seam_excess
from pipeline.products.images.findings.decoder import find_overflow, headroom
from pipeline.products.images.rendering import list_stitches
from pipeline.products.images.scoring import build_range_notes, score_images, to_bytes
from pipeline.records.serving import Tiling

SIZE = 32


def draw(n: int = 3) -> torch.Tensor:
    """Return smooth pictures in [-1, 1]."""
    ramp = torch.linspace(-0.8, 0.8, SIZE)
    return (ramp[None, :] * torch.linspace(0.2, 1, SIZE)[:, None]).expand(n, 3, SIZE, SIZE).clone()


def score(
    raw: torch.Tensor, latents: torch.Tensor | None = None, stitches: tuple[list[int], list[int]] = ([], [])
) -> list[dict[str, float]]:
    n = len(raw)
    return score_images(
        raw,
        draw(n),
        torch.zeros(n, 4, 8, 8) if latents is None else latents,
        torch.full((n,), 0.9),
        torch.ones(n),
        stitches,
        oversaturated_above=0.05,
    )


def test_an_image_that_is_no_number_scores_worst_everywhere() -> None:
    raw = draw()
    raw[1, 0, 5, 5] = float("nan")
    good, broken, _ = score(raw)
    assert (good["sound"], good["ssim"], good["psnr_db"], good["nonfinite"]) == (1, 1, 100, 0)
    assert (broken["sound"], broken["nonfinite"], broken["black"]) == (0, 1, 0)
    assert (broken["ssim"], broken["psnr_db"], broken["clip"], broken["saturated"]) == (0, 0, -1, 1)
    assert (broken["oversaturated"], good["oversaturated"]) == (1, 0)
    assert broken["seam_levels"] == 0, "without tiles there is no seam"
    assert score(raw, stitches=([SIZE // 2], []))[1]["seam_levels"] == 255
    assert to_bytes(raw)[1, 0, 5, 5] == 0, "what a user sees is black"


def test_a_black_image_and_wild_latents_are_told_apart_from_an_overflow() -> None:
    raw, latents = draw(), torch.zeros(3, 4, 8, 8)
    raw[0] = -1.0
    latents[1, 0, 0, 0] = 300.0
    black, wild, plain = score(raw, latents)
    assert (black["sound"], black["black"], black["nonfinite"]) == (0, 1, 0)
    assert (wild["sound"], wild["latents_out_of_range"]) == (1, 1) and plain["latents_out_of_range"] == 0


def test_an_image_is_oversaturated_beyond_the_given_share_of_its_pixels() -> None:
    raw = draw()
    raw[0, :, : SIZE // 16] = 1.0  # 6 % of the rows
    raw[1, :, : SIZE // 32] = 1.0
    assert [s["oversaturated"] for s in score(raw)] == [1, 0, 0]


def test_latents_whose_float32_decode_is_no_number_leave_nothing_to_compare_with() -> None:
    exact = draw()
    exact[0, 0, 0, 0] = float("nan")
    lost, kept, _ = score_images(
        draw(),
        exact,
        torch.zeros(3, 4, 8, 8),
        torch.full((3,), 0.9),
        torch.tensor([float("nan"), 1.0, 1.0]),
        ([], []),
        oversaturated_above=0.05,
    )
    assert (lost["sound"], lost["ssim"], lost["clip"]) == (1, 0, -1) and kept["ssim"] == 1
    assert lost["std_ratio"] > 10, "the worst, where no step could be measured"


def test_a_planted_seam_is_as_high_as_it_is_and_without_tiles_there_is_none() -> None:
    whole = draw() / 2 + 0.5
    tiled = whole.clone()
    tiled[..., SIZE // 2 :] += 4 / 255
    assert torch.allclose(255 * seam_excess(tiled, whole, [SIZE // 2], []), torch.tensor(4.0).double(), atol=1e-3)
    assert seam_excess(tiled, whole, [], []).tolist() == [0, 0, 0]
    assert seam_excess(tiled, whole, [SIZE // 4], []).abs().max() < 1e-5, "not where tiles meet"


def test_tiles_of_a_chessboard_and_of_other_colours_do_not_cancel() -> None:
    whole = torch.full((1, 3, SIZE, SIZE), 0.5)
    half = SIZE // 2
    board, tinted = whole.clone(), whole.clone()
    for rows, columns, sign in (
        (slice(0, half), slice(0, half), 1),
        (slice(0, half), slice(half, SIZE), -1),
        (slice(half, SIZE), slice(0, half), -1),
        (slice(half, SIZE), slice(half, SIZE), 1),
    ):
        board[..., rows, columns] += sign * 10 / 255
    tinted[:, 0, :, half:] += 10 / 255
    tinted[:, 1, :, half:] -= 10 / 255
    assert 255 * seam_excess(board, whole, [half], [half]).item() == pytest.approx(20, abs=1e-4)
    assert 255 * seam_excess(tinted, whole, [half], []).item() == pytest.approx(20 / 3, abs=1e-4)


def test_images_that_no_tile_cuts_are_refused() -> None:
    """Tiling would otherwise be shipped without ever having run."""
    vae, latents = SimpleNamespace(config=SimpleNamespace(block_out_channels=(1, 2, 3))), torch.zeros(1, 4, 16, 16)
    assert list_stitches(vae, latents, Tiling(tile=32, overlap=0, window="none")) == ([32], [32])
    with pytest.raises(SettingsError, match="vae_tiling.tile: expected less than the images' 64 pixels, got 64"):
        list_stitches(vae, latents, Tiling(tile=64, overlap=0, window="none"))


def test_the_module_that_overflowed_is_the_first_that_holds_none() -> None:
    def module(absmax: float, count: int = 0) -> ModuleRange:
        return ModuleRange(float("inf") if count else absmax, nonfinite_count=count, nonfinite_calls=count, calls=1)

    ranges = {
        "": module(1, 9),
        "conv_in": module(3),
        "up.0": module(5),
        "up.1": module(1, 7),
        "up.1.norm": module(2),
        "up.2": module(1, 8),
        "up.2.norm": module(1, 8),
        "conv_out": module(1, 9),
    }
    modules = build_range_notes([ranges, {"conv_in": module(4096)}], "float16")
    assert find_overflow(modules) == "up.1"
    assert modules["conv_in"]["absmax"] == 4096 and headroom(modules["conv_in"]) > 3.9
    assert headroom(modules["up.1"]) == float("-inf")
    assert find_overflow(build_range_notes([{"conv_in": module(3)}], "float16")) is None
