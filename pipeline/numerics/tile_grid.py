"""Where tiles lie along a side, and where two of them meet.

Tiles are spread evenly, so that neighbours overlap alike and at least as much as asked. Free of torch: the gate asks
here which pictures were cut. What is done with the tiles is `pipeline/numerics/tiling.py`'s.
"""

from __future__ import annotations

import math

from pipeline.errors import NumericsError
from pipeline.records.serving import Tiling


def place_tiles(size: int, tile: int, overlap: int) -> list[int]:
    """Return where tiles begin along one dimension, so that they cover it and overlap by at least the overlap.

    Args:
        size: of the dimension, in latent pixels.
        tile: of a tile; one that is larger than the dimension is cut to it.
        overlap: of neighbours, at most half a tile.

    Raises:
        NumericsError: a size below 1, or an overlap out of range.
    """
    if size < 1 or tile < 1 or not 0 <= overlap <= tile // 2:
        raise NumericsError(
            f"tiles: expected sizes from 1 and an overlap from 0 to half a tile, got size {size}, "
            f"tile {tile}, tile_overlap {overlap} latent pixels"
        )
    if tile >= size:
        return [0]
    num_gaps = math.ceil((size - tile) / (tile - overlap))
    return [round(i * (size - tile) / num_gaps) for i in range(num_gaps + 1)]


def find_stitches(size: int, tile: int, overlap: int, *, factor: int = 1) -> list[int]:
    """Return the middle of each overlap along one dimension, in pixels of the output.

    A stitch at x lies between pixel x - 1 and pixel x: what `seams` takes as a boundary.

    Args:
        size: of the dimension, in latent pixels.
        tile: of a tile.
        overlap: of neighbours.
        factor: output pixels per latent pixel.
    """
    starts = place_tiles(size, tile, overlap)
    return [(previous + tile + start) * factor // 2 for previous, start in zip(starts, starts[1:], strict=False)]


def list_stitches(given: tuple[int, int], tiling: Tiling | None, factor: int) -> tuple[list[int], list[int]]:
    """Return the rows and columns of an output at which tiles meet, from the size of what was enlarged."""
    if tiling is None:
        return [], []
    rows, columns = (find_stitches(size, tiling.tile, tiling.overlap_pixels, factor=factor) for size in given)
    return rows, columns
