"""Do two ways of running one network give the same but for rounding, and how far apart may rounding take them?

    differences = differ(ours.run(x), theirs.run(x))
    limits = limit_rounding(exact, pixels, torch.bfloat16, len(differences))

Outputs are compared channel by channel, as a score in [0, 1] may stand beside a coordinate in pixels. Each channel
counts by its largest difference, in units of its standard deviation. In 16 bits no fixed limit says what is rounding:
where large values cancel in a layer, or a channel's values lie far from zero, one rounding is a large part of a
deviation. So the limit is measured. The float32 network is run again with its weights, its input and what each of its
modules returns rounded to the number format, which is what storing them in it does (Higham and Pranesh 2019,
"Simulating low precision floating-point arithmetic", SIAM J. Sci. Comput. 41(5), doi:10.1137/19M1251308). Two runs in
the format, which round at other places, lie about as far from float32 as that one each, hence at most twice as far from
each other, and less from float32. The fixed limit of `pipeline/running/timing.py` holds where it is larger, and in
float32. On a GPU convolutions take float32 for TF32: there its limit is measured by rounding to that.

What is covered by twice that rounding is not seen as a difference. Not rounded: what a module computes inside without
other modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map

from pipeline.products.vision.loading import Network, list_tensors
from pipeline.running.timing import compare_outputs, find_tolerance, is_tensor_float

Floats = NDArray[np.float64]

_NUM_RUNS = 2  # in the format, that are compared: each deviates from float32 by itself


def differ(ours: Any, theirs: Any) -> Floats:
    """Return the largest difference in each channel of each output tensor, in units of its standard deviation.

    NaN where one is not finite; infinity alone where the two sides differ in their number or shapes, as of boxes that
    the module itself selects.
    """
    a, b = ([tensor.float() for tensor in list_tensors(side)] for side in (ours, theirs))
    if [x.shape for x in a] != [y.shape for y in b]:
        return np.array([np.inf])
    differences = [difference for x, y in zip(a, b, strict=True) for difference in _compare(x, y)]
    return np.array(differences or [np.nan])


def _compare(ours: torch.Tensor, theirs: torch.Tensor) -> list[float]:
    channels = (
        [(ours, theirs)] if ours.ndim < 3 else list(zip(ours.transpose(0, 1), theirs.transpose(0, 1), strict=True))
    )
    return [0.0 if torch.equal(x, y) else compare_outputs(x, y) for x, y in channels]


def limit_rounding(exact: Network, pixels: torch.Tensor, dtype: torch.dtype, num: int) -> Floats:
    """Return how large each difference may be that rounding to a number format explains.

    Args:
        exact: the network in float32; its weights are rounded here, so it is of no use afterwards.
        pixels: what the outputs are of, uint8.
        dtype: the format.
        num: how many differences there are.
    """
    fixed = np.full(num, find_tolerance(dtype, exact.device))
    is_short = is_tensor_float(dtype, exact.device)
    if dtype == torch.float32 and not is_short:
        return fixed
    cut = _cut_mantissa if is_short else partial(_store, dtype=dtype)
    x = exact.prepare(pixels)
    expected = exact.run(x)
    _round_all(exact.module, cut)
    differences = _NUM_RUNS * differ(exact.run(_round(x, cut)), expected)
    if len(differences) != num:  # it selected other boxes
        return fixed
    return np.where(np.isfinite(differences), np.maximum(differences, fixed), fixed)


def _round_all(module: torch.nn.Module, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Round all weights and, from now on, what each module returns; the numbers stay float32."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        tensor.data = _round(tensor.data, cut)
    for part in module.modules():
        part.register_forward_hook(lambda _module, _given, output: tree_map(lambda leaf: _round(leaf, cut), output))


def _round(leaf: Any, cut: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return cut(leaf) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _store(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).to(tensor.dtype)


def _cut_mantissa(tensor: torch.Tensor) -> torch.Tensor:
    """Round float32 to TF32: the nearest number of 10 bits behind the point, of two the larger."""
    if tensor.dtype != torch.float32:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    return torch.where(tensor.isfinite(), ((bits + (1 << 12)) & -(1 << 13)).view(torch.float32), tensor)
