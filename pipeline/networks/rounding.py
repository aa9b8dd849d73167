"""Do two ways of running one network give the same but for rounding, and how far apart may rounding take them?

    differences = differ(ours.run(x), theirs.run(x))
    limits = limit_rounding(exact, pixels, torch.bfloat16, len(differences))

Outputs are compared channel by channel, as a score in [0, 1] may stand beside a coordinate in pixels, each by its
largest difference in units of the channel's standard deviation. In 16 bits no fixed limit says what is rounding: where
large values cancel in a layer, or a channel's values lie far from zero, one rounding is a large part of a deviation.
So the limit is measured. The float32 network is run again with its weights, its input and what each of its modules
returns rounded to the number format, which is what storing them in it does (Higham and Pranesh 2019, "Simulating low
precision floating-point arithmetic", SIAM J. Sci. Comput. 41(5), doi:10.1137/19M1251308). Two runs in the format, which
round at other places, lie about as far from float32 as that one each, hence at most twice as far from each other, and
less from float32. The fixed limit of `pipeline/timing.py` holds where it is larger, and in float32.

What is covered by twice that rounding is not seen as a difference. Not rounded: what a module computes inside without
other modules.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map

from pipeline.networks.loading import Network, list_tensors
from pipeline.timing import TOLERANCES, compare_outputs

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
    found = [difference for x, y in zip(a, b, strict=True) for difference in _compare(x, y)]
    return np.array(found or [np.nan])


def _compare(ours: torch.Tensor, theirs: torch.Tensor) -> list[float]:
    channels = [(ours, theirs)] if ours.ndim < 3 else list(
        zip(ours.transpose(0, 1), theirs.transpose(0, 1), strict=True))  # fmt: skip
    return [0.0 if torch.equal(x, y) else compare_outputs(x, y) for x, y in channels]


def limit_rounding(exact: Network, pixels: torch.Tensor, dtype: torch.dtype, num: int) -> Floats:
    """Return how large each difference may be that rounding to a number format explains.

    Args:
        exact: the network in float32; its weights are rounded here, so it is of no use afterwards.
        pixels: what the outputs are of, uint8.
        dtype: the format.
        num: how many differences there are.
    """
    fixed = np.full(num, TOLERANCES[dtype])
    if dtype == torch.float32:
        return fixed
    x = exact.prepare(pixels)
    expected = exact.run(x)
    _store_as(exact.module, dtype)
    found = _NUM_RUNS * differ(exact.run(_round(x, dtype)), expected)
    if len(found) != num:  # it selected other boxes
        return fixed
    return np.where(np.isfinite(found), np.maximum(found, fixed), fixed)


def _store_as(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round all weights and, from now on, what each module returns; the numbers stay float32."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        tensor.data = _round(tensor.data, dtype)
    for part in module.modules():
        part.register_forward_hook(lambda _module, _given, output: tree_map(lambda leaf: _round(leaf, dtype), output))


def _round(leaf: Any, dtype: torch.dtype) -> Any:
    is_fraction = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.to(dtype).to(leaf.dtype) if is_fraction else leaf
