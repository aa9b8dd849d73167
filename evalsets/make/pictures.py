"""Draw the evalsets of pictures: their files, and the cases that name them.

Each picture has a seed of 128 bits from that of its evalset. Training draws from lists of small numbers, so no picture
is one that a network was trained on. An upscaler's input is made from its decoded target, so that it shows what the
target shows. The bytes are the same whatever instructions the processor has, as far as was tried on x86-64: the
arithmetic is float64, far finer than the 256 levels it is rounded to. Not covered: another version of NumPy or Pillow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from evalsets.make import panoramas, scenes
from pipeline.records.digests import digest_file
from pipeline.running.environment import count_cores

PERSON = 1  # COCO's category
CROP = (384, 256)  # width and height of an upscaler's target, in pixels
_FEW, _MOST = 0.25, 0.75  # shares of small people that bound the buckets

Cases = Iterator[dict[str, Any]]


def make_scenes(rng: Random, folder: Path, *, num: int) -> Cases:
    """Draw street scenes and the boxes of the people in them."""
    return _draw(_make_scene, rng, folder, num)


def _make_scene(seed: int, i: int, folder: Path) -> dict[str, Any]:
    scene = scenes.render(np.random.default_rng(seed))
    file = _place(folder, f"images/{i:03d}.jpg")
    # colours at full resolution: small people are found by theirs
    Image.fromarray(scene.pixels).save(file, quality=90, subsampling=0)
    people = [
        {"bbox": box.tolist(), "category_id": PERSON, "area": int(area)}
        for box, area in zip(scene.boxes, scene.areas, strict=True)
    ]
    return {
        "id": f"scene-{i:03d}",
        "cluster": f"scene-{i:03d}",
        "buckets": name_buckets(scene.areas),
        "image": f"images/{file.name}",
        "sha256": digest_file(file),
        "annotations": people,
    }


def name_buckets(areas: np.ndarray) -> list[str]:
    """Return the bucket of an image by how many of its people are small; none where there is nobody."""
    if not len(areas):
        return []
    share = float((areas <= scenes.SMALL_AREA).mean())
    return ["few_small" if share <= _FEW else "mostly_small" if share >= _MOST else "some_small"]


def make_panoramas(rng: Random, folder: Path, *, num: int) -> Cases:
    """Draw parts of panoramas, each of another one, and their inputs."""
    return _draw(_make_panorama, rng, folder, num)


def _make_panorama(seed: int, i: int, folder: Path) -> dict[str, Any]:
    drawn = np.random.default_rng(seed)
    left, top = drawn.integers(0, [panoramas.WIDTH - CROP[0] + 1, panoramas.HEIGHT - CROP[1] + 1])
    pixels = panoramas.render(drawn)[top : top + CROP[1], left : left + CROP[0]]
    target, image = _place(folder, f"targets/{i:02d}.jpg"), _place(folder, f"images/{i:02d}.png")
    Image.fromarray(pixels).save(target, quality=95, subsampling=0)
    with Image.open(target) as truth:
        Image.fromarray(panoramas.shrink(np.asarray(truth), drawn)).save(image, optimize=True)
    return {
        "id": f"panorama-{i:02d}",
        "cluster": f"panorama-{i:02d}",
        "buckets": [],
        "image": f"images/{image.name}",
        "sha256": digest_file(image),
        "target": f"targets/{target.name}",
        "target_sha256": digest_file(target),
    }


def _draw(make: Callable[[int, int, Path], dict[str, Any]], rng: Random, folder: Path, num: int) -> Cases:
    """Make so many pictures, one a core at once, each of a seed of its own."""
    seeds = [rng.getrandbits(128) for _ in range(num)]
    with ProcessPoolExecutor(count_cores()) as pool:
        yield from pool.map(make, seeds, range(num), repeat(folder))


def _place(folder: Path, name: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    return folder / name
