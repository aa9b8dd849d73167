"""What stands in a street scene: people, and the things that hide them or look like them, each as a small RGBA picture.

A figure is drawn in its own units: a person is 1 high, feet at y = 0, x to the right, y upwards. Edges are
one pixel wide whatever the size. Clothes, build, pose, bags and hats are drawn by the generator, and so are the
things: bollards with a ball on top, signposts, meters and bins have a person's outline at a distance, poles, trees
and cars hide what is behind them. Not covered: seated or lying people, cycles, animals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Field = np.ndarray  # float64 (rows, columns)
Colour = np.ndarray  # float64 (3,), RGB in [0, 1]
_SKIN = np.array([[0.96, 0.80, 0.69], [0.87, 0.67, 0.52], [0.66, 0.46, 0.33], [0.43, 0.29, 0.21], [0.29, 0.19, 0.14]])
_HAIR = np.array([[0.08, 0.06, 0.05], [0.25, 0.16, 0.09], [0.50, 0.34, 0.16], [0.80, 0.67, 0.38], [0.62, 0.62, 0.62]])


@dataclass(frozen=True)
class Figure:
    """A drawn figure and where its top left corner goes; it may reach beyond the picture."""

    rgb: np.ndarray  # float64 (rows, columns, 3) in [0, 1]
    alpha: Field  # share of each pixel that it covers
    left: int
    top: int


class Canvas:
    """The square of pixels round one figure, onto which parts are laid one after another."""

    def __init__(self, foot: tuple[float, float], scale: float, extent: tuple[float, float]) -> None:
        """Open a canvas.

        Args:
            foot: x and y of the figure's origin in the picture, in pixels, y downwards.
            scale: pixels per unit.
            extent: half the width, and the height, in units.
        """
        self.left, self.top = int(foot[0] - extent[0] * scale), int(foot[1] - extent[1] * scale)
        columns = np.arange(self.left, int(foot[0] + extent[0] * scale) + 2) + 0.5
        rows = np.arange(self.top, int(foot[1] + 0.06 * scale) + 2) + 0.5
        self.x, self.y = np.meshgrid((columns - foot[0]) / scale, (foot[1] - rows) / scale)
        self.scale = scale
        self.rgb = np.zeros((*self.x.shape, 3))
        self.alpha = np.zeros(self.x.shape)

    def lay(self, distance: Field, colour: Colour | np.ndarray) -> None:
        """Cover the points of negative distance (in units) with a colour, or with a picture of the canvas's size."""
        cover = np.clip(0.5 - distance * self.scale, 0, 1)
        rows, columns = np.flatnonzero(cover.any(axis=1)), np.flatnonzero(cover.any(axis=0))
        if not len(rows):
            return
        # most parts are small: what lies round them stays as it is, to the last bit
        part = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        cover, colour = cover[part], colour if colour.ndim == 1 else colour[part]
        self.rgb[part] = self.rgb[part] * (1 - cover[..., None]) + colour * cover[..., None]
        self.alpha[part] = self.alpha[part] * (1 - cover) + cover

    def finish(self) -> Figure:
        """Return the figure; its colours are no longer multiplied by what they cover."""
        return Figure(self.rgb / np.maximum(self.alpha, 1e-9)[..., None], self.alpha, self.left, self.top)


def draw_person(foot: tuple[float, float], scale: float, rng: np.random.Generator) -> Figure:
    """Draw someone who stands or walks; see `Canvas` for the place."""
    canvas = Canvas(foot, scale, (0.42, 1.1))
    skin, hair = rng.choice(_SKIN) * rng.uniform(0.85, 1.1), rng.choice(_HAIR)
    top, bottom = draw_cloth(rng), draw_cloth(rng)
    stride, build, face = rng.uniform(-0.17, 0.17), rng.uniform(0.85, 1.25), rng.uniform(-0.02, 0.02)
    width = build * rng.uniform(0.075, 0.125)  # of the shoulders, narrow when seen from the side
    shade = 1 + rng.uniform(-0.28, 0.28) * np.clip(canvas.x / width, -1, 1)[..., None]
    _arm(canvas, -width, stride + rng.uniform(-0.1, 0.1), top * 0.8, skin * 0.8)
    _leg(canvas, -0.042 * build, -stride, bottom * 0.78, build)
    _leg(canvas, 0.042 * build, stride, bottom, build)
    _torso(canvas, width, top * shade, bottom * shade, rng)
    _head(canvas, face, skin, hair, rng)
    _arm(canvas, width, rng.uniform(-0.1, 0.1) - stride, top * 0.92, skin)
    if rng.random() < 0.3:
        side = rng.choice([-1.0, 1.0]) * (width + 0.03)
        canvas.lay(box(canvas.x - side, canvas.y - rng.uniform(0.36, 0.6), 0.06, 0.08, 0.02), draw_cloth(rng))
    return canvas.finish()


