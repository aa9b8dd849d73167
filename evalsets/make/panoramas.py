"""Pictures as large as an upscaler is really given: a street from its sky to its paving, 1536 x 1024 pixels.

Such a picture is larger than a tile, so its upscaling is tiled, and both things that a stitch can spoil are in it:
smooth gradients (sky, glow, light that falls from one side), where a step of two grey levels shows, and
detail (brick, plaster, writing, people), where contrast that changes at a line shows. All of one size share their
tile grid, as the seam metric wants. What is before the upscaler is `shrink` of such a picture.
Not covered: portraits, motion, a second aspect ratio.
"""

from __future__ import annotations

import numpy as np

from evalsets.make.figures import Figure, draw_cloth, draw_person, draw_thing
from evalsets.make.textures import draw_bricks, draw_clouds, draw_grain, draw_waves, draw_writing, lay

WIDTH, HEIGHT = 1536, 1024  # pixels
FACTOR = 2  # between a picture and what the upscaler is given

Field = np.ndarray  # float64 (rows, columns)


def render(rng: np.random.Generator) -> np.ndarray:
    """Draw one picture.

    Returns:
        uint8 (1024, 1536, 3), RGB.
    """
    horizon = float(rng.uniform(0.42, 0.58)) * HEIGHT
    haze = rng.uniform(0.55, 0.8) + rng.uniform(-0.1, 0.1, size=3)
    picture = _sky(rng, horizon, haze)
    for distance in (0.7, 0.4):
        _hills(picture, rng, horizon, haze, distance)
    for _ in range(rng.integers(5, 9)):
        _house(picture, rng, horizon, haze)
    _ground(picture, rng, horizon)
    for _ in range(rng.integers(1, 4)):
        _cable(picture, rng, horizon)
    _people(picture, rng, horizon)
    y, x = _axes()
    side = np.cos(np.pi * x / WIDTH * rng.uniform(0.6, 1.2) + rng.uniform(0, np.pi))
    light = rng.uniform(0.85, 1.0) + rng.uniform(0.08, 0.22) * side - 0.12 * ((y / HEIGHT - 0.5) * 2) ** 2
    return np.round(np.clip(picture * light[..., None], 0, 1) * 255).astype(np.uint8)


