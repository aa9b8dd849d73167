"""Pictures of a run as MLflow's charts show them: about 200 pixels wide, and whole on a click.

So small images are enlarged without smoothing, large ones reduced, and what is drawn has few and large letters. Which
pictures are shown is `picture_contents.py`'s matter. What can't be drawn is a line for the run's note and no error: the
verdict that the run tells of was reached without it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pipeline.errors import EvidenceError, NumericsError
from pipeline.records.digests import digest_file
from pipeline.report.pictures.images import DIFFERENCE_GAIN, JudgedImage, Picture, amplify_difference, read_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

MIN_SIDE, MAX_SIDE = 256, 512  # pixels of what is logged; a small image is enlarged to at least the former
_CAPTION_WIDTH = 34  # characters a line


class Shown(Protocol):
    """One picture of a run."""

    @property
    def key(self) -> str:
        """Name its chart."""

    @property
    def identity(self) -> list[str | None]:
        """Name what is shown and the content of its files; None where there is none."""

    def draw(self) -> Image:
        """Draw it.

        Raises:
            EvidenceError: a file is gone or damaged.
            NumericsError: it can't be drawn.
        """


@dataclass(frozen=True)
class ShownImage:
    """The image of a case as it is; or of two images, the reference's first, the difference.

    Attributes:
        key: names its chart.
        images: one or two.
        caption: of the difference: its case.
        gain: of the difference.
    """

    key: str
    images: tuple[JudgedImage, ...] = ()
    caption: str = ""
    gain: int = DIFFERENCE_GAIN

    @property
    def identity(self) -> list[str | None]:
        """Name what is shown and the content of its files; None where there is none."""
        return [self.key, self.caption, *digest_shown(image.path for image in self.images)]

    def draw(self) -> Image:
        """Draw it."""
        pictures = [read_image(image) for image in self.images]
        if len(pictures) == 2:
            return _draw_difference(pictures[0], pictures[1], self.caption, self.gain)
        return fit_size(pictures[0])


def digest_shown(files: Iterable[Path]) -> list[str | None]:
    """Return the digests of files; None where there is none."""
    return [digest_file(file) if file.is_file() else None for file in files]


def draw_pictures(shown: Sequence[Shown]) -> tuple[dict[str, Image], list[str]]:
    """Draw what is to be shown.

    Returns:
        The pictures by key, and a line for each that can't be drawn.
    """
    pictures, problems = {}, []
    for picture in shown:
        try:
            pictures[picture.key] = picture.draw()
        except (EvidenceError, NumericsError) as error:
            problems.append(f"{picture.key}: {error}")
    return pictures, problems


def fit_size(picture: Picture) -> Image:
    """Return an image that a chart shows well: enlarged by a whole factor, or reduced."""
    from PIL import Image

    image = Image.fromarray(picture)
    if max(image.size) > MAX_SIDE:
        image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
        return image
    factor = max(1, -(-MIN_SIDE // max(image.size)))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


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
    return render_figure(figure)


def render_figure(figure: Figure) -> Image:
    """Return what a figure shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