def draw_cloth(rng: np.random.Generator) -> Colour:
    """Draw a colour: mostly dull, now and then bright."""
    grey, bright = rng.uniform(0.05, 0.9), rng.random() < 0.35
    return np.clip(grey + rng.normal(0, 0.22 if bright else 0.05, size=3), 0.02, 0.97)


def _leg(canvas: Canvas, hip: float, stride: float, colour: Colour, build: float) -> None:
    knee = (hip + stride * 0.55, 0.27)
    ankle = (hip + stride * (1.1 if stride < 0 else 0.9), 0.045)
    canvas.lay(rod(canvas, (hip, 0.5), knee, 0.05 * build), colour)
    canvas.lay(rod(canvas, knee, ankle, 0.036 * build), colour * 0.95)
    canvas.lay(rod(canvas, ankle, (ankle[0] + 0.05, 0.02), 0.024), colour * 0.35)


def _arm(canvas: Canvas, shoulder: float, swing: float, sleeve: Colour, skin: Colour) -> None:
    elbow, hand = (shoulder * 1.15 + swing * 0.5, 0.62), (shoulder * 1.1 + swing, 0.46)
    canvas.lay(rod(canvas, elbow, hand, 0.024), skin)
    canvas.lay(rod(canvas, (shoulder, 0.79), elbow, 0.033), sleeve)


def _torso(canvas: Canvas, width: float, top: np.ndarray, bottom: np.ndarray, rng: np.random.Generator) -> None:
    hem = rng.choice([0.47, 0.44, 0.3])  # a jacket's, or a coat's
    if rng.random() < 0.2:
        flare = 0.075 + 0.35 * np.clip(0.52 - canvas.y, 0, 0.3)
        canvas.lay(np.maximum(np.abs(canvas.x) - flare, np.abs(canvas.y - 0.4) - 0.12), bottom)
    if rng.random() < 0.25:
        top = top * (0.7 + 0.6 * (np.sin(canvas.y * rng.uniform(60, 160)) > 0))[..., None]
    half = width * (0.82 + 0.25 * np.clip((canvas.y - 0.5) / 0.3, 0, 1))
    middle, reach = (0.84 + hem) / 2, (0.84 - hem) / 2
    canvas.lay(np.maximum(np.abs(canvas.x) - half, np.abs(canvas.y - middle) - reach) * 0.9, top)


def _head(canvas: Canvas, turn: float, skin: Colour, hair: Colour, rng: np.random.Generator) -> None:
    canvas.lay(rod(canvas, (0, 0.82), (0, 0.88), 0.028), skin * 0.85)
    if rng.random() < 0.3:
        canvas.lay(ellipse(canvas.x - turn / 2, canvas.y - 0.89, 0.07, 0.1), hair)
    canvas.lay(ellipse(canvas.x, canvas.y - 0.92, 0.054, 0.072), skin)
    cap = np.maximum(ellipse(canvas.x, canvas.y - 0.925, 0.06, 0.08), 0.93 - canvas.y + turn)
    canvas.lay(cap, hair if rng.random() < 0.75 else draw_cloth(rng))


def draw_thing(foot: tuple[float, float], scale: float, rng: np.random.Generator) -> Figure:
    """Draw one thing of the street; see `Canvas` for the place."""
    drawers: list[Callable[[tuple[float, float], float, np.random.Generator], Figure]] = [
        _bollard,
        _bollard,
        _sign,
        _sign,
        _bin,
        _pole,
        _tree,
        _car,
    ]
    return drawers[rng.integers(len(drawers))](foot, scale, rng)


def _bollard(foot: tuple[float, float], scale: float, rng: np.random.Generator) -> Figure:
    canvas, colour, height = Canvas(foot, scale, (0.3, 1.1)), draw_cloth(rng), rng.uniform(0.4, 0.85)
    radius = rng.uniform(0.05, 0.12)
    canvas.lay(box(canvas.x, canvas.y - height / 2, radius, height / 2, 0.01), colour)
    canvas.lay(ellipse(canvas.x, canvas.y - height - radius * 0.4, radius * 0.9, radius), draw_cloth(rng))
    return canvas.finish()


