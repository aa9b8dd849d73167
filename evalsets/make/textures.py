"""Seeded detail for pictures that an upscaler learns from and is judged by: surfaces, gratings, edges, writing.

Each function draws one field of a given size in pixels, and what is an edge is one pixel wide, as a camera has it.
A sheet is a picture of nothing in particular, filled with all of them. Not covered: letters of a real
script (the writing only has strokes like them), photographs, noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from evalsets.make.figures import draw_cloth

Field = np.ndarray  # float64 (rows, columns)


def draw_clouds(rng: np.random.Generator, shape: tuple[int, int], pitch: float) -> Field:
    """Return smooth noise in [0, 1], with one random value every so many pixels."""
    rows, columns = (np.arange(n) / pitch for n in shape)
    grid = rng.random((int(rows[-1]) + 2, int(columns[-1]) + 2))
    top, left = rows.astype(int), columns.astype(int)
    down, across = (0.5 - 0.5 * np.cos(np.pi * (at % 1)) for at in (rows, columns))
    mixed = grid[top] + (grid[top + 1] - grid[top]) * down[:, None]
    return mixed[:, left] + (mixed[:, left + 1] - mixed[:, left]) * across


def draw_grain(rng: np.random.Generator, shape: tuple[int, int], *, coarsest: float = 32, finest: float = 2) -> Field:
    """Return noise in [0, 1] with detail of every size: plaster, soil, leaves."""
    num = max(1, round(math.log2(coarsest / finest)) + 1)
    total = draw_clouds(rng, shape, coarsest)
    for i in range(1, num):
        total += draw_clouds(rng, shape, coarsest / 2**i)
    return total / num


def draw_bricks(rng: np.random.Generator, shape: tuple[int, int]) -> Field:
    """Return bricks of unequal shades in [0, 1] with dark joints."""
    height, width, joint = rng.uniform(6, 16), rng.uniform(14, 40), rng.uniform(0.7, 2)
    y, x = (np.arange(n, dtype=float)[:, None].reshape(s) for n, s in zip(shape, ((-1, 1), (1, -1)), strict=True))
    course = np.floor(y / height).astype(int)
    x = x + course % 2 * width / 2
    brick = np.floor(x / width).astype(int)
    shade = rng.random((int(course.max()) + 1, int(brick.max()) + 1))[course, brick]
    depth = np.minimum(np.minimum(y % height, height - y % height), np.minimum(x % width, width - x % width))
    return np.clip((depth - joint / 2) + 0.5, 0, 1) * (0.5 + 0.5 * shade)


def draw_waves(rng: np.random.Generator, shape: tuple[int, int]) -> Field:
    """Return a grating in [0, 1] whose stripes bend and narrow: cloth, fences, blinds."""
    y, x = np.mgrid[: shape[0], : shape[1]]
    angle, period, is_sharp = rng.uniform(0, math.pi), rng.uniform(4, 24), rng.random() < 0.5
    phase = (x * math.cos(angle) + y * math.sin(angle)) / period
    phase = phase + rng.uniform(0, 2) * draw_clouds(rng, shape, rng.uniform(40, 160))
    wave = np.sin(2 * math.pi * phase)
    return np.clip(0.5 + wave * (period / 4 if is_sharp else 0.5), 0, 1)


def draw_writing(rng: np.random.Generator, shape: tuple[int, int], size: float) -> Field:
    """Return the cover in [0, 1] of lines of signs, each of two to four strokes, this many pixels high."""
    cover, width, pen = np.zeros(shape), size * 0.6, max(0.9, size * rng.uniform(0.06, 0.13))
    y, x = np.mgrid[: math.ceil(size) + 1, : math.ceil(width) + 1]
    for top in np.arange(size * 0.3, shape[0] - size * 1.2, size * 1.5):
        for left in np.arange(width * 0.4, shape[1] - width * 1.4, width * 1.25):
            if rng.random() < 0.15:
                continue  # a gap between words
            rows, columns = slice(int(top), int(top) + len(y)), slice(int(left), int(left) + y.shape[1])
            sign = np.max([_stroke(rng, x, y, (width, size), pen) for _ in range(rng.integers(2, 5))], axis=0)
            cover[rows, columns] = np.maximum(cover[rows, columns], sign[: cover.shape[0] - rows.start])
    return cover


def _stroke(rng: np.random.Generator, x: Field, y: Field, size: tuple[float, float], pen: float) -> Field:
    """Return the cover of one straight stroke between two points of a 3 x 4 grid, or of an arc."""
    reach = np.array(size) - pen
    a, b = (rng.integers(0, [3, 4]) / [2, 3] * reach + pen / 2 for _ in range(2))
    if rng.random() < 0.25:
        radius = reach[0] / 2
        distance = np.abs(np.hypot(x - radius - pen / 2, y - a[1].clip(radius, reach[1] - radius)) - radius)
    else:
        along = b - a
        at = ((x - a[0]) * along[0] + (y - a[1]) * along[1]) / max(float(along @ along), 1e-9)
        at = np.clip(at, 0, 1)
        distance = np.hypot(x - a[0] - at * along[0], y - a[1] - at * along[1])
    return np.clip(0.5 + pen / 2 - distance, 0, 1)


def draw_edge(rng: np.random.Generator, shape: tuple[int, int]) -> Field:
    """Return the cover in [0, 1] of a disc, a ring, a bar or a half of the picture."""
    y, x = np.mgrid[: shape[0], : shape[1]]
    x, y, angle = x - rng.uniform(0, shape[1]), y - rng.uniform(0, shape[0]), rng.uniform(0, math.pi)
    size = min(shape) * math.exp(rng.uniform(math.log(0.02), math.log(0.5)))
    across, along = x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
    kind = rng.integers(5)
    if kind == 0:
        distance = across
    elif kind == 1:
        distance = np.hypot(x, y) - size
    elif kind == 2:
        distance = np.abs(np.hypot(x, y) - size) - size * rng.uniform(0.02, 0.3)
    else:
        length = size if kind == 3 else max(shape)
        distance = np.maximum(np.abs(across) - size * rng.uniform(0.02, 0.5), np.abs(along) - length)
    return np.clip(0.5 - distance, 0, 1)


def lay(picture: np.ndarray, cover: Field, colour: np.ndarray) -> None:
    """Cover a picture, float64 (rows, columns, 3), with a colour or another picture, in place."""
    rows = np.flatnonzero(cover.any(axis=1))
    if not len(rows):
        return
    part = slice(rows[0], rows[-1] + 1)  # where nothing is covered, the picture stays as it is, to the last bit
    difference = (colour if colour.ndim == 1 else colour[part]) - picture[part]
    difference *= cover[part][..., None]
    picture[part] += difference


def draw_sheet(rng: np.random.Generator, size: int) -> np.ndarray:
    """Draw a square of edges over surfaces, with some writing on top.

    Returns:
        uint8 (size, size, 3), RGB.
    """
    shape = (size, size)
    surfaces: list[Callable[[np.random.Generator, tuple[int, int]], Field]] = [draw_grain, draw_bricks, draw_waves]
    picture = draw_cloth(rng) + (draw_cloth(rng) - draw_cloth(rng)) * 0.5 * draw_clouds(rng, shape, size / 2)[..., None]
    for _ in range(rng.integers(4, 14)):
        colour = draw_cloth(rng) * np.ones((size, size, 3))
        if rng.random() < 0.6:
            surface = surfaces[rng.integers(len(surfaces))](rng, shape)
            colour = colour + rng.uniform(-0.6, 0.6) * (surface[..., None] - 0.5)
        lay(picture, draw_edge(rng, shape), colour)
    for _ in range(rng.integers(0, 3)):
        lay(picture, draw_writing(rng, shape, rng.uniform(9, 40)) * draw_edge(rng, shape), draw_cloth(rng))
    return np.round(np.clip(picture, 0, 1) * 255).astype(np.uint8)
