"""Is there a step where tiles were stitched? Steps at the stitches against steps elsewhere in the same images.

A seam runs along a whole column (or row), with one sign; what a picture shows there changes sign from row to
row. So steps are averaged with their sign along the boundary first, and only then made absolute: a seam of two
grey levels stands out that a mean of absolute steps buries under texture. One image proves little, since a
straight edge in it looks like a seam: pool over a set that shares its tile grid, and gate on that.

Give full-size output of the path that ships. A decoder that upsamples has a pattern of its own every few
pixels, and tile boundaries always fall on the same phase of it: `period` takes controls of that phase only.
In `measure_seams` a seam that changes sign along the boundary cancels, in `boundary_steps` only within one edge of a
tile. Repeated content is not covered.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pipeline.errors import NumericsError
from pipeline.numerics.images import check_images

_SIGMA_PER_MAD = 1.4826  # of a normal distribution
_STEP_FLOOR = 0.05 / 255  # an image without texture has no deviation to measure by: a twentieth of a grey level
_POOLED_FLOOR = 0.01  # the same for pooled scores: what 10,000 images would leave
_MAX_SCORE = 10.0  # one image with an edge along a boundary must not decide for the set
_MIN_CONTROLS = 16


@dataclass(frozen=True)
class SeamStatistics:
    """Steps at the tile boundaries of a set of images, against control positions of the same images."""

    seam_ratio: float  # mean absolute step at seams over that at controls; 1 without seams
    z: float  # robust score of all seams together
    max_z: float  # of the worst boundary
    seam_step: float  # mean absolute step at seams, in units of the images; times 255 for grey levels
    num_seams: int
    num_controls: int
    num_images: int


def signed_steps(images: torch.Tensor, *, along: Literal["columns", "rows"] = "columns") -> torch.Tensor:
    """Return the mean signed step across each boundary between neighbouring columns, or rows.

    Args:
        images: shape (n, channels, height, width), in [0, 1].
        along: "columns" for boundaries that stand between columns, "rows" for those that lie between rows.

    Returns:
        float64 of shape (n, width - 1) or (n, height - 1): entry x - 1 is the step into pixel x, averaged over
        channels and the boundary's length. Batches of one width can be concatenated.

    Raises:
        NumericsError: not a batch of images, or NaN or infinity in it.
    """
    check_images(images, "seams")
    return images.double().mean(dim=(1, 2) if along == "columns" else (1, 3)).diff(dim=1)


def boundary_steps(
    images: torch.Tensor,
    columns: Sequence[int],
    rows: Sequence[int],
    *,
    cuts: tuple[Sequence[int], Sequence[int]] | None = None,
) -> torch.Tensor:
    """Return the absolute step between each two neighbouring tiles, in each channel.

    A step is averaged with its sign along the edge that two tiles share, which takes the picture's own detail out, and
    only there: tiles that are brighter and darker in turn, as on a chessboard, must not cancel along the whole image,
    and neither must colours.

    Args:
        images: shape (n, channels, height, width), in [0, 1], or differences of such.
        columns: x where a boundary lies between pixel x - 1 and x.
        rows: y likewise.
        cuts: columns and rows at which edges end, where they are not the boundaries. A shorter edge has a larger mean
            step by chance alone, so control lines are to be cut as boundaries are.

    Returns:
        float64 of shape (n, channels * number of edges), in units of the images.

    Raises:
        NumericsError: not a batch of images, or NaN or infinity in it.
    """
    check_images(images, "seams")
    cut_columns, cut_rows = cuts or (columns, rows)
    steps = []
    for pixels, places, crossing in ((images, columns, cut_rows), (images.transpose(2, 3), rows, cut_columns)):
        ends = [0, *crossing, pixels.shape[2]]
        for x in places:
            across = pixels[..., x].double() - pixels[..., x - 1].double()  # (n, channels, length)
            steps += [across[..., i:j].mean(dim=2).abs() for i, j in itertools.pairwise(ends)]
    return torch.cat(steps, dim=1)


def seam_excess(
    images: torch.Tensor, beside: torch.Tensor, columns: Sequence[int], rows: Sequence[int], *, period: int = 1
) -> torch.Tensor:
    """Return by how much the mean step at stitches is above that at control lines of the same images.

    Steps are those of the difference to the same images in one piece, not those of each side made absolute: where the
    picture has an edge of its own, a seam may make it smaller. What is done to every line, tiled or not, cancels.

    Args:
        images: shape (n, channels, height, width), in [0, 1].
        beside: the same without tiles.
        columns: x where tiles meet, between pixel x - 1 and x.
        rows: y likewise.
        period: pixels of the output per pixel of what was cut into tiles; control lines are on its multiples.

    Returns:
        float64 of shape (n,), in units of the images; 0 where no tiles meet.

    Raises:
        NumericsError: not a batch of images, or NaN or infinity in it.
    """
    if not columns and not rows:
        return torch.zeros(len(images), dtype=torch.float64)
    controls = _list_between(columns, images.shape[3], period), _list_between(rows, images.shape[2], period)
    at_stitches, at_controls = (
        boundary_steps(images - beside, *lines, cuts=(columns, rows)).mean(dim=1)
        for lines in ((columns, rows), controls)
    )
    return at_stitches - at_controls


def _list_between(stitches: Sequence[int], size: int, period: int) -> list[int]:
    """Return lines half way between stitches, and between the outermost and the edge."""
    ends = [0, *stitches, size] if stitches else []
    return [(low + high) // 2 // period * period for low, high in itertools.pairwise(ends)]


def measure_seams(steps: torch.Tensor, boundaries: Sequence[int], *, period: int = 1, guard: int = 1) -> SeamStatistics:
    """Compare the steps at tile boundaries with those at control positions.

    Each absolute step becomes a robust score within its image: less the median of the image's controls, over
    their scaled median absolute deviation. Scores are averaged over the images, position by position, and the
    boundaries' averages are scored against the controls' in the same way.

    Args:
        steps: from `signed_steps`, shape (n, positions); all images share the grid.
        boundaries: x where a tile boundary lies between pixel x - 1 and x.
        period: pixels per latent pixel; controls are taken from the boundaries' phases only.
        guard: positions on each side of a boundary that are no controls; at least half an overlap if blended.

    Raises:
        NumericsError: no boundary, one outside the image, or fewer than 16 controls left.
    """
    seams, controls = _choose_positions(steps.shape[1], boundaries, period, guard)
    absolute = steps.double().abs()
    scores = _score(absolute, absolute[:, controls], _STEP_FLOOR).clamp(max=_MAX_SCORE).mean(dim=0, keepdim=True)
    pooled = _score(scores, scores[:, controls], _POOLED_FLOOR)[0, seams]
    at_seams, at_controls = absolute[:, seams].mean().item(), absolute[:, controls].mean().item()
    ratio = at_seams / at_controls if at_controls > 0 else (1.0 if at_seams == 0 else float("inf"))
    return SeamStatistics(
        ratio, pooled.mean().item(), pooled.max().item(), at_seams, len(seams), len(controls), len(steps)
    )


def _choose_positions(
    num_steps: int, boundaries: Sequence[int], period: int, guard: int
) -> tuple[list[int], list[int]]:
    """Return the indices of steps at seams and at controls."""
    seams = sorted({x - 1 for x in boundaries})
    if not seams or seams[0] < 0 or seams[-1] >= num_steps:
        raise NumericsError(
            f"seams: expected boundaries from 1 to {num_steps}, got {list(boundaries)!r}; pass those of this image size"
        )
    phases, near = {x % period for x in seams}, {x + i for x in seams for i in range(-guard, guard + 1)}
    controls = [x for x in range(num_steps) if x % period in phases and x not in near]
    if len(controls) < _MIN_CONTROLS:
        raise NumericsError(
            f"seams: expected at least {_MIN_CONTROLS} control positions, found {len(controls)} among "
            f"{num_steps} steps with period {period} and guard {guard}; use larger images"
        )
    return seams, controls


def _score(values: torch.Tensor, controls: torch.Tensor, floor: float) -> torch.Tensor:
    """Return values in robust deviations from the median of the controls, row by row."""
    median = controls.median(dim=1, keepdim=True).values
    deviation = _SIGMA_PER_MAD * (controls - median).abs().median(dim=1, keepdim=True).values
    return (values - median) / deviation.clamp(min=floor)
