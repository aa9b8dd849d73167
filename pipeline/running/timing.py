"""What a call costs, its seconds and the memory that its tensors take at most, and whether two calls do the same.

On a CPU seconds are CPU seconds of the process, which other work on the machine hardly moves; on an accelerator the
wall clock is read after everything queued is done. Memory is counted where tensors are made, so a number is the same
each time; what a kernel takes for itself while it runs is not seen on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.running.turns import have_machine_alone

T = TypeVar("T")
C = TypeVar("C", float, NDArray[np.float64])
Run = Callable[[], torch.Tensor]

# of the output's standard deviation: float32 sums in another order stay far below; in 16 bits about 50 roundings, which
# cancellation in a deep network can exceed: `networks/rounding.py` measures there what rounding does
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.4}
WARM_UPS = 2


def is_tensor_float(dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether convolutions take float32 for TF32, which has float16's mantissa; on a GPU torch's default is to."""
    return dtype == torch.float32 and device.type == "cuda" and torch.backends.cudnn.allow_tf32


def find_tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Return how far rounding may take two runs apart, in units of the output's standard deviation."""
    return TOLERANCES[torch.float16 if is_tensor_float(dtype, device) else dtype]


def read_seconds(device: torch.device) -> float:
    """Return a clock's time: differences are what a call on this device took."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def time_call(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Run something on a device; return what it returns, and its seconds."""
    start = read_seconds(device)
    result = call()
    return result, read_seconds(device) - start


def time_in_turn(
    first: Callable[[], Any], second: Callable[[], Any], *, rounds: int, clock: Callable[[], C]
) -> list[tuple[C, C]]:
    """Time two calls in pairs whose order alternates, so that a trend hits both, after some that are not counted.

    While it counts, the machine is theirs alone, where turns are taken (`turns.py`).

    Args:
        first: one call.
        second: the other.
        rounds: pairs.
        clock: seconds, see `read_seconds`, or an array of several clocks'.

    Returns:
        The seconds of both, pair by pair.
    """
    with have_machine_alone():
        for run in (first, second) * WARM_UPS:
            run()
        return [_time_pair(first, second, clock, is_reversed=bool(i % 2)) for i in range(rounds)]


def _time_pair(
    first: Callable[[], Any], second: Callable[[], Any], clock: Callable[[], C], *, is_reversed: bool
) -> tuple[C, C]:
    def time_one(call: Callable[[], Any]) -> C:
        start = clock()
        call()
        return clock() - start

    if not is_reversed:
        return time_one(first), time_one(second)
    took = time_one(second)
    return time_one(first), took


def compare_outputs(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference in units of the expected output's standard deviation; NaN if one is not finite."""
    difference = (got.double() - expected.double()).abs().max() / expected.double().std()
    return float(difference) if got.isfinite().all() and expected.isfinite().all() else float("nan")


def measure_peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes that tensors made by a call took at one time, without its inputs and weights.

    Args:
        call: is run once; its speed suffers.
        device: where it runs.
    """
    if device.type != "cpu":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _LiveTensors() as live:
        call()
    return live.peak_bytes


class _LiveTensors(TorchDispatchMode):
    """Adds up the storages that operations made and that are still referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _list_storages((args, kwargs))}
        self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
        for storage in _list_storages(output):
            if storage._cdata not in given:  # a view of what was given is not new
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._storages.values()))
        return output


def _list_storages(values: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
