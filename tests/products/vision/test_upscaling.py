"""Is a seam found, how large is it said to be, and is what is no seam not taken for one?"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from evalsets.make import panoramas
from pipeline.errors import EngineError
from pipeline.products.vision.upscaling import (
    MAX_PSNR_DB,
    judge_picture,
    list_stitches,
    measure_seam_excess,
)
from pipeline.records.serving import Tiling

GIVEN, FACTOR = (192, 256), 2
TILING = Tiling(tile=64, overlap=0.125, window="none")


def draw(number: int) -> torch.Tensor:
    """Return a textured target, a part of a street, float32 (1, 3, 384, 512)."""
    seeds = Random("evalset/panoramas")
    rng = np.random.default_rng([seeds.getrandbits(128) for _ in range(number + 1)][-1])
    street, (height, width) = panoramas.render(rng), (FACTOR * side for side in GIVEN)
    left, top = rng.integers(0, [panoramas.WIDTH - width + 1, panoramas.HEIGHT - height + 1])
    pixels = street[top : top + height, left : left + width]
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255


def plant(target: torch.Tensor, rows: list[int], columns: list[int], levels: float, sign: str) -> torch.Tensor:
    """Return the picture with a step at each line: tiles that are brighter and darker in turn."""
    height, width = target.shape[-2:]
    down, across = (
        torch.bucketize(torch.arange(size), torch.tensor(lines), right=True)
        if lines
        else torch.zeros(size, dtype=torch.int64)
        for size, lines in ((height, rows), (width, columns))
    )
    parity = down[:, None] + across[None] if sign == "chessboard" else across[None].expand(height, width)
    return target + levels / 255 * (parity % 2)


def blur(picture: torch.Tensor) -> torch.Tensor:
    """Return a picture with the errors of an upscaler: a little of each pixel is its neighbours'."""
    return 0.9 * picture + 0.1 * F.avg_pool2d(F.pad(picture, (1, 1, 1, 1), mode="replicate"), 3, stride=1)


@pytest.fixture(scope="module", params=range(4))
def target(request: pytest.FixtureRequest) -> torch.Tensor:
    return draw(request.param) * 0.9 + 0.02  # leaves room for a step


def test_without_tiles_or_with_one_there_is_no_seam(target: torch.Tensor) -> None:
    """Else the reference's own texture would be a seam, and a candidate's less so."""
    noisy = target + 0.01 * torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    assert measure_seam_excess(noisy, target, GIVEN, None) == 0
    assert measure_seam_excess(noisy, target, GIVEN, Tiling(tile=256, overlap=0, window="none")) == 0


def test_a_perfect_picture_has_none_however_it_is_cut(target: torch.Tensor) -> None:
    assert measure_seam_excess(target, target, GIVEN, TILING) == 0


def test_a_planted_step_is_found_in_its_size(target: torch.Tensor) -> None:
    """Four levels on texture whose own steps are larger: they were found as three, made absolute one by one."""
    rows, columns = list_stitches(GIVEN, TILING, FACTOR)
    assert len(rows) == 3 and len(columns) == 4
    enlarged = plant(blur(target), rows, columns, 4.0, "chessboard")
    found = measure_seam_excess(enlarged, target, GIVEN, TILING) - measure_seam_excess(
        blur(target), target, GIVEN, TILING
    )
    assert found == pytest.approx(4, rel=0.05)


def test_seams_whose_sign_flips_do_not_cancel(target: torch.Tensor) -> None:
    """Averaged along a whole line, tiles that are brighter and darker in turn have no step at all."""
    rows, columns = list_stitches(GIVEN, TILING, FACTOR)
    board = plant(target, rows, columns, 4.0, "chessboard")
    whole = (board[..., columns[0]] - board[..., columns[0] - 1]).mean()
    own = (target[..., columns[0]] - target[..., columns[0] - 1]).mean()
    assert abs(255 * float(whole - own)) < 1.1, "of what is planted a quarter at most is left"
    assert measure_seam_excess(board, target, GIVEN, TILING) > 3.7


def test_colours_that_cancel_are_a_seam(target: torch.Tensor) -> None:
    rows, columns = list_stitches(GIVEN, TILING, FACTOR)
    step = plant(torch.zeros_like(target), rows, columns, 4.0, "chessboard")
    found = measure_seam_excess(target + step * torch.tensor([1.0, -1, 0]).view(1, 3, 1, 1), target, GIVEN, TILING)
    assert found == pytest.approx(8 / 3, rel=0.1)


