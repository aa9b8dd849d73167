"""The pictures that cases of kinds `detection` and `upscaling` name: are they there, and are they what was sealed?

A case holds the digest of each of its pictures, so a picture that was saved again is noticed before it is judged as
the old one. `check_pictures` reads headers only, which takes milliseconds a picture; that all pixels can be decoded is
found out by `read_picture`, which an evaluation calls. More than 8 bits a channel are refused, and so is a picture that
is to be turned before it is shown, as EXIF can say: some programs turn it, others don't. Not covered: transparency
(what lies under it is shown).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EvalsetError
from pipeline.evalsets.cases import CASES_FILE, PICTURE_DIGESTS, Annotation, Case, DetectionCase
from pipeline.records.digests import digest_file

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

_DEEP_MODES = ("I", "F")  # how Pillow's names for more than 8 bits a channel start: "I", "I;16", "F"
# in Pillow's name for how pixels are stored that it cuts to 8 bits: "RGB;16B", "LA;16B"; "BGR;16" is 5 bits a channel
_DEEP_STORAGE = re.compile(r"\w+;16[BLN]")
_MIN_TARGET = 11  # pixels a side: the window of SSIM (numerics/similarity.py), which needs torch
_SHOWN = 12  # digits of a digest in messages
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, RuntimeError, struct.error)  # each format of Pillow has its own


def read_picture(path: Path, sha256: str) -> NDArray[np.uint8]:
    """Return the pixels of a picture, RGB; of grey, palettes and other colour spaces Pillow's conversion to it.

    Args:
        path: of a file in any format that Pillow reads.
        sha256: the digest of the file.

    Returns:
        uint8 (rows, columns, 3).

    Raises:
        EvalsetError: with the path: no such file, another digest, not a picture, a damaged one, one that is stored
            turned, or more than 8 bits a channel.
    """
    _check_digest(path, sha256)
    with _open(path) as picture:
        pixels = np.array(picture.convert("RGB"))
        _check_upright(path, picture)  # a PNG may say so after its pixels
        return pixels


def check_pictures(folder: Path, cases: Iterable[Case]) -> None:
    """Check that the pictures of an evalset are there, as sealed, and fit what their cases say of them.

    Args:
        folder: the evalset's.
        cases: all of the evalset, in the order of the file; those that name no picture pass.

    Raises:
        EvalsetError: with file, line and case: what `read_picture` raises but for damaged pixels, a box outside of its
            image, a target that is too small for SSIM, not a whole multiple of its image, or not the same one as on the
            first line.
    """
    first: int | None = None
    for number, case in enumerate(cases, start=1):
        try:
            sizes = {
                name: _measure(folder / getattr(case, name), getattr(case, digest))
                for name, digest in PICTURE_DIGESTS.items()
                if hasattr(case, name)
            }
            if isinstance(case, DetectionCase):
                _check_boxes(case.annotations, sizes["image"])
            if "target" in sizes:
                _check_large_enough(sizes["target"])
                factor = _find_factor(sizes["image"], sizes["target"])
                first = first or factor
                if factor != first:
                    raise EvalsetError(
                        f"expected a target of {first} times the image's sides, as of the cases before, "
                        f"got {factor} times"
                    )
        except EvalsetError as error:
            raise EvalsetError(f"{folder / CASES_FILE}:{number}: case {case.id!r}: {error}") from None


def measure_picture(path: Path) -> tuple[int, int]:
    """Return width and height in pixels, from the header.

    Raises:
        EvalsetError: no such file, not a picture, one that is stored turned, or more than 8 bits a channel.
    """
    with _open(path) as picture:
        _check_upright(path, picture)
        return picture.size


def _measure(path: Path, sha256: str) -> tuple[int, int]:
    _check_digest(path, sha256)
    return measure_picture(path)


def _check_digest(path: Path, sha256: str) -> None:
    try:
        digest = digest_file(path)
    except FileNotFoundError:
        raise EvalsetError(f"{path}: expected a picture, found no file") from None
    except OSError as error:
        raise EvalsetError(f"{path}: expected a picture, got: {error.strerror}") from None
    if digest != sha256:
        raise EvalsetError(
            f"{path}: expected sha256 {sha256[:_SHOWN]}, got {digest[:_SHOWN]}: the picture was changed; "
            "if it was meant to, seal the evalset again"
        )


@contextmanager
def _open(path: Path) -> Iterator[ImageFile]:
    """Open a picture; what Pillow raises while it is open becomes one line."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            if mode := _find_deep_mode(picture):
                raise EvalsetError(
                    f"{path}: expected 8 bits a channel, got Pillow's mode {mode!r}; convert the picture"
                )
            yield picture
    except Image.UnidentifiedImageError:
        raise EvalsetError(f"{path}: expected a picture, got a file in no format that Pillow reads") from None
    except (*_DAMAGE, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EvalsetError(f"{path}: expected a picture, got one that Pillow can't read: {reason}") from None


def _check_upright(path: Path, picture: ImageFile) -> None:
    from PIL import ExifTags
    from PIL.Image import Image

    if picture.format == "TIFF":  # which Pillow turns
        return
    orientation = Image.getexif(picture).get(ExifTags.Base.Orientation, 1)  # a PNG's own getexif decodes its pixels
    if orientation in range(2, 9):  # others say nothing
        raise EvalsetError(
            f"{path}: expected a picture that is stored upright, got EXIF orientation {orientation}; save it rotated "
            "(ImageOps.exif_transpose), or without EXIF where its boxes ignore that, as COCO's do"
        )


def _find_deep_mode(picture: ImageFile) -> str | None:
    """Return Pillow's name for pixels of more than 8 bits a channel, as they are stored; None where they have 8."""
    if picture.mode.startswith(_DEEP_MODES):
        return picture.mode
    stored = _DEEP_STORAGE.search(str(picture.tile))
    return stored.group() if stored else None


def _check_boxes(annotations: Iterable[Annotation], size: tuple[int, int]) -> None:
    for index, annotation in enumerate(annotations):
        if not all(
            low < side and low + extent > 0
            for low, extent, side in zip(annotation.bbox[:2], annotation.bbox[2:], size, strict=True)
        ):
            raise EvalsetError(
                f"annotations.{index}.bbox: expected left, top, width and height of a box in the image "
                f"of {size[0]} x {size[1]} pixels, got {list(annotation.bbox)}"
            )


def _check_large_enough(target: tuple[int, int]) -> None:
    if min(target) < _MIN_TARGET:
        raise EvalsetError(
            f"expected a target of at least {_MIN_TARGET} pixels a side, which SSIM looks at together, got "
            f"{target[0]} x {target[1]}; take a larger picture"
        )


def _find_factor(image: tuple[int, int], target: tuple[int, int]) -> int:
    """Return how many times as large a target's sides are."""
    factor = target[0] // image[0]
    if factor < 1 or target != (factor * image[0], factor * image[1]):
        raise EvalsetError(
            f"expected a target whose sides are a whole multiple of the image's {image[0]} x {image[1]} "
            f"pixels, got {target[0]} x {target[1]}"
        )
    return factor
