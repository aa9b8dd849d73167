"""Where the time of a long piece of work goes: seconds of each phase by the wall clock, for one line on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping


class Phases:
    """Seconds by phase, in the order in which phases began; a phase that comes again adds to its first."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time of the block for a phase, also when the block fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add({name: time.perf_counter() - start})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add what another piece of work took, phase by phase."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value


def format_phases(seconds: Mapping[str, float]) -> str:
    """Write phases as one line, such as "load 5.1 s, save 8.0 s; 13.1 s in all"."""
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    return f"{parts}; {sum(seconds.values()):.1f} s in all"
