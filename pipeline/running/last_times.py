"""How long each step took the last time on this machine, which is what the ETA of a run rests on.

A step is a stage of a candidate or product, such as "evaluate@int8". The times lie in build/env, by the facts of the
machine, as a folder may be one that several machines share. They change no result and are no input of any stage.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.records.digests import digest_json
from pipeline.records.files import write_text


@dataclass(frozen=True)
class LastTime:
    """Of one step that took over nothing from an earlier run.

    Attributes:
        seconds: by the clock.
        num_jobs: steps that shared the machine.
        num_counted: cases, or what else it counted.
    """

    seconds: float
    num_jobs: int
    num_counted: int

    def predict_s(self, num_jobs: int, *, num_kept: int = 0) -> float:
        """Return the seconds of the whole step beside so many others, without what is kept.

        With twice as many at once each has half of the machine.
        """
        left = 1 - min(1.0, num_kept / self.num_counted) if self.num_counted else 1.0
        return self.seconds * num_jobs / self.num_jobs * left


class LastTimes:
    """The times of all steps on one machine; a file that can't be read holds none."""

    def __init__(self, path: Path, machine: Path) -> None:
        """Read them.

        Args:
            path: of the times.
            machine: the file in which stage `env` describes the machine.
        """
        self._path = path
        self._machine = digest_json(machine.read_text(encoding="utf-8") if machine.is_file() else "")[:16]
        self._all: dict[str, dict[str, dict[str, float]]] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._all = dict(json.loads(path.read_text(encoding="utf-8")).items())

    def find(self, step: str) -> LastTime | None:
        """Return the last time of a step; None: there is none."""
        try:
            time = LastTime(**self._all[self._machine][step])  # type: ignore[arg-type]
            return time if time.num_jobs > 0 and time.seconds >= 0 else None
        except (KeyError, TypeError):
            return None

    def keep(self, step: str, time: LastTime) -> None:
        """Keep the time of a step, in the file too where that can be written."""
        if not isinstance(self._all.get(self._machine), dict):
            self._all[self._machine] = {}
        self._all[self._machine][step] = asdict(time)
        with contextlib.suppress(OSError):
            write_text(self._path, json.dumps(self._all, indent=1, sort_keys=True) + "\n")
