"""Street scenes with people of very different sizes: the pictures that the people detector learns and is judged by.

A camera looks along a street. People and things stand on the ground, and perspective ties where the feet are to how
large someone is: sizes are drawn log-uniformly from 12 to 240 pixels, so that small ones are many. Who is
near hides who is far; haze takes contrast from the far, and noise from all. Boxes are exact: the bounds
of the pixels of which a person, as far as he is in view, covers more than half; the area is that of the box.
Someone of whom less than half is in view is left out of the picture, so every person in it has a box.
Not covered: crowds that touch everywhere, people from above, night, motion blur.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evalsets.make.figures import Figure, draw_cloth, draw_person, draw_thing

SIZE = 320  # pixels a side
SMALL_AREA, MEDIUM_AREA = 32**2, 96**2  # COCO's bounds between small, medium and large, in square pixels
_HEIGHTS = (12.0, 240.0)  # of people, in pixels
_MAX_THING = 130.0  # pixels per unit of things, which would fill the picture otherwise
_MIN_IN_VIEW = 0.5  # share of a person's outline
_MIN_SIDE = 4  # pixels of a box

Field = np.ndarray  # float64 (rows, columns)


@dataclass(frozen=True)
class Scene:
    """A picture and the people in it."""

    pixels: np.ndarray  # uint8 (320, 320, 3), RGB
    boxes: np.ndarray  # int64 (people, 4): left, top, width, height in pixels

    @property
    def areas(self) -> np.ndarray:
        """Areas of the boxes in square pixels, int64 (people,)."""
        return self.boxes[:, 2] * self.boxes[:, 3]


@dataclass(frozen=True)
class _Camera:
    horizon: float  # row
    height: float  # above the ground, in people
    haze: np.ndarray  # colour of the distance
    density: float


def name_bucket(area: float) -> str:
    """Return COCO's name for a size: small up to 32 x 32, medium up to 96 x 96, large."""
    return "small" if area <= SMALL_AREA else "medium" if area <= MEDIUM_AREA else "large"


def render(rng: np.random.Generator) -> Scene:
    """Draw one scene."""
    haze = rng.uniform(0.45, 0.85) + rng.uniform(-0.1, 0.1, size=3)
    camera = _Camera(rng.uniform(0.18, 0.5) * SIZE, rng.uniform(0.6, 1.5), haze, rng.uniform(0.0, 9.0))
    picture = _backdrop(camera, rng)
    drawn, boxes = _arrange(camera, rng)
    for figure, scale in reversed(drawn):
        _paint(picture, figure, camera, scale)
    picture = _develop(picture, rng)
    return Scene(picture, np.array(boxes, dtype=np.int64).reshape(-1, 4))


def _arrange(camera: _Camera, rng: np.random.Generator) -> tuple[list[tuple[Figure, float]], list[list[int]]]:
    """Draw what stands in the scene, from near to far, and the boxes of the people who can be seen."""
    is_person = np.arange(rng.integers(8, 26)) % 2 == 0
    scales = np.exp(rng.uniform(np.log(_HEIGHTS[0]), np.log(np.where(is_person, _HEIGHTS[1], _MAX_THING))))
    in_view = np.ones((SIZE, SIZE))
    drawn: list[tuple[Figure, float]] = []
    boxes: list[list[int]] = []
    for index in np.argsort(-scales):
        scale = float(scales[index])
        foot = (float(rng.uniform(0, SIZE)), camera.horizon + scale * camera.height * rng.uniform(0.9, 1.1))
        figure = (draw_person if is_person[index] else draw_thing)(foot, scale, rng)
        inside, part = _overlap(figure)
        seen = figure.alpha[part] * in_view[inside]
        if is_person[index]:
            box = _bound(seen > 0.5, top=inside[0].start, left=inside[1].start)
            if seen.sum() < _MIN_IN_VIEW * figure.alpha.sum() or min(box[2:]) < _MIN_SIDE:
                continue
            boxes.append(box)
        drawn.append((figure, scale))
        in_view[inside] *= 1 - figure.alpha[part]
    return drawn, boxes


def _bound(mask: np.ndarray, *, top: int, left: int) -> list[int]:
    """Return left, top, width and height of what is true in a mask that lies there; no size where nothing is."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return [left, top, 0, 0]
    return [left + int(columns[0]), top + int(rows[0]), int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1]


def _overlap(figure: Figure) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Return where a figure lies in the picture, and which part of the figure that is."""
    tops = np.clip([figure.top, figure.top + figure.alpha.shape[0]], 0, SIZE)
    lefts = np.clip([figure.left, figure.left + figure.alpha.shape[1]], 0, SIZE)
    inside = (slice(*tops), slice(*lefts))
    return inside, (slice(*(tops - figure.top)), slice(*(lefts - figure.left)))


