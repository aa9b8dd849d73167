"""Matrix products of 16-bit numbers by float32 ones, on a CPU without instructions for the former.

There torch multiplies bfloat16 and float16 in plain loops, several times slower than float32. Both add up in float32
and round each result once, so that they differ as two orders of a sum do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_PRODUCTS = frozenset(
    {
        torch.nn.functional.linear,
        torch.nn.functional.scaled_dot_product_attention,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.mm,
        torch.Tensor.bmm,
    }
)


class Float32Products(TorchFunctionMode):
    """While it is entered, matrix products on the CPU in some number formats are made by float32 ones."""

    def __init__(self, dtypes: Collection[torch.dtype]) -> None:
        """Prepare it.

        Args:
            dtypes: of the products that are made so; the results are rounded to it.
        """
        self._dtypes = frozenset(dtypes)
        super().__init__()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, in float32 where it is such a product."""
        named = kwargs or {}
        is_product = func in _PRODUCTS and "out" not in named  # a wider copy of `out` would be filled
        if not is_product or not args or not self._is_slow(args[0]):
            return func(*args, **named)
        widened = {name: self._widen(value) for name, value in named.items()}
        return func(*map(self._widen, args), **widened).to(args[0].dtype)

    def _is_slow(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype in self._dtypes and value.device.type == "cpu"

    def _widen(self, value: Any) -> Any:
        return value.float() if self._is_slow(value) else value


def list_slow_dtypes() -> list[torch.dtype]:
    """Return the 16-bit formats whose products this CPU has no instructions for, by what torch chooses kernels."""
    if not torch.backends.mkldnn.is_available():
        return [torch.bfloat16, torch.float16]
    supports = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return [dtype for dtype, is_supported in supports.items() if not is_supported()]
