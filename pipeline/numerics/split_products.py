"""Float32 on a GPU's tensor cores: each convolution as three, of parts that TF32 holds.

Tensor cores read ten bits behind the point, float32 has 23. A number is the sum of a high part, its first bits, and of
a low one, the rest. Products of high by high, low by high and high by low parts leave out a millionth of a product, and
tensor cores cut off where they add up. So a decode is a few times as far from the exact one as in float32, a little
nearer to zero, and a fiftieth as far as in TF32: `python -m benchmarks.split_products`. For inference: no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_LOW_BITS = 13  # of float32's 23 that TF32 has no room for
# A100, H100 and H200, B200 and B300: their tensor cores take TF32 eight times as fast as their other units take
# float32. On most others it is twice as fast at most, and three products take longer than one.
_FAST_TF32 = {(8, 0), (9, 0), (10, 0), (10, 3)}


class SplitProducts(TorchFunctionMode):
    """Within it, 2D convolutions and group norms of float32 run by parts, channels last, on a GPU that gains by it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the two; everything else runs as it is."""
        named = kwargs or {}
        replaced, dims = _REPLACED.get(func, (func, ()))
        is_replaced = bool(dims) and _suits(args, named, dims)
        return (replaced if is_replaced else func)(*args, **named)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *more: Any, **named: Any
) -> torch.Tensor:
    """Return what `torch.conv2d` does, by three products of parts that TF32 holds.

    Args:
        x: float32, (n, channels, height, width).
        weight: float32, (channels out, channels in / groups, height, width).
        bias: (channels out,).
        more: stride, padding, dilation and groups, as `torch.conv2d` takes them; so are `named`.

    Returns:
        (n, channels out, height, width), channels last. Infinite numbers may become NaN.
    """
    (high, low), (high_w, low_w) = split(x), split(weight)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:  # the small products first: what tensor cores cut off follows the size of the sum
        total = torch.conv2d(high, low_w, bias, *more, **named)
        total += torch.conv2d(low, high_w, None, *more, **named)
        total += torch.conv2d(high, high_w, None, *more, **named)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    return total


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts of float32 numbers, (n, channels, height, width), channels last; their sum is exact."""
    values = values.contiguous(memory_format=torch.channels_last)
    high = (values.view(torch.int32) & -(1 << _LOW_BITS)).view(torch.float32)
    return high, values - high


def normalize(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Return what `functional.group_norm` does, in x's memory format: torch's kernel wants channels first, and is slow.

    Args:
        x: (n, channels, ...), of any number of dimensions from three up.
        num_groups: that divide the channels.
        weight: (channels,), 1 where it is None.
        bias: (channels,), 0 where it is None.
        eps: added to the variance.
    """
    n, channels = x.shape[:2]
    grouped = x.movedim(1, -1).reshape(n, -1, num_groups, channels // num_groups)
    variance, mean = (part.flatten(1) for part in torch.var_mean(grouped, dim=(1, 3), correction=0))
    scale, shift = (
        part.repeat_interleave(channels // num_groups, 1)
        for part in ((variance + eps).rsqrt(), -mean * (variance + eps).rsqrt())
    )
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    shape = (n, channels, *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.view(shape), x, scale.view(shape))


def _suits(args: Sequence[Any], named: Mapping[str, Any], dims: Sequence[int]) -> bool:
    """Say whether a call as modules make it is of pictures in float32 on a GPU that gains by it."""
    tensors = [part for part in (*args, *named.values()) if isinstance(part, torch.Tensor)]
    return (
        len(args) > 1
        and args[0].dim() in dims
        and args[0].numel() > 0
        and all(tensor.dtype == torch.float32 for tensor in tensors)
        and _is_fast(args[0].device)
    )


def _is_fast(device: torch.device) -> bool:
    has_cuda = device.type == "cuda" and torch.version.cuda is not None
    return has_cuda and torch.cuda.get_device_capability(device) in _FAST_TF32


# what is called instead, and the dimensions of a first argument that it takes
_REPLACED: dict[Any, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    torch.conv2d: (convolve, (4,)),
    functional.group_norm: (normalize, (3, 4)),
}
