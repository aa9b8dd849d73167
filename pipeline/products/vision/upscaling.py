"""Judge an enlarged picture against what it was made from, and look for seams where tiles meet.

A seam is a step between neighbouring columns or rows that the reference's picture, which has no tiles, has not at the
same place. So steps are measured in the difference between the two. The difference to the original would also hold
steps that the network makes there by chance: a grid lies on few lines, and sound tiles had a bias of levels. Each is
averaged with its sign along the edge that two tiles share, and made absolute then (`pipeline/numerics/seams.py`). From
the mean step at the stitches that at control lines of the same picture is taken: what another number format or network
does to every line cancels. Not covered: a line along a stitch that is as dark on its one side as on the other, which is
no step.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from pipeline.errors import EngineError
from pipeline.numerics.seams import boundary_steps, seam_excess
from pipeline.numerics.similarity import peak_signal_to_noise_db, structural_similarity
from pipeline.numerics.tile_grid import list_stitches
from pipeline.records.serving import Tiling

MAX_PSNR_DB = 100.0  # of equal pictures, whose ratio is infinite
_LEVELS = 255.0
# of an output that holds NaN or infinity: nothing can be measured, and no loss may hide behind that
_WORST = {"psnr_db": 0.0, "ssim": 0.0, "seam_levels": _LEVELS, "worst_seam_levels": _LEVELS}


def judge_picture(
    case_id: str,
    picture: Any,
    target: NDArray,
    given: NDArray,
    *,
    is_finite: bool,
    tiling: Tiling | None,
    whole: Any = None,
) -> dict[str, float]:
    """Return the scores of one enlarged picture.

    Args:
        case_id: for messages.
        picture: uint8 (rows, columns, 3), from the adapter.
        target: uint8, what it should be.
        given: uint8, what was enlarged.
        is_finite: whether all raw outputs are.
        tiling: how it was cut.
        whole: what the reference makes of the same, which seams are looked for beside; None: the target.

    Raises:
        EngineError: another shape or type than the target's.
    """
    _check_picture(case_id, picture, target)
    if not is_finite:
        return {"finite": 0.0, **_WORST}
    ours, wanted = (_to_unit(side) for side in (picture, torch.from_numpy(target)))
    beside = wanted
    if whole is not None:
        _check_picture(case_id, whole, target)
        beside = _to_unit(whole)
    psnr = peak_signal_to_noise_db(ours, wanted).clamp(max=MAX_PSNR_DB)
    return {
        "finite": 1.0,
        "psnr_db": float(psnr),
        "ssim": float(structural_similarity(ours, wanted)),
        "seam_levels": measure_seam_excess(ours, beside, given.shape[:2], tiling),
        "worst_seam_levels": measure_worst_stitch(ours, beside, given.shape[:2], tiling),
    }


def _check_picture(case_id: str, picture: Any, target: NDArray) -> None:
    if not isinstance(picture, torch.Tensor) or picture.dtype != torch.uint8 or tuple(picture.shape) != target.shape:
        came = (
            f"{picture.dtype} of shape {tuple(picture.shape)}"
            if isinstance(picture, torch.Tensor)
            else f"{type(picture).__name__!r}"
        )
        raise EngineError(
            f"case {case_id!r}: postprocess() returned {came}, expected a tensor of uint8 of the "
            f"target's shape {target.shape}; correct the adapter or the evalset"
        )


def measure_seam_excess(
    picture: torch.Tensor, beside: torch.Tensor, given: tuple[int, int], tiling: Tiling | None
) -> float:
    """Return by how much the mean step at stitches is above that at control lines, in grey levels of 255.

    Args:
        picture: (1, 3, rows, columns), in [0, 1].
        beside: the same without tiles.
        given: rows and columns of what was enlarged.
        tiling: how that was cut; None, or one tile for the picture, gives 0.
    """
    factor = picture.shape[2] // given[0]
    rows, columns = list_stitches(given, tiling, factor)
    return _LEVELS * float(seam_excess(picture, beside, columns, rows, period=factor))


def measure_worst_stitch(
    picture: torch.Tensor, beside: torch.Tensor, given: tuple[int, int], tiling: Tiling | None
) -> float:
    """Return the largest step at a single stitch, its channels' mean, in grey levels; arguments as of the mean.

    It is the step of the stitch that `pipeline/gate/seams.py` draws.
    """
    rows, columns = list_stitches(given, tiling, picture.shape[2] // given[0])
    if not rows and not columns:
        return 0.0
    steps = boundary_steps(picture - beside, columns, rows)  # (1, channels * stitches), stitch by stitch
    return _LEVELS * float(steps.view(-1, picture.shape[1]).mean(dim=1).max())


def _to_unit(pixels: torch.Tensor) -> torch.Tensor:
    """Return uint8 (rows, columns, 3) as float32 (1, 3, rows, columns) in [0, 1]."""
    return pixels.permute(2, 0, 1)[None].float() / _LEVELS
