"""Panoramas are repeatable and hold what a stitch can spoil; the shipped upscaler is what its card says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from evalsets.make import panoramas, shots
from evalsets.make.textures import draw_bricks, draw_clouds, draw_edge, draw_grain, draw_sheet, draw_waves, draw_writing
from models.make.saving import save_network
from models.make.score_upscaler import held_out, list_methods, score
from models.make.train_upscaler import CONFIG, HELD_OUT, SIZE, TRAIN, degrade, draw, train
from models.upscaler.upscaler import Upscaler, build_upscaler, open_upscaler, postprocess, preprocess, upscale
from pipeline.numerics.seams import boundary_steps
from pipeline.numerics.similarity import peak_signal_to_noise_db
from pipeline.numerics.tile_grid import find_stitches
from pipeline.numerics.tiling import blend_tiles
from tests.paths import ROOT

FOLDER = ROOT / "models" / "upscaler"
MAX_MB = 12
Surface = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
SMALL = CONFIG | {"channels": 8, "growth": 8, "layers": 2, "blocks": 2, "squeezed": 4, "channels_upscaled": 8}
PINNED_MEAN, PINNED_STD = 0.028642, 0.323837  # of the output for `wave`, in [-0.5, 0.5]


@pytest.fixture(scope="module")
def panorama() -> np.ndarray:
    return panoramas.render(np.random.default_rng(5))


@pytest.fixture(scope="module")
def model() -> Upscaler:
    return open_upscaler(FOLDER)


def wave() -> torch.Tensor:
    """Return an input that no generator of random numbers draws, float32 (1, 3, 48, 64)."""
    y, x = torch.meshgrid(torch.arange(48.0), torch.arange(64.0), indexing="ij")
    return torch.stack([torch.sin(x / 3), torch.sin(y / 5 + x / 40), torch.sin((x + y) / 9).sign()])[None] * 0.4


def test_a_panorama_is_drawn_alike_from_the_same_generator(panorama: np.ndarray) -> None:
    assert panorama.shape == (panoramas.HEIGHT, panoramas.WIDTH, 3) and panorama.dtype == np.uint8
    assert np.array_equal(panorama, panoramas.render(np.random.default_rng(5)))


def test_a_panorama_has_smooth_parts_and_detail(panorama: np.ndarray) -> None:
    """A set of flat pictures would hide contrast that changes at a stitch, one of texture a small step."""
    blocks = panorama.astype(float).mean(axis=2).reshape(panoramas.HEIGHT // 16, 16, panoramas.WIDTH // 16, 16)
    deviation = blocks.std(axis=(1, 3))
    assert (deviation < 2).mean() > 0.15 and (deviation > 6).mean() > 0.15
    assert np.ptp(blocks.mean(axis=(1, 3))) > 80
    assert ((panorama == 0) | (panorama == 255)).mean() < 0.1


def test_shrinking_averages_two_by_two_pixels(panorama: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    plain, noisy = panoramas.shrink(panorama, rng, noise=0), panoramas.shrink(panorama, rng)
    assert plain.shape == (panoramas.HEIGHT // 2, panoramas.WIDTH // 2, 3)
    assert np.abs(plain[7, 9] - panorama[14:16, 18:20].mean(axis=(0, 1))).max() <= 0.5
    assert 1 < (noisy.astype(float) - plain).std() < 1.7


@pytest.mark.parametrize("surface", [draw_grain, draw_bricks, draw_waves, draw_edge])
def test_a_field_lies_in_the_unit_range_and_varies(surface: Surface) -> None:
    field = surface(np.random.default_rng(3), (70, 90))
    assert field.shape == (70, 90) and field.min() >= 0 and field.max() <= 1 and field.std() > 0.01


def test_clouds_are_smooth_and_writing_is_sharp() -> None:
    clouds = draw_clouds(np.random.default_rng(0), (64, 96), 32)
    writing = draw_writing(np.random.default_rng(0), (64, 96), 20)
    assert np.abs(np.diff(clouds)).max() < 0.08
    assert np.abs(np.diff(writing)).max() > 0.4 and 0.02 < writing.mean() < 0.5


@pytest.mark.parametrize("kind", ["sheets", "shots", "scenes"])
def test_training_and_held_out_pictures_differ(kind: str) -> None:
    learned, held = (draw(kind, np.random.default_rng([0, split, 1, 0])) for split in (TRAIN, HELD_OUT))
    assert learned.shape == held.shape == (1, SIZE, SIZE, 3) and learned.dtype == np.uint8
    assert not np.array_equal(learned, held)
    assert shots.SIZE == 64  # drawing larger ones left it as it was


def test_degrading_halves_and_stays_in_range() -> None:
    torch.manual_seed(0)
    wanted = preprocess(torch.from_numpy(draw_sheet(np.random.default_rng(1), 64)[None].repeat(2, axis=0)))
    small = degrade(wanted)
    assert small.shape == (2, 3, 32, 32) and small.abs().max() <= 0.5
    assert torch.allclose(small[0], F.avg_pool2d(wanted, 2)[0], atol=0.1)


def test_a_few_steps_teach_something_and_survive_the_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pixels = torch.from_numpy(np.stack([draw_sheet(np.random.default_rng(i), SIZE) for i in range(4)]))
    torch.manual_seed(0)
    before = build_upscaler(SMALL).eval()
    torch.manual_seed(0)
    after = train(pixels, config=SMALL, steps=30, batch=2, lr=0.02, device="cpu")
    save_network(after, tmp_path, {"seed": 0})
    wanted = preprocess(pixels)
    with torch.no_grad():
        errors = [(m(F.avg_pool2d(wanted, 2)) - wanted).abs().mean() for m in (before, open_upscaler(tmp_path))]
    assert errors[1] < 0.8 * errors[0]


def test_the_folder_is_small_and_has_its_cards(model: Upscaler) -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) / 1e6 < MAX_MB
    assert json.loads((FOLDER / "config.json").read_text()) == CONFIG
    assert json.loads((FOLDER / "card.json").read_text())["seed"] == 0
    assert (FOLDER / "README.md").read_text().startswith("# models/upscaler\n")
    assert 450_000 < sum(p.numel() for p in model.parameters()) < 1_000_000
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_pixels_survive_their_preparation() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 16, 16, 3)
    assert torch.equal(postprocess(preprocess(pixels), {}), pixels)
    assert postprocess(torch.tensor([-9.0, 9, 0]).view(1, 3, 1, 1), {}).flatten().tolist() == [0, 255, 128]


@pytest.mark.parametrize("size", [(16, 16), (17, 40)])
def test_both_sides_are_doubled(model: Upscaler, size: tuple[int, int]) -> None:
    pixels = np.zeros((2, *size, 3), dtype=np.uint8)
    assert upscale(model, pixels).shape == (2, 2 * size[0], 2 * size[1], 3)


@torch.no_grad()
def test_the_shipped_weights_give_the_pinned_output(model: Upscaler) -> None:
    output = model(wave())
    assert output.mean().item() == pytest.approx(PINNED_MEAN, abs=1e-4)
    assert output.std().item() == pytest.approx(PINNED_STD, abs=1e-4)


@pytest.mark.parametrize("kind", ["panoramas", "sheets", "shots"])
def test_it_beats_bicubic_by_a_decibel(model: Upscaler, kind: str) -> None:
    wanted, small = held_out(kind, 1)
    decibels = {name: score(run, small, wanted)[0][0] for name, run in list_methods(model).items()}
    assert decibels["upscaler"] > decibels["bicubic"] + 1 > decibels["nearest"] + 1


@torch.no_grad()
def test_attention_reaches_everywhere_and_convolutions_28_pixels(model: Upscaler) -> None:
    """What the card says of tiles: what lies beyond the convolutions' reach matters through the means alone."""
    local, x = open_upscaler(FOLDER), wave()
    for block in local.blocks:
        block.attention = torch.nn.Identity()
    changed = x.clone()
    changed[..., 30:] = 0.3
    for upscaler, is_local in ((model, False), (local, True)):
        away = (upscaler(changed) - upscaler(x))[..., : 2 * (30 - 28)].abs().max().item()
        assert (away < 1e-6) == is_local and away < 0.1


@torch.no_grad()
def test_tiles_without_overlap_leave_a_step_and_sixteen_pixels_of_it_none(model: Upscaler) -> None:
    pixels = panoramas.shrink(panoramas.render(np.random.default_rng(8)), np.random.default_rng(0))
    x = preprocess(torch.from_numpy(pixels[None, 100:228, 200:392]))
    whole = (model(x) + 0.5).clamp(0, 1)
    psnr, excess = {}, {}
    for overlap in (0, 16):
        tiled = (blend_tiles(model, x, tile=64, overlap=overlap, window="hann") + 0.5).clamp(0, 1)
        columns, rows = (find_stitches(n, 64, overlap, factor=2) for n in (x.shape[3], x.shape[2]))
        steps = [boundary_steps(image, columns, rows).mean().item() * 255 for image in (tiled, whole)]
        psnr[overlap], excess[overlap] = peak_signal_to_noise_db(tiled, whole).item(), steps[0] - steps[1]
    assert psnr[16] > psnr[0] + 10 and excess[0] > 0.2 and abs(excess[16]) < 0.05
