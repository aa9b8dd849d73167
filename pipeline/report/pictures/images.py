"""What the pictures of the report and of MLflow have in common: one image, and two of them compared.

An image is read with the digest that its record holds, so that no other one is shown in its place. Covers neither
which images are shown nor where they end up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EvidenceError
from pipeline.records.digests import digest_pixels
from pipeline.records.evaluations import CaseRecord

if TYPE_CHECKING:
    from PIL.Image import Image

DIFFERENCE_GAIN = 4  # differences are too small to see as they are
LARGEST_SHOWN = 256  # pixels a side; of a larger picture the region is shown that differs most
CROP = 160  # pixels a side of that region

Picture = NDArray[np.uint8]  # (height, width, 3)


@dataclass(frozen=True)
class JudgedImage:
    """Where the image of a case lies, and the digest of the pixels that were judged."""

    path: Path
    pixels: str


def locate_image(folder: Path, eval_name: str, record: CaseRecord) -> JudgedImage:
    """Return the image of a record in a candidate's evaluation folder."""
    return JudgedImage(folder / eval_name / f"{record.case_id}.png", record.output)


def read_image(image: JudgedImage) -> Picture:
    """Return the pixels of an image.

    Raises:
        EvidenceError: no file, no image, or other pixels than those that were judged.
    """
    with _open(image.path) as opened:
        picture = np.asarray(opened.convert("RGB"))
    if digest_pixels(picture) != image.pixels:
        raise EvidenceError(f"{image.path}: expected the image that was judged, got other pixels; run `dvc repro`")
    return picture


def read_given(record: CaseRecord) -> Picture:
    """Return the pixels of the picture that a network was given, whose path from the project root a record holds.

    A record holds no digest of it: it is shown as it is now.

    Raises:
        EvidenceError: no file, or no image.
    """
    with _open(Path(record.prompt)) as opened:
        return np.asarray(opened.convert("RGB"))


def measure_given(record: CaseRecord) -> tuple[int, int]:
    """Return rows and columns of the picture that a network was given, from its header.

    Raises:
        EvidenceError: no file, or no image.
    """
    with _open(Path(record.prompt)) as opened:
        return opened.height, opened.width


@contextmanager
def _open(path: Path) -> Iterator[Image]:
    """Open an image; what Pillow raises while it is open becomes one line."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            yield opened
    except FileNotFoundError:
        raise EvidenceError(f"{path}: expected an image, found no file; run `dvc repro`") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # how Pillow says "broken"
        raise EvidenceError(
            f"{path}: expected an image, got {type(error).__name__} while reading it; run `dvc repro`"
        ) from None


def amplify_difference(ours: Picture, theirs: Picture, gain: int = DIFFERENCE_GAIN) -> Picture:
    """Return by how much each colour differs, times a gain, cut off at white.

    Raises:
        EvidenceError: the images differ in size.
    """
    if ours.shape != theirs.shape:
        raise EvidenceError(
            f"difference: expected images of one size, got {ours.shape[1]} x {ours.shape[0]} and "
            f"{theirs.shape[1]} x {theirs.shape[0]} pixels"
        )
    gap = np.abs(ours.astype(int) - theirs.astype(int)) * gain
    return np.clip(gap, 0, 255).astype(np.uint8)


def crop_most_different(ours: Picture, theirs: Picture) -> tuple[Picture, Picture]:
    """Return the same region of both, in which they differ most; all of them where they are small.

    Raises:
        EvidenceError: the images differ in size.
    """
    if max(ours.shape[:2]) <= LARGEST_SHOWN and ours.shape == theirs.shape:
        return ours, theirs
    sums = np.pad(amplify_difference(ours, theirs, 1).sum(axis=2, dtype=np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    rows, columns = (min(CROP, side) for side in ours.shape[:2])
    regions = sums[rows:, columns:] - sums[:-rows, columns:] - sums[rows:, :-columns] + sums[:-rows, :-columns]
    top, left = divmod(int(regions.argmax()), regions.shape[1])
    where = slice(top, top + rows), slice(left, left + columns)
    return ours[where], theirs[where]