def _sign(foot: tuple[float, float], scale: float, rng: np.random.Generator) -> Figure:
    canvas, height, size = Canvas(foot, scale, (0.4, 1.9)), rng.uniform(0.8, 1.6), rng.uniform(0.07, 0.2)
    canvas.lay(box(canvas.x, canvas.y - height / 2, 0.022, height / 2, 0), np.full(3, rng.uniform(0.15, 0.7)))
    board = box(canvas.x, canvas.y - height, size, size * rng.uniform(0.6, 1.4), 0.02)
    canvas.lay(ellipse(canvas.x, canvas.y - height, size, size) if rng.random() < 0.5 else board, draw_cloth(rng))
    if rng.random() < 0.4:  # a stand below the board: now its outline has legs and a trunk
        canvas.lay(box(canvas.x, canvas.y - height * 0.55, size * 0.8, height * 0.2, 0.01), draw_cloth(rng))
    return canvas.finish()


def _bin(foot: tuple[float, float], scale: float, rng: np.random.Generator) -> Figure:
    canvas, width, height = Canvas(foot, scale, (0.5, 0.9)), rng.uniform(0.12, 0.3), rng.uniform(0.35, 0.7)
    colour = draw_cloth(rng)
    canvas.lay(box(canvas.x, canvas.y - height / 2, width, height / 2, 0.03), colour)
    canvas.lay(box(canvas.x, canvas.y - height, width * 1.1, 0.04, 0.02), colour * 0.6)
    return canvas.finish()


def _pole(foot: tuple[float, float], scale: float, rng: np.random.Generator) -> Figure:
    canvas, height = Canvas(foot, scale, (0.3, 4.2)), rng.uniform(2.2, 4)
    colour = np.full(3, rng.uniform(0.1, 0.6)) + rng.uniform(-0.05, 0.05, size=3)
    canvas.lay(box(canvas.x, canvas.y - height / 2, rng.uniform(0.03, 0.09), height / 2, 0), colour)
    canvas.lay(ellipse(canvas.x, canvas.y - height, 0.2, 0.08), colour * 0.8)
    return canvas.finish()


def _tree(foot: tuple[float, float], scale: float, rng: np.random.Generator) -> Figure:
    canvas, height = Canvas(foot, scale, (1.3, 3.6)), rng.uniform(1.2, 2)
    canvas.lay(
        box(canvas.x, canvas.y - height / 2, rng.uniform(0.06, 0.14), height / 2, 0),
        np.array([0.3, 0.22, 0.15]) * rng.uniform(0.6, 1.3),
    )
    green = np.array([rng.uniform(0.12, 0.4), rng.uniform(0.3, 0.5), rng.uniform(0.08, 0.2)])
    for _ in range(7):
        x, y = rng.uniform(-0.6, 0.6), height + rng.uniform(0, 1)
        canvas.lay(
            ellipse(canvas.x - x, canvas.y - y, rng.uniform(0.3, 0.6), rng.uniform(0.25, 0.5)),
            green * rng.uniform(0.6, 1.3),
        )
    return canvas.finish()


def _car(foot: tuple[float, float], scale: float, rng: np.random.Generator) -> Figure:
    canvas, colour = Canvas(foot, scale, (1.45, 1.1)), draw_cloth(rng)
    canvas.lay(box(canvas.x, canvas.y - 0.65, 0.72, 0.24, 0.15), colour * 0.9)
    canvas.lay(box(canvas.x, canvas.y - 0.68, 0.62, 0.15, 0.1), np.array([0.2, 0.25, 0.3]) * rng.uniform(0.5, 1.8))
    canvas.lay(box(canvas.x, canvas.y - 0.36, 1.25, 0.22, 0.12), colour)
    for x in (-0.75, 0.75):
        canvas.lay(ellipse(canvas.x - x, canvas.y - 0.17, 0.19, 0.19), np.full(3, 0.06))
        canvas.lay(ellipse(canvas.x - x, canvas.y - 0.17, 0.1, 0.1), np.full(3, 0.5))
    return canvas.finish()


def rod(canvas: Canvas, start: tuple[float, float], end: tuple[float, float], radius: float) -> Field:
    """Return the distance from a line with round ends."""
    right, up = end[0] - start[0], end[1] - start[1]
    x, y = canvas.x - start[0], canvas.y - start[1]
    along = np.clip((x * right + y * up) / max(right * right + up * up, 1e-9), 0, 1)
    return np.hypot(x - along * right, y - along * up) - radius


def box(x: Field, y: Field, half_width: float, half_height: float, radius: float) -> Field:
    """Return the distance from a rectangle with round corners."""
    right, up = np.abs(x) - half_width + radius, np.abs(y) - half_height + radius
    return np.hypot(np.maximum(right, 0), np.maximum(up, 0)) + np.minimum(np.maximum(right, up), 0) - radius


def ellipse(x: Field, y: Field, half_width: float, half_height: float) -> Field:
    """Return about the distance from an ellipse; exact for a circle."""
    return (np.hypot(x / half_width, y / half_height) - 1) * min(half_width, half_height)
