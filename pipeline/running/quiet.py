"""Silence what packages say while they are imported or started, and no user can do anything about."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any


def silence_torchao() -> None:
    """Keep back what torchao says wherever it is imported, as transformers and diffusers do where they find it.

    On a CPU it can't load its CUDA kernels, and torch does not like how it registers its enums.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def silence_profiler() -> None:
    """Keep back all that torch's profiler prints, such as that it starts and stops; what fails still raises."""
    from torch.profiler import ProfilerActivity

    os.environ.setdefault("KINETO_LOG_LEVEL", "9")
    prepare_profiler(ProfilerActivity.CPU)


@functools.cache
def prepare_profiler(*activities: Any) -> None:
    """Have torch's profiler started once, without the error that it then prints in a worker's thread.

    Its library does so in any thread but the one that imported torch, whatever its log level. All that it goes without
    is being started by another program, so nothing is amiss.

    Args:
        activities: what will be profiled; a first start without a GPU may keep it from seeing one later.

    Source: libkineto/src/libkineto_api.cpp of https://github.com/pytorch/kineto
    """
    from torch.profiler import profile

    with (
        drop_lines("ERROR: External init callback must run in same thread", "USDT:"),
        profile(activities=activities),
    ):
        pass


@contextlib.contextmanager
def drop_lines(*beginnings: str) -> Iterator[None]:
    """Drop lines that begin so from stderr, also those of C++; others are shown at the end of the block."""
    noise = tuple(beginning.encode() for beginning in beginnings)
    lines: list[bytes] = []
    try:
        with catch_output(2, lines):
            yield
    finally:
        os.write(2, b"".join(line for line in lines if not line.startswith(noise)))


@contextlib.contextmanager
def catch_output(number: int, lines: list[bytes]) -> Iterator[None]:
    """Take what this process writes to one of its streams in the block, C++ too.

    Args:
        number: of the stream: 1 for stdout, 2 for stderr.
        lines: what came is added at the end of the block.
    """
    (sys.stdout if number == 1 else sys.stderr).flush()
    kept = os.dup(number)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            os.dup2(kept, number)
            os.close(kept)
            file.seek(0)
            lines += file