def _paint(picture: np.ndarray, figure: Figure, camera: _Camera, scale: float) -> None:
    """Lay a figure over the picture, in place, with the haze of its distance."""
    inside, part = _overlap(figure)
    alpha, clear = figure.alpha[part][..., None], np.exp(-camera.density / scale)
    picture[inside] = picture[inside] * (1 - alpha) + alpha * (figure.rgb[part] * clear + camera.haze * (1 - clear))


def _backdrop(camera: _Camera, rng: np.random.Generator) -> np.ndarray:
    """Return sky, houses and ground, float64 (320, 320, 3)."""
    row = np.arange(SIZE)[:, None, None] * np.ones((1, SIZE, 1))
    sky = rng.uniform(0.4, 0.9) + rng.uniform(-0.15, 0.15, size=3)
    picture = camera.haze + (sky - camera.haze) * np.clip(1 - row / camera.horizon, 0, 1)
    for _ in range(rng.integers(3, 10)):
        _house(picture, camera, rng)
    near = np.clip((row - camera.horizon) / (SIZE - camera.horizon), 0, 1)
    ground = camera.haze * (1 - near**0.4) + (rng.uniform(0.2, 0.6) + rng.uniform(-0.05, 0.05, size=3)) * near**0.4
    picture = np.where(row > camera.horizon, ground, picture)
    _stripes(picture, camera, rng)
    return picture * (1 + 0.35 * (_clouds(rng, 5) - 0.5) + 0.25 * (_clouds(rng, 40) - 0.5))[..., None]


def _house(picture: np.ndarray, camera: _Camera, rng: np.random.Generator) -> None:
    """Put a house with rows of windows onto the horizon, in place."""
    left, width, height = rng.uniform(-40, SIZE), rng.uniform(20, 120), rng.uniform(15, 150)
    columns = slice(*np.clip([int(left), int(left + width)], 0, SIZE))
    rows = slice(max(0, int(camera.horizon - height)), int(camera.horizon) + 2)
    wall, pane = draw_cloth(rng), draw_cloth(rng)
    y, x = np.mgrid[rows, columns]
    pitch, storey = rng.uniform(4, 16), rng.uniform(6, 20)
    is_pane = ((x - left) % pitch < pitch * rng.uniform(0.3, 0.6)) & ((y % storey) < storey * rng.uniform(0.3, 0.7))
    picture[rows, columns] = np.where(is_pane[..., None], pane, wall) * 0.8 + camera.haze * 0.2


def _stripes(picture: np.ndarray, camera: _Camera, rng: np.random.Generator) -> None:
    """Put kerbs and lane marks onto the ground, in place: lines that meet on the horizon."""
    y, x = np.mgrid[0:SIZE, 0:SIZE]
    depth = np.maximum(y - camera.horizon, 1e-3)
    for _ in range(rng.integers(1, 6)):
        across = (x - rng.uniform(0.2, 0.8) * SIZE) / depth - rng.uniform(-2.5, 2.5)
        is_line = (np.abs(across) < rng.uniform(0.01, 0.12)) & (y > camera.horizon)
        if rng.random() < 0.5:
            is_line &= np.sin(rng.uniform(100, 900) / depth) > 0
        picture[is_line] = picture[is_line] * 0.4 + rng.uniform(0.1, 0.9) * 0.6


def _clouds(rng: np.random.Generator, cells: int) -> Field:
    """Return smooth noise in [0, 1] with this many cells a side."""
    grid, at = rng.random((cells + 2, cells + 2)), np.linspace(0, cells, SIZE)
    low = at.astype(int)
    rows = grid[low] + (grid[low + 1] - grid[low]) * (at - low)[:, None]
    return rows[:, low] + (rows[:, low + 1] - rows[:, low]) * (at - low)


def _develop(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the camera's picture: light, a little blur, noise, eight bits."""
    picture = np.clip(picture, 0, 1) ** rng.uniform(0.75, 1.35) * rng.uniform(0.75, 1.1)
    blur = rng.uniform(0, 0.25)
    for axis in (0, 1):
        picture = (1 - 2 * blur) * picture + blur * (np.roll(picture, 1, axis) + np.roll(picture, -1, axis))
    picture = picture + rng.normal(0, rng.uniform(0.005, 0.05), size=picture.shape)
    return np.round(np.clip(picture, 0, 1) * 255).astype(np.uint8)
