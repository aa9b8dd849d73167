"""What every module of a model writes during real runs: largest magnitude, headroom, NaN and infinity.

    with ActivationWatch(vae.decoder) as watch:
        vae.decode(latents)
    watch.read()["up_blocks.2.resnets.0"].headroom_bits(torch.float16)

Outputs are read by forward hooks on every module, not on leaves alone: a residual sum is the output of
a block and of no leaf. One reduction to the largest magnitude is paid for each tensor that is new: a
container that hands on the tensor of its last child shares its child's numbers, and activations whose
output can't exceed their input (SiLU, ReLU, dropout) are left out. On an accelerator nothing is
synchronised before `read`. `benchmarks/activation_watch_cost.py` measures what it costs.

`range_fix.measure_activations` is this watch, so that what plans a fix is what judges it. Inputs, weights
and what happens inside a fused kernel (an attention's logits) are not seen. Nor is what a container adds in
place to the tensor of its last child, as `out += x` does: both have the child's numbers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from torch import nn

from pipeline.errors import NumericsError

_BOUNDED = (nn.SiLU, nn.ReLU, nn.GELU, nn.Dropout, nn.Identity)  # |output| <= |input|
_INTEGERS = {
    torch.float16: (torch.int16, np.int16, np.uint16, 1 << 15),
    torch.bfloat16: (torch.int16, np.int16, np.uint16, 1 << 15),
    torch.float32: (torch.int32, np.int32, np.uint32, 1 << 31),
    torch.float64: (torch.int64, np.int64, np.uint64, 1 << 63),
}
_MAX_PENDING = 256  # scalars kept on an accelerator per module before they are folded


@dataclass(frozen=True)
class ModuleRange:
    """What one module wrote, over all calls."""

    absmax: float  # infinite after NaN or infinity
    nonfinite_count: int  # elements that are NaN or infinite; on an accelerator see `ActivationWatch`
    nonfinite_calls: int
    calls: int

    def headroom_bits(self, dtype: torch.dtype) -> float:
        """Return how many times the largest magnitude can double before the dtype overflows; negative is beyond it."""
        if self.absmax == 0:
            return math.inf
        return -math.inf if math.isinf(self.absmax) else math.log2(torch.finfo(dtype).max / self.absmax)


class _Tally:
    """The running numbers of one module."""

    def __init__(self) -> None:
        self.absmax = 0.0
        self.nonfinite_count = self.nonfinite_calls = self.calls = 0
        self.pending: list[torch.Tensor] = []

    def add(self, absmax: float, num_nonfinite: int) -> None:
        self.nonfinite_count += num_nonfinite
        self.nonfinite_calls += num_nonfinite > 0
        self.absmax = math.inf if num_nonfinite else max(self.absmax, absmax)

    def fold(self) -> None:
        """Take in what an accelerator still holds: one synchronisation."""
        if self.pending:
            for absmax in torch.stack(self.pending).double().cpu().tolist():
                self.add(absmax, 0 if math.isfinite(absmax) else 1)
            self.pending = []


class ActivationWatch:
    """Watch the outputs of a model's modules between `__enter__` and `__exit__`.

    Numbers add up over calls and over several `with` blocks. On the CPU `nonfinite_count` is exact: elements
    are counted when the range says that there is something to count. On an accelerator that would need a
    synchronisation per module, so each call with NaN or infinity counts as one element: a lower bound.

    Args:
        module: its submodules are watched, itself too; any floating tensor that one returns is read.
        prefix: put before each name, for a module that is part of another ("decoder").
        every: read the inner modules on the first of so many runs only. The module's own output is read on all:
            NaN and infinity spread through a norm to the output, so no bad run is missed, only its origin.

    Raises:
        NumericsError: on entering twice, or `every` below 1.
    """

    def __init__(self, module: nn.Module, *, prefix: str = "", every: int = 1) -> None:
        if every < 1:
            raise NumericsError(f"activation watch: expected to read every run or every n-th, got every={every!r}")
        self._root, self._every, self._num_runs, self._is_reading = module, every, 0, True
        modules = module.named_modules(remove_duplicate=False)  # a module with two names is reported under both
        self._modules = {
            ".".join(filter(None, (prefix, name))): child for name, child in modules if not isinstance(child, _BOUNDED)
        }
        self._tallies = {name: _Tally() for name in self._modules}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._last: weakref.ref[torch.Tensor] | None = None
        self._last_range: tuple[float, int] | torch.Tensor = (0.0, 0)

    def __enter__(self) -> ActivationWatch:
        if self._handles:
            raise NumericsError("activation watch: expected one at rest, this one already runs; leave its block first")
        self._handles = [
            module.register_forward_hook(self._make_hook(self._tallies[name])) for name, module in self._modules.items()
        ]
        if self._every > 1:
            self._handles.append(self._root.register_forward_pre_hook(self._begin_run))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._last = [], None

    def read(self) -> dict[str, ModuleRange]:
        """Return what was seen, by module name in the model's order; modules that never ran are left out."""
        ranges = {}
        for name, tally in self._tallies.items():
            tally.fold()
            if tally.calls:
                ranges[name] = ModuleRange(tally.absmax, tally.nonfinite_count, tally.nonfinite_calls, tally.calls)
        return ranges

    def _begin_run(self, _module: nn.Module, _inputs: object) -> None:
        self._is_reading = self._num_runs % self._every == 0
        self._num_runs += 1

    def _make_hook(self, tally: _Tally) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _inputs: object, output: object) -> None:
            if not (self._is_reading or module is self._root):
                return
            if isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel():
                self._observe(tally, output)

        return hook

    def _observe(self, tally: _Tally, output: torch.Tensor) -> None:
        if self._last is None or self._last() is not output:
            self._last_range = _reduce(output.detach())
            self._last = weakref.ref(output)
        tally.calls += 1
        if isinstance(self._last_range, torch.Tensor):
            tally.pending.append(self._last_range)
            if len(tally.pending) >= _MAX_PENDING:
                tally.fold()
        else:
            tally.add(*self._last_range)


def _reduce(output: torch.Tensor) -> tuple[float, int] | torch.Tensor:
    """Return magnitude and number of non-finite elements; on an accelerator the magnitude alone, still there."""
    if output.ndim == 4 and output.is_contiguous(memory_format=torch.channels_last):
        output = output.permute(0, 2, 3, 1)  # the same memory in its own order
    if output.device.type != "cpu":
        return torch.linalg.vector_norm(output, math.inf)  # NaN if there is any; exact in any format
    absmax = _find_absmax(output.contiguous())
    return absmax, 0 if math.isfinite(absmax) else output.numel() - int(output.isfinite().sum())


def _find_absmax(output: torch.Tensor) -> float:
    """Return the largest magnitude of a contiguous CPU tensor; NaN or infinity if there is any.

    Compares bit patterns: as signed integers the positive numbers are in order with NaN on top, and as unsigned
    ones the negative numbers lie above them, in order of magnitude. That takes 40 % of torch.aminmax's time.
    """
    if output.dtype not in _INTEGERS:
        output = output.float()
    integer, signed, unsigned, sign_bit = _INTEGERS[output.dtype]
    patterns = output.view(integer).numpy()
    positive, negative = int(patterns.view(signed).max()), int(patterns.view(unsigned).max()) - sign_bit
    largest = torch.tensor(max(positive, negative, 0), dtype=integer)
    return largest.view(output.dtype).item()
