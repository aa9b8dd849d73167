"""A planted seam is found, pictures without one are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipeline.errors import NumericsError
from pipeline.numerics.seams import SeamStatistics, boundary_steps, measure_seams, seam_excess, signed_steps

SIZE, BOUNDARIES = 192, (64, 128)


def draw_pictures(n: int, *, seed: int = 0, size: int = SIZE) -> torch.Tensor:
    """Draw pictures with the 1/f spectrum of natural ones, a straight edge in each, in 8 bits."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = torch.fft.fftfreq(size)
    radius = (frequencies[:, None] ** 2 + frequencies[None, :] ** 2).sqrt().clamp(min=1 / size)
    spectrum = torch.fft.fft2(torch.randn(n, 3, size, size, generator=generator)) / radius
    noise = torch.fft.ifft2(spectrum).real
    pictures = 0.5 + 0.15 * noise / noise.std(dim=(2, 3), keepdim=True)
    for picture in pictures:
        x, y = torch.randint(8, size - 8, (2,), generator=generator).tolist()
        picture[:, y:, x : x + size // 3] += 0.2
    return (pictures.clamp(0, 1) * 255).round() / 255


def plant_seam(pictures: torch.Tensor, levels: float) -> torch.Tensor:
    """Shift the middle tile, up in every other picture and down in the rest."""
    shifted = pictures.clone()
    signs = torch.tensor([1.0, -1.0]).repeat(len(pictures))[: len(pictures)].view(-1, 1, 1, 1)
    shifted[..., BOUNDARIES[0] : BOUNDARIES[1]] += signs * levels / 255
    return shifted


def measure(pictures: torch.Tensor, **settings: int) -> SeamStatistics:
    return measure_seams(signed_steps(pictures), BOUNDARIES, **settings)


def test_steps_are_those_of_a_loop_in_both_directions() -> None:
    pictures = draw_pictures(2, size=24)
    expected = np.zeros((2, 23))
    for i, picture in enumerate(pictures.double().numpy()):
        for x in range(1, 24):
            expected[i, x - 1] = np.mean([picture[c, y, x] - picture[c, y, x - 1] for c in range(3) for y in range(24)])
    assert np.allclose(signed_steps(pictures), expected, atol=1e-12)
    assert np.allclose(signed_steps(pictures.transpose(2, 3), along="rows"), expected, atol=1e-12)


def test_edges_end_at_the_boundaries_or_where_they_are_cut() -> None:
    """A control line of another length than a boundary's edges has another mean step by chance alone."""
    pictures = draw_pictures(2, size=24)
    plain = boundary_steps(pictures, [8], [10])
    assert torch.equal(plain, boundary_steps(pictures, [8], [10], cuts=([8], [10])))
    across = pictures[..., 12].double() - pictures[..., 11].double()
    expected = torch.cat([across[..., :10].mean(dim=2).abs(), across[..., 10:].mean(dim=2).abs()], dim=1)
    assert torch.allclose(boundary_steps(pictures, [12], [], cuts=([8], [10])), expected)


def test_a_seam_of_two_grey_levels_is_found_in_a_set() -> None:
    pictures = draw_pictures(100)
    plain, seamed = measure(pictures), measure(plant_seam(pictures, 2))
    assert seamed.z > 6 and seamed.max_z >= seamed.z
    assert seamed.seam_ratio > 1.3 * plain.seam_ratio
    assert abs(plain.z) < 3 and 0.7 < plain.seam_ratio < 1.3
    assert seamed.seam_step * 255 == pytest.approx(2, abs=1)


def test_absolute_steps_would_bury_it() -> None:
    """Why the sign is kept until the boundary has been averaged."""
    seamed = plant_seam(draw_pictures(40), 2)
    absolute = seamed.double().diff(dim=3).abs().mean(dim=(1, 2))
    assert measure_seams(absolute, BOUNDARIES).z < measure(seamed).z / 2


def test_sets_without_a_seam_are_not_flagged() -> None:
    found = [measure(draw_pictures(30, seed=seed)).z for seed in range(1, 13)]
    assert max(found) < 4, found


def test_a_seam_at_one_boundary_of_many_shows_in_the_worst_score() -> None:
    pictures = draw_pictures(40)
    pictures[..., 64:] += 2 / 255
    found = measure_seams(signed_steps(pictures), (32, 64, 96, 128, 160))
    assert found.max_z > 6 > found.z


def test_a_pattern_of_the_decoder_is_not_taken_for_a_seam() -> None:
    pictures = draw_pictures(40)
    pictures[..., ::8] += 3 / 255  # every latent pixel, so at tile boundaries too
    assert measure(pictures).z > 4
    assert abs(measure(pictures, period=8).z) < 3


def test_pictures_without_texture_have_no_seam_and_show_the_smallest() -> None:
    flat = torch.full((3, 3, 32, SIZE), 0.5)
    assert (measure(flat).seam_ratio, measure(flat).z) == (1, 0)
    seamed = measure(plant_seam(flat, 1))
    assert seamed.z > 6 and math.isinf(seamed.seam_ratio)


def test_one_picture_with_an_edge_at_the_boundary_does_not_decide() -> None:
    pictures = draw_pictures(40)
    pictures[0, ..., 64:] = 1
    assert measure(pictures).z < 4


def test_boundaries_outside_and_too_few_controls_are_refused() -> None:
    steps = signed_steps(draw_pictures(1))
    for boundaries in ((), (0,), (SIZE,)):
        with pytest.raises(NumericsError, match="boundaries from 1 to 191"):
            measure_seams(steps, boundaries)
    with pytest.raises(NumericsError, match="at least 16 control positions, found"):
        measure_seams(steps, (64,), period=32)
    with pytest.raises(NumericsError, match="NaN"):
        signed_steps(torch.full((1, 3, 4, 4), math.nan))


@pytest.mark.parametrize("sign", [1, -1], ids=["with-the-edge", "against-the-edge"])
def test_a_seam_on_an_edge_of_the_picture_is_as_high_as_it_is(sign: int) -> None:
    """Absolute steps of each side, subtracted, made of 8 levels against an edge of 20 a gain of 8."""
    whole = torch.full((2, 3, 64, 64), 0.4)
    whole[..., 32:] += 20 / 255
    tiled = whole.clone()
    tiled[..., 32:] += sign * 8 / 255
    assert (255 * seam_excess(tiled, whole, [32], [])).tolist() == pytest.approx([8, 8], abs=1e-4)


def test_what_every_line_has_is_no_seam() -> None:
    whole = torch.full((1, 3, 64, 64), 0.4)
    striped = whole + 4 / 255 * (torch.arange(64) % 2)
    assert 255 * seam_excess(striped, whole, [32], [32], period=2).abs().item() < 1e-4
