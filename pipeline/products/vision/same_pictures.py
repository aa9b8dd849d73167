"""Refuse a picture that is there twice, however it was saved: as two cases, or to calibrate on and to be judged on.

What counts are the pixels. A copy with other metadata or of another compression is no further case. The digests of
pixels are kept in build/env/pixels.json by those of the files: to decode 5,000 photos takes most of a minute. The file
grows with each new picture, and is safe to delete. Not covered: pictures that are nearly the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.errors import EvalsetError, SettingsError
from pipeline.evalsets.cards import Evalset
from pipeline.evalsets.cases import CASES_FILE, DetectionCase, UpscalingCase
from pipeline.evalsets.checks import name_others
from pipeline.evalsets.pictures import read_picture
from pipeline.records.digests import digest_bytes, digest_json
from pipeline.records.files import write_text
from pipeline.running.environment import count_cores
from pipeline.running.kept_digests import read_kept
from pipeline.settings.base import ENV

KEPT = ENV / "pixels.json"
_DECODERS = ("libjpeg_turbo", "jpg", "jpg_2000", "webp", "libtiff", "avif")  # whose pixels may differ by a release


def check_distinct(folder: Path, cases: Sequence[DetectionCase | UpscalingCase], root: Path) -> None:
    """Refuse a picture that two cases show.

    Args:
        folder: of the evalset.
        cases: all of it, in the order of the file.
        root: of the project.

    Raises:
        EvalsetError: with file and line, the second of them; or a picture's pixels are damaged.
    """
    path, shown = folder / CASES_FILE, _digest_pixels(folder, cases, root)
    seen: dict[str, int] = {}
    for number, (case, digest) in enumerate(zip(cases, shown, strict=True), start=1):
        if (first := seen.setdefault(digest, number)) != number:
            raise EvalsetError(
                f"{path}:{number}: case {case.id!r} shows the same picture as the case on line {first}; "
                f"every picture may count once, however its file was saved: remove one{name_others(shown)}"
            )


def check_apart(where: str, folder: Path, calibration: Evalset, judged: Mapping[Path, Evalset], root: Path) -> None:
    """Refuse pictures to calibrate on that are evaluated on: what is fitted to them looks better than it is.

    Args:
        where: the setting of the calibration pictures.
        folder: of them.
        calibration: their evalset.
        judged: the evals' evalsets, by folder.
        root: of the project.

    Raises:
        SettingsError: both show a picture.
        EvalsetError: a picture's pixels are damaged.
    """
    fitted = set(_digest_pixels(folder, calibration.cases, root))
    for home, evalset in judged.items():
        pairs = zip(evalset.cases, _digest_pixels(home, evalset.cases, root), strict=True)
        if shared := [case.id for case, digest in pairs if digest in fitted]:
            raise SettingsError(
                f"{where}: expected pictures that no eval shows, got {len(shared)} of evalset "
                f"{evalset.card.name!r}, {shared[0]!r} first; what is fitted to them looks better than it is"
            )


def _digest_pixels(folder: Path, cases: Sequence[DetectionCase | UpscalingCase], root: Path) -> list[str]:
    """Return a digest of what each case shows, equal where all pixels are."""
    decoder = _name_decoder()
    keys = [f"{case.sha256} {decoder}" for case in cases]
    kept = {key: digest for key, digest in read_kept(root / KEPT).items() if isinstance(digest, str)}
    missing = {key: number for number, key in enumerate(keys) if key not in kept}
    try:
        with ThreadPoolExecutor(count_cores()) as pool:
            kept.update(zip(missing, pool.map(lambda i: _digest(folder, i, cases[i]), missing.values()), strict=True))
    finally:  # what was decoded before a damaged one is not decoded again
        if missing:
            own = {key: digest for key, digest in kept.items() if key.endswith(decoder)}
            with contextlib.suppress(OSError):
                write_text(root / KEPT, json.dumps(own, indent=0))
    return [kept[key] for key in keys]


def _digest(folder: Path, number: int, case: DetectionCase | UpscalingCase) -> str:
    try:
        pixels = read_picture(folder / case.image, case.sha256)
    except EvalsetError as error:
        raise EvalsetError(f"{folder / CASES_FILE}:{number + 1}: case {case.id!r}: {error}") from None
    return digest_json([pixels.shape, digest_bytes(pixels.tobytes())])


def _name_decoder() -> str:
    """Return what turns files into pixels: another one may round otherwise."""
    import PIL
    from PIL import features

    versions = {library: features.version(library) for library in _DECODERS}
    return f"Pillow {PIL.__version__} {' '.join(f'{library} {version}' for library, version in versions.items())}"
