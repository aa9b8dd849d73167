"""What a report shows, as objects that are built once and know no format; `markdown.py` writes them.

A paragraph is a str of Markdown, in which names and texts from elsewhere are escaped already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # else stage gate, which writes a case for GitHub, would import what compares
    from pipeline.gate.compare import ReleaseComparison


@dataclass(frozen=True)
class Table:
    """Rows of cells, the head first; the second row says how columns are aligned."""

    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Quote:
    """A text of somebody else, shown as it is."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A picture in a file beside the report.

    Attributes:
        name: of the file.
        caption: above it, on the page.
        description: in the place of the picture where there is none.
        draw: writes the file, also where there is nothing to show: whoever leaves it out decides that.
    """

    name: str
    caption: str
    description: str
    draw: Callable[[ReleaseComparison, Path], None]


@dataclass(frozen=True)
class Folded:
    """What unfolds below its title."""

    title: str
    blocks: Sequence[Block]


Block = str | Table | Quote | Figure | Folded


@dataclass(frozen=True)
class Section:
    """A part with a heading."""

    title: str
    blocks: Sequence[Block]