def shrink(pixels: np.ndarray, rng: np.random.Generator, *, noise: float = 0.005) -> np.ndarray:
    """Return a picture at half its size, as a sensor with larger pixels sees it.

    Args:
        pixels: uint8 (rows, columns, 3), even sides.
        rng: draws the noise.
        noise: its standard deviation, in [0, 1] of full scale; the default is 1.3 grey levels.

    Returns:
        uint8 (rows / 2, columns / 2, 3).
    """
    rows, columns = (n // FACTOR for n in pixels.shape[:2])
    mean = pixels.reshape(rows, FACTOR, columns, FACTOR, 3).mean(axis=(1, 3)) / 255
    return np.round(np.clip(mean + rng.normal(0, noise, size=mean.shape), 0, 1) * 255).astype(np.uint8)


def _axes() -> tuple[Field, Field]:
    """Return y and x in pixels, as a column and a row."""
    return np.arange(HEIGHT, dtype=float)[:, None], np.arange(WIDTH, dtype=float)[None]


def _sky(rng: np.random.Generator, horizon: float, haze: np.ndarray) -> np.ndarray:
    """Return the sky down to the lower edge: a gradient, a glow, soft clouds."""
    y, x = _axes()
    zenith = np.array([0.25, 0.45, 0.75]) * rng.uniform(0.7, 1.2) + rng.uniform(-0.08, 0.08, size=3)
    picture = haze + (zenith - haze) * np.clip(1 - y / horizon, 0, 1)[..., None] * np.ones((1, WIDTH, 1))
    glow = np.exp(-np.hypot(x - rng.uniform(0, WIDTH), (y - horizon * rng.uniform(0.4, 1))) / rng.uniform(150, 400))
    lay(picture, 0.6 * glow, np.array([1.0, 0.93, 0.8]))
    cover = draw_grain(rng, (HEIGHT, WIDTH), coarsest=384, finest=48)
    lay(picture, np.clip((cover - 0.5) * 2.5, 0, 0.7), np.full(3, 0.93))
    return picture


def _hills(picture: np.ndarray, rng: np.random.Generator, horizon: float, haze: np.ndarray, distance: float) -> None:
    """Put a wooded ridge in front of the sky, in place; the distant one is paler."""
    y, _ = _axes()
    ridge = horizon - 90 * distance - 200 * distance * (draw_clouds(rng, (1, WIDTH), 220) - 0.3)
    ridge = ridge - 10 * (1 - distance) * draw_grain(rng, (1, WIDTH), coarsest=24, finest=3)
    wood = draw_grain(rng, (HEIGHT, WIDTH), coarsest=24, finest=3)[..., None] - 0.5
    colour = np.array([0.2, 0.32, 0.18]) * rng.uniform(0.6, 1.2) + 0.4 * (1 - distance) * wood
    lay(picture, np.clip(y - ridge + 0.5, 0, 1), colour + (haze - colour) * distance)


def _house(picture: np.ndarray, rng: np.random.Generator, horizon: float, haze: np.ndarray) -> None:
    """Put a house of brick, plaster or boards onto the horizon, in place, with windows and a shop's sign."""
    left, width, height = int(rng.uniform(-80, WIDTH - 80)), int(rng.uniform(140, 340)), int(rng.uniform(110, 380))
    rows = slice(max(0, int(horizon) - height), int(horizon) + 3)
    columns = slice(max(0, left), min(WIDTH, left + width))
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    surface = (draw_bricks, draw_grain, draw_waves)[rng.integers(3)](rng, shape)[..., None]
    front = draw_cloth(rng) * 0.9 + rng.uniform(0.1, 0.35) * (surface - 0.5)
    y, x = np.mgrid[: shape[0], : shape[1]]
    pitch, storey = rng.uniform(26, 60), rng.uniform(40, 80)
    pane = _bars(x, pitch, rng.uniform(0.4, 0.65)) * _bars(y, storey, rng.uniform(0.4, 0.65))
    frame = np.maximum(_bars(x, pitch, 0.06), _bars(y, storey / 2, 0.05))
    glass = draw_cloth(rng) * 0.5 + 0.25 * draw_clouds(rng, shape, 60)[..., None]
    lay(front, pane, glass)
    lay(front, pane * frame, draw_cloth(rng))
    board = slice(max(0, shape[0] - 48), max(0, shape[0] - 14))
    front[board] = draw_cloth(rng)
    lay(front[board], draw_writing(rng, (board.stop - board.start, shape[1]), rng.uniform(12, 26)), draw_cloth(rng))
    picture[rows, columns] = front * 0.9 + haze * 0.1


def _bars(at: Field, pitch: float, share: float) -> Field:
    """Return bars in the middle of each pitch, with this share of it, in [0, 1]."""
    return np.clip(share * pitch / 2 - np.abs(at % pitch - pitch / 2) + 0.5, 0, 1)


def _ground(picture: np.ndarray, rng: np.random.Generator, horizon: float) -> None:
    """Put paving with joints and marks that meet on the horizon below it, in place."""
    top = int(horizon) + 2
    y, x = np.mgrid[top:HEIGHT, :WIDTH].astype(float)
    depth = (y - horizon) / (HEIGHT - horizon)
    shape = depth.shape
    grain = draw_grain(rng, shape, coarsest=64, finest=2) - 0.5
    colour = (rng.uniform(0.3, 0.55) + rng.uniform(-0.05, 0.05, size=3)) * (1.15 - 0.3 * depth[..., None])
    ground = colour + (0.1 + 0.35 * depth * rng.uniform(0.4, 1))[..., None] * grain[..., None]
    centre = rng.uniform(0.2, 0.8) * WIDTH
    for _ in range(rng.integers(4, 10)):
        away = np.abs(x - centre - rng.uniform(-3, 3) * WIDTH * depth) - rng.uniform(1, 14) * depth
        lay(ground, np.clip(0.5 - away, 0, 1) * rng.uniform(0.3, 0.9), np.full(3, rng.uniform(0.1, 0.9)))
    rung = np.abs(((1 / np.maximum(depth, 0.03)) * rng.uniform(1, 3)) % 1 - 0.5) * 60 * depth
    lay(ground, np.clip(1.2 - rung, 0, 1) * 0.3 * (depth > 0.08), np.full(3, 0.15))
    picture[top:] = ground


def _cable(picture: np.ndarray, rng: np.random.Generator, horizon: float) -> None:
    """Hang a cable across the sky, in place."""
    y, x = _axes()
    ends, sag = rng.uniform(0.05, 0.6, size=2) * horizon, rng.uniform(10, 90)
    across = x / WIDTH
    hang = ends[0] + (ends[1] - ends[0]) * across + sag * (1 - (2 * across - 1) ** 2)
    slope = np.gradient(hang, axis=1)
    cover = np.clip(0.5 + rng.uniform(0.4, 1.8) - np.abs(y - hang) / np.hypot(1, slope), 0, 1)
    lay(picture, cover * 0.85, np.full(3, rng.uniform(0.05, 0.3)))


def _people(picture: np.ndarray, rng: np.random.Generator, horizon: float) -> None:
    """Put people and things on the ground, in place, from far to near."""
    camera = rng.uniform(0.9, 1.5)  # its height above the ground, in people
    largest = (HEIGHT - horizon) / camera * 1.05
    for scale in np.sort(np.exp(rng.uniform(np.log(30), np.log(largest), size=rng.integers(14, 26)))):
        foot = (float(rng.uniform(0, WIDTH)), horizon + float(scale) * camera * rng.uniform(0.95, 1.05))
        _paint(picture, (draw_person if rng.random() < 0.6 else draw_thing)(foot, float(scale), rng))


def _paint(picture: np.ndarray, figure: Figure) -> None:
    tops = np.clip([figure.top, figure.top + figure.alpha.shape[0]], 0, HEIGHT)
    lefts = np.clip([figure.left, figure.left + figure.alpha.shape[1]], 0, WIDTH)
    inside, part = (slice(*tops), slice(*lefts)), (slice(*(tops - figure.top)), slice(*(lefts - figure.left)))
    lay(picture[inside], figure.alpha[part], figure.rgb[part])
