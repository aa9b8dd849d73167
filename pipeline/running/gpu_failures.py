"""One line on an error that means a device has no memory left, or no longer works.

Torch's own text is several sentences of advice on several lines. None of these errors is about a request or a picture:
the process that met one should end, as answers after it may be wrong, and each further call fails.

Source: the texts of torch 2.11 to 2.13, c10/cuda/CUDACachingAllocator.cpp and CUDAException.cpp.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from pipeline.errors import EngineError, QuantgateError

MAX_HELD_FRACTION = 0.1  # of a card, by other processes; a desktop and the driver take less
_NO_MEMORY = re.compile(
    r"CUDA out of memory|(CUDA|driver) error: out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED|can't allocate memory"
)
# a call that was wrong, or a kernel that the build lacks, leaves the device as it was
_ALIVE = r"invalid (argument|configuration|device function)|no kernel image|(operation )?not supported|CU[A-Z]+_STATUS"
_BROKEN = "EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED|MAPPING_ERROR"
_DEAD = re.compile(
    rf"CUDA (driver )?error(?!: ({_ALIVE}))|(CUDA error: )?CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_({_BROKEN})"
    "|device-side assert|NCCL error"
)
_SIZE = r"([\d.]+ (?:bytes|[KMGT]iB))"
_WANTED = re.compile(rf"(?:Tried to allocate|you tried to allocate) {_SIZE}")
_CARD = re.compile(rf"GPU (\d+) has a total capacity of {_SIZE} of which {_SIZE} is free")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_MAX_CHARS = 200


def describe_gpu_failure(error: BaseException, *, remedy: str) -> str | None:
    """Return what a device lacks or how it failed, in one line; None where an error is about something else.

    An error that another one carries in its text or as its cause counts, too: that is how a generation thread and
    llm-compressor report.

    Args:
        error: of torch, or of a library above it.
        remedy: what helps where memory is short.
    """
    text = f"{error}\n{error.__cause__ or ''}"
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        return f"{_describe_memory(text)}; {remedy}"
    if _DEAD.search(text):
        return f"the GPU or its driver failed: {_cut(text)}; see nvidia-smi, and dmesg for Xid"
    return None


@contextlib.contextmanager
def explain_gpu_failure(what: str, *, remedy: str, error_type: type[QuantgateError] = EngineError) -> Iterator[None]:
    """Turn an error that `describe_gpu_failure` knows into one line.

    Args:
        what: was worked on, for the message.
        remedy: what helps where memory is short.
        error_type: raised instead.

    Raises:
        QuantgateError: of this type; a device has no memory left, or no longer works.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (problem := describe_gpu_failure(error, remedy=remedy)) is None:
            raise
        raise error_type(f"{what}: {problem}") from None


def _describe_memory(text: str) -> str:
    wanted, card = _WANTED.search(text), _CARD.search(text)
    if card is None:
        return "out of memory: " + (f"{wanted[1]} needed" if wanted else _cut(text) or "the system gives no more")
    index, capacity, free = card.groups()
    need = f"{wanted[1]} needed, " if wanted else ""
    return f"out of memory on GPU {index}: {need}{free} of {capacity} free{_name_others(text, capacity, free)}"


def _name_others(text: str, capacity: str, free: str) -> str:
    """Say how much other processes hold, where it is much."""
    if (own := _OWN.search(text)) is None:
        return ""
    held = _read_size(capacity) - _read_size(free) - _read_size(own[1])
    if held <= MAX_HELD_FRACTION * _read_size(capacity):
        return ""
    return f", {held / _UNITS['GiB']:.2f} GiB held by other processes: end them (nvidia-smi lists them)"


def _read_size(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * _UNITS[unit]


def _cut(text: str) -> str:
    """Return the line that names an error, from there on: one of a thread has more before it."""
    named = _DEAD.search(text) or _NO_MEMORY.search(text)
    return text[named.start() :].splitlines()[0].strip()[:_MAX_CHARS] if named else ""
