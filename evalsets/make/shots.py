"""Product shots: a small world of pictures, from which the image models' data and prompts are made.

A shot is one object in one colour, glossy or matte, before a white or a grey background, lit from
above with a soft shadow. What a shot is about is in its caption; where the object stands, how large
it is and where the light comes from is drawn. White backgrounds and lit colours stop short of 1, and
only highlights go over 0.97: a picture that a sampler pushes beyond what it was shown has more pixels there.
Not covered: scenes, textures, text, several objects.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

SIZE = 64  # pixels a side
SHAPES = ("ball", "box", "ring", "mug", "bottle", "vase")
COLOURS: dict[str, tuple[float, float, float]] = {  # RGB in [0, 1] where the light falls fully
    "red": (0.93, 0.09, 0.11),
    "orange": (0.94, 0.49, 0.05),
    "yellow": (0.94, 0.85, 0.08),
    "green": (0.08, 0.72, 0.22),
    "teal": (0.05, 0.74, 0.80),
    "blue": (0.09, 0.25, 0.93),
    "purple": (0.56, 0.12, 0.86),
    "pink": (0.94, 0.38, 0.68),
}
FINISHES = ("glossy", "matte")
BACKGROUNDS = {"white": 0.94, "grey": 0.52}  # level in [0, 1], the same in all three channels

_OVERSAMPLING = 2  # a pixel is the mean of this many by this many samples
_BEVEL = {"ball": 0.56, "box": 0.14, "ring": 0.19, "mug": 0.30, "bottle": 0.24, "vase": 0.34}  # width of the round edge

Field = np.ndarray  # float64 (rows, columns)


@dataclass(frozen=True)
class Shot:
    """What a picture shows; each field is a word of its caption."""

    shape: str
    colour: str
    finish: str
    background: str


def all_shots() -> list[Shot]:
    """Return every shot there is, in a fixed order."""
    return [Shot(*words) for words in itertools.product(SHAPES, COLOURS, FINISHES, BACKGROUNDS)]


def caption(shot: Shot) -> str:
    """Return the words that name a shot and no other."""
    return f"a {shot.finish} {shot.colour} {shot.shape} on a {shot.background} background"


def buckets(shot: Shot) -> list[str]:
    """Return the groups that a shot is counted in: one for each of its words."""
    return [f"{name}/{getattr(shot, name)}" for name in ("shape", "colour", "finish", "background")]


def render(shot: Shot, rng: np.random.Generator, *, size: int = SIZE) -> np.ndarray:
    """Draw a shot from where the generator puts the object and the light.

    Returns:
        uint8 (size, size, 3), RGB.
    """
    centre, angle = rng.uniform(-0.08, 0.08, size=2), rng.uniform(-0.15, 0.15)
    scale, light = rng.uniform(0.92, 1.15), _light(rng)
    x, y = _grid(size)
    background = _background(x, y, BACKGROUNDS[shot.background] + rng.uniform(-0.012, 0.012), centre, scale)
    across, up = (x - centre[0]) / scale, (y - centre[1]) / scale
    distance = _distance(
        shot.shape, across * np.cos(angle) + up * np.sin(angle), up * np.cos(angle) - across * np.sin(angle)
    )
    colour = _shade(shot, _normals(distance, _BEVEL[shot.shape]), light)
    inside = np.clip(0.5 - distance * scale / (x[0, 1] - x[0, 0]), 0, 1)[..., None]
    samples = inside * colour + (1 - inside) * background[..., None]
    pixels = samples.reshape(size, _OVERSAMPLING, size, _OVERSAMPLING, 3).mean(axis=(1, 3))
    return np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)


def _grid(size: int) -> tuple[Field, Field]:
    """Return x to the right and y upwards, both from -1 to 1, at the centres of the samples."""
    num = size * _OVERSAMPLING
    axis = (np.arange(num) + 0.5) / num * 2 - 1
    return np.meshgrid(axis, -axis)


def _light(rng: np.random.Generator) -> np.ndarray:
    """Draw the unit vector towards the lamp: above, in front, to the left or right."""
    direction = np.array([rng.uniform(-0.55, 0.55), rng.uniform(0.45, 0.75), 1.0])
    return direction / np.linalg.norm(direction)


def _background(x: Field, y: Field, level: float, centre: np.ndarray, scale: float) -> Field:
    """Return the backdrop, a little brighter above, with the object's shadow on its floor."""
    right, up = (x - centre[0]) / (0.62 * scale), (y - centre[1] + 0.60 * scale) / (0.16 * scale)
    return (level + 0.012 * y) * (1 - 0.38 * np.exp(-(right**2 + up**2)))


def _distance(shape: str, x: Field, y: Field) -> Field:
    """Return about how far a point is from the outline of a shape, negative inside."""
    if shape == "ball":
        return np.hypot(x, y) - 0.56
    if shape == "box":
        return _box(x, y, 0.52, 0.46, 0.08)
    if shape == "ring":
        return np.abs(np.hypot(x, y) - 0.40) - 0.19
    if shape == "mug":
        handle = np.abs(np.hypot(x - 0.36, y) - 0.23) - 0.07
        return np.minimum(_box(x + 0.10, y, 0.36, 0.46, 0.10), handle)
    if shape == "bottle":
        return np.minimum(_box(x, y + 0.18, 0.27, 0.42, 0.16), _box(x, y - 0.36, 0.11, 0.34, 0.04))
    width = 0.28 + 0.17 * np.cos((y + 0.18) * 4.2)  # the vase: wide below, a neck, a lip
    return np.maximum((np.abs(x) - width) * 0.8, np.abs(y) - 0.58)


def _box(x: Field, y: Field, half_width: float, half_height: float, radius: float) -> Field:
    right, up = np.abs(x) - half_width + radius, np.abs(y) - half_height + radius
    return np.hypot(np.maximum(right, 0), np.maximum(up, 0)) + np.minimum(np.maximum(right, up), 0) - radius


def _normals(distance: Field, bevel: float) -> np.ndarray:
    """Return the surface's unit normals, (rows, columns, 3): a quarter round from the outline inwards, then flat."""
    down, right = np.gradient(distance)
    slope = np.clip(1 + distance / bevel, 0, 1) / np.maximum(np.hypot(down, right), 1e-9)
    x, y = right * slope, -down * slope
    return np.stack([x, y, np.sqrt(np.clip(1 - x**2 - y**2, 0, 1))], axis=-1)


def _shade(shot: Shot, normals: np.ndarray, light: np.ndarray) -> np.ndarray:
    """Return the object's colour under the light: diffuse, and a white highlight where it is glossy (Blinn, 1977)."""
    is_glossy = shot.finish == "glossy"
    ambient = 0.34 if is_glossy else 0.58
    diffuse = ambient + (1 - ambient) * np.clip(normals @ light, 0, 1)
    colour = np.array(COLOURS[shot.colour]) * diffuse[..., None]
    if not is_glossy:
        return colour
    halfway = light + np.array([0.0, 0.0, 1.0])
    highlight = np.clip(normals @ (halfway / np.linalg.norm(halfway)), 0, 1) ** 30
    return colour + (1 - colour) * highlight[..., None]