def test_steps_elsewhere_are_no_seam(target: torch.Tensor) -> None:
    """What the network does to every line, tiled or not, is not the tiles' doing."""
    stitches = list_stitches(GIVEN, TILING, FACTOR)
    rows, columns = (
        [(low + high) // 2 // FACTOR * FACTOR for low, high in zip([0, *lines], [*lines, size], strict=True)]
        for lines, size in zip(stitches, (384, 512), strict=True)
    )
    assert measure_seam_excess(plant(target, rows, columns, 4.0, "chessboard"), target, GIVEN, TILING) < 0.1
    everywhere = target + 4 / 255 * (torch.arange(512) % 2)
    assert abs(measure_seam_excess(everywhere, target, GIVEN, TILING)) < 0.3


def test_a_step_along_one_side_alone_is_found_as_its_share(target: torch.Tensor) -> None:
    """Only the columns are seams: the mean is over all edges, rows' and columns'."""
    rows, columns = list_stitches(GIVEN, TILING, FACTOR)
    edges = [len(columns) * (len(rows) + 1), len(rows) * (len(columns) + 1)]
    found = measure_seam_excess(plant(target, [], columns, 4.0, "stripes"), target, GIVEN, TILING)
    assert found == pytest.approx(4 * edges[0] / sum(edges), rel=0.1)


def test_stitches_are_where_neighbours_meet() -> None:
    assert list_stitches((64, 120), Tiling(tile=64, overlap=0.125, window="none"), 2) == ([], [120])
    assert list_stitches((64, 128), Tiling(tile=64, overlap=0, window="none"), 3) == ([], [192])
    assert list_stitches((64, 128), None, 2) == ([], [])


def test_half_of_an_odd_tile_is_rounded_down() -> None:
    assert Tiling(tile=11, overlap=0.5, window="none").overlap_pixels == 5
    assert Tiling(tile=64, overlap=0.125, window="none").overlap_pixels == 8
    assert Tiling(tile=10, overlap=0.29, window="none").overlap_pixels == 3


PICTURE = torch.arange(8 * 10 * 3, dtype=torch.uint8).reshape(8, 10, 3)
SMALL = np.zeros((4, 5, 3), dtype=np.uint8)


def test_equal_pictures_have_a_finite_score() -> None:
    """An infinite ratio would be refused where it is written."""
    picture = PICTURE.repeat(4, 4, 1)
    scores = judge_picture("c", picture, picture.numpy(), SMALL.repeat(4, 0).repeat(4, 1), is_finite=True, tiling=None)
    assert scores == {
        "finite": 1.0,
        "psnr_db": MAX_PSNR_DB,
        "ssim": pytest.approx(1),
        "seam_levels": 0.0,
        "worst_seam_levels": 0.0,
    }


def test_a_picture_that_was_not_finite_is_the_worst_there_is() -> None:
    """What clamping made of NaN may look fine."""
    scores = judge_picture("c", PICTURE, PICTURE.numpy(), SMALL, is_finite=False, tiling=None)
    assert scores == {"finite": 0.0, "psnr_db": 0.0, "ssim": 0.0, "seam_levels": 255.0, "worst_seam_levels": 255.0}


def to_pixels(picture: torch.Tensor) -> torch.Tensor:
    return (255 * picture[0].clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 0)


def judge_seams(picture: torch.Tensor, whole: torch.Tensor | None, target: torch.Tensor) -> dict[str, float]:
    given = np.zeros((*GIVEN, 3), dtype=np.uint8)
    return judge_picture(
        "c",
        to_pixels(picture),
        to_pixels(target).numpy(),
        given,
        is_finite=True,
        tiling=TILING,
        whole=None if whole is None else to_pixels(whole),
    )


def test_what_the_network_does_at_a_stitch_without_tiles_is_no_seam(target: torch.Tensor) -> None:
    """Where a grid lies on a picture is chance: sound tiles had a bias of up to 1.6 levels, the same for all."""
    assert judge_seams(blur(target), None, target)["worst_seam_levels"] > 0.1
    scores = judge_seams(blur(target), blur(target), target)
    assert (scores["seam_levels"], scores["worst_seam_levels"]) == (0.0, 0.0)
    assert scores["psnr_db"] < MAX_PSNR_DB, "which is still against the original"


def test_one_seam_among_many_is_told_in_its_own_size(target: torch.Tensor) -> None:
    """The mean over 31 stitches makes a seam of eight levels a fraction of one, and lets it pass."""
    rows, columns = list_stitches(GIVEN, TILING, FACTOR)
    seam = torch.zeros_like(target)
    seam[..., rows[0] : rows[1], columns[0] : columns[0] + 30] = 8 / 255
    scores = judge_seams(target + seam, target, target)
    assert scores["worst_seam_levels"] == pytest.approx(8, abs=0.3) and scores["seam_levels"] < 1.5


@pytest.mark.parametrize("whole", [PICTURE[:-1], PICTURE.float()], ids=["smaller", "no-pixels"])
def test_a_reference_of_another_shape_is_said(whole: Any) -> None:
    given, tiling = SMALL, Tiling(tile=2, overlap=0, window="none")
    with pytest.raises(EngineError, match="case 'c7': postprocess"):
        judge_picture("c7", PICTURE, PICTURE.numpy(), given, is_finite=True, tiling=tiling, whole=whole)


@pytest.mark.parametrize(
    ("picture", "came"),
    [
        (PICTURE[:, :-1], "torch.uint8 of shape (8, 9, 3)"),
        (PICTURE[..., :1], "torch.uint8 of shape (8, 10, 1)"),
        (PICTURE.permute(2, 0, 1), "torch.uint8 of shape (3, 8, 10)"),
        (PICTURE.float(), "torch.float32 of shape (8, 10, 3)"),
        (PICTURE.numpy(), "'ndarray'"),
        (PICTURE.tolist(), "'list'"),
        (None, "'NoneType'"),
    ],
)
def test_another_shape_or_type_is_said(picture: object, came: str) -> None:
    with pytest.raises(EngineError) as caught:
        judge_picture("c7", picture, PICTURE.numpy(), SMALL, is_finite=True, tiling=None)
    assert str(caught.value).startswith(
        f"case 'c7': postprocess() returned {came}, expected a tensor of uint8 of the target's shape (8, 10, 3)"
    )
