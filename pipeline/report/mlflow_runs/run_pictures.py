"""Draw the images of one run for MLflow, whose charts show them about 200 pixels wide and whole on a click.

So small images are enlarged without smoothing, large ones reduced, and what is drawn has few and large letters. Which
images are shown is `image_contents.py`'s matter. What can't be drawn is a line for the run's note and no error: the
verdict that the run tells of was reached without it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import EvidenceError, NumericsError
from pipeline.products.vision.show.boxes import draw_boxes, find_lost
from pipeline.products.vision.show.runs import ShownBoxes, ShownStitch
from pipeline.products.vision.show.seams import SEAM_GAIN, cut_strip
from pipeline.report.mlflow_runs.image_contents import Shown
from pipeline.report.pictures.images import (
    AMPLE,
    LEAST_BITS,
    MOST_BITS,
    SCARCE,
    SCARCE_BITS,
    Picture,
    amplify_difference,
    list_scarcest,
    measure_given,
    read_given,
    read_image,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

MIN_SIDE, MAX_SIDE = 256, 512  # pixels of what is logged; a small image is enlarged to at least the former
_BOLDNESS = 2  # of boxes, which must show in a small picture
_GAP = 4  # pixels between the parts of a strip
_MODULES_SHOWN = 6
_CAPTION_WIDTH = 34  # characters a line


def draw_pictures(shown: Iterable[Shown]) -> tuple[dict[str, Image], list[str]]:
    """Draw what is to be shown.

    Returns:
        The pictures by key, and a line for each that can't be drawn.
    """
    pictures, problems = {}, []
    for image in shown:
        try:
            pictures[image.key] = _draw(image)
        except (EvidenceError, NumericsError) as error:
            problems.append(f"{image.key}: {error}")
    return pictures, problems


def _draw(shown: Shown) -> Image:
    if isinstance(shown, ShownBoxes):
        found = shown.candidate.read()
        lost = find_lost(shown.reference.read(), found)
        return fit_size(draw_boxes(read_given(shown.candidate.record), found, lost, boldness=_BOLDNESS))
    if isinstance(shown, ShownStitch):
        return _draw_stitch(shown)
    if shown.notes is not None:
        return _draw_headroom(_read_scarcest(shown.notes))
    pictures = [read_image(image) for image in shown.images]
    if len(pictures) == 2:
        return _draw_difference(pictures[0], pictures[1], shown.caption, shown.gain)
    return fit_size(pictures[0])


def fit_size(picture: Picture) -> Image:
    """Return an image that a chart shows well: enlarged by a whole factor, or reduced."""
    from PIL import Image

    image = Image.fromarray(picture)
    if max(image.size) > MAX_SIDE:
        image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
        return image
    factor = max(1, -(-MIN_SIDE // max(image.size)))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _draw_stitch(shown: ShownStitch) -> Image:
    """Draw a stitch of reference and candidate and the difference side by side, enlarged, with white between them."""
    ours, theirs = map(read_image, shown.images)
    strip = cut_strip(ours, theirs, measure_given(shown.record), shown.tiling)
    if strip is None:
        raise EvidenceError(f"{shown.images[1].path}: the picture is not cut into tiles")
    parts = (strip.reference, strip.candidate, amplify_difference(strip.reference, strip.candidate, SEAM_GAIN))
    gap = np.full((parts[0].shape[0], _GAP, 3), 255, dtype=np.uint8)
    return fit_size(np.concatenate([parts[0], gap, parts[1], gap, parts[2]], axis=1))


def _draw_difference(ours: Picture, theirs: Picture, caption: str, gain: int) -> Image:
    """Draw a difference with its case, as each run shows another one, and its size, as a small one is all black."""
    from matplotlib.figure import Figure

    difference = amplify_difference(ours, theirs, gain)
    largest = int(np.abs(ours.astype(int) - theirs.astype(int)).max())
    figure = Figure(figsize=(4, 4), dpi=100, layout="constrained")
    axis = figure.subplots()
    axis.imshow(difference, interpolation="nearest")
    axis.set_axis_off()
    lines = [*textwrap.wrap(caption, _CAPTION_WIDTH)[:2], f"at most {largest} of 255 levels"]
    axis.set_title("\n".join(lines), fontsize=15, parse_math=False)
    return _render(figure)


def _read_scarcest(notes: Path) -> list[tuple[str, float]]:
    try:
        return list_scarcest(json.loads(notes.read_text(encoding="utf-8"))["decoder"], limit=_MODULES_SHOWN)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvidenceError(
            f"{notes}: expected the ranges of a decoder's modules, got {type(error).__name__} while "
            "reading them; run `dvc repro`"
        ) from None


def _draw_headroom(scarcest: Sequence[tuple[str, float]]) -> Image:
    """Draw how often the largest activation can double under float16's largest number, worst modules first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), dpi=100, layout="constrained")
    axis = figure.subplots()
    axis.barh(
        range(len(scarcest)),
        [bits for _, bits in scarcest],
        height=0.9,
        alpha=0.55,
        color=[SCARCE if bits < SCARCE_BITS else AMPLE for _, bits in scarcest],
    )
    for height, (name, _) in enumerate(scarcest):
        axis.text(LEAST_BITS + 0.3, height, name, va="center", fontsize=14, parse_math=False)
    axis.axvline(0, color="#000000", linewidth=1)
    axis.set_xlim(LEAST_BITS, MOST_BITS)
    axis.set_ylim(_MODULES_SHOWN - 0.4, -0.6)
    axis.set_yticks([])
    axis.set_title(f"doublings left in float16\n(orange: under {SCARCE_BITS:g}, or it overflowed)", fontsize=14)
    axis.tick_params(axis="x", labelsize=13)
    return _render(figure)


def _render(figure: Figure) -> Image:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
