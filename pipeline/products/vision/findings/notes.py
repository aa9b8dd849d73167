"""What the evaluation of a network noted beside its records: how far each layer is from float32, and what it costs.

Read with types, so that notes of another version are told in one line and not met as a missing key in a picture.
"""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import ConfigDict, ValidationError

from pipeline.errors import EvidenceError
from pipeline.gate.pairing import Evidence
from pipeline.records.medians import MedianInterval
from pipeline.records.record_files import Record, first_problem


class _Notes(Record):
    model_config = ConfigDict(extra="ignore")


class LayerNotes(_Notes):
    """What one layer wrote, over a few pictures; None is a number that is not finite."""

    relative_error: float | None  # accumulated from the input on
    nonfinite_count: int  # elements that are NaN or infinite
    headroom_bits: float | None  # doublings in its own number format

    @property
    def headroom(self) -> float:
        """How often the largest output can double: -inf after an overflow, inf where all is zero."""
        if self.nonfinite_count:
            return -math.inf
        return math.inf if self.headroom_bits is None else self.headroom_bits

    @property
    def error(self) -> float:
        """The relative error, infinite where nothing finite is left to compare or NaN and infinity are in it."""
        return math.inf if self.relative_error is None or self.nonfinite_count else self.relative_error


class ClockNotes(_Notes):
    """A candidate beside its baseline by one clock."""

    ratio: MedianInterval


class SpeedNotes(_Notes):
    """A candidate timed in turn with its baseline; `timed` is None where the two differ by more than rounding.

    `tolerance` is None where their outputs were not compared, as they are of other weights or tiles.
    """

    baseline: str
    difference: float | None
    tolerance: float | None
    timed: dict[str, ClockNotes] | None
    clock: str = ""  # which decides

    @property
    def ratio(self) -> MedianInterval | None:
        """The ratio of times by the clock that decides."""
        return self.timed[self.clock].ratio if self.timed and self.clock in self.timed else None

    @property
    def worse(self) -> tuple[str, MedianInterval] | None:
        """The clock that decides and the ratio of times by it; by another where it surely takes longer by that."""
        if self.ratio is None or self.timed is None:
            return None
        clock, slow = max(((clock, c.ratio) for clock, c in self.timed.items()), key=lambda pair: pair[1].low)
        return (clock, slow) if slow.low > 1 else (self.clock, self.ratio)

    @property
    def is_slower(self) -> bool:
        """Say whether it surely takes longer by some clock."""
        return self.worse is not None and self.worse[1].low > 1


class CompileNotes(_Notes):
    """What compilation met."""

    num_graphs: int  # of the first shape
    num_graph_breaks: int
    num_recompilations: int  # graphs of the other shapes
    num_shapes: int
    first_call_s: float
    limit: int  # graphs of one function
    num_over_limit: int  # functions that ran without compilation as they had reached it
    shape_over_limit: int | None  # the first shape that did


class ShapeNotes(_Notes):
    """What shapes the batches of an eval have, and which was timed: the most common."""

    num_shapes: int
    timed: tuple[int, int, int]  # pictures, rows, columns
    num_timed: int  # pictures in batches of that shape
    num_pictures: int


class LayoutNotes(_Notes):
    """Whether a memory format survived."""

    other_formats: list[str]  # modules that write another one
    num_reorders: dict[str, int]  # of oneDNN, by format: "first", "last"


class Int8Notes(_Notes):
    """Which kernels ran the layers that are in INT8, as the profiler and oneDNN's log say."""

    num_layers: int
    num_kernel_calls: int  # of one run
    num_float_calls: int
    implementations: list[str]  # of oneDNN

    @property
    def is_emulated(self) -> bool:
        """Some layer ran in no INT8 kernel."""
        return self.num_kernel_calls < self.num_layers


class NetworkNotes(_Notes):
    """All of them (`<eval>.json`)."""

    layers: dict[str, LayerNotes]
    shapes: ShapeNotes
    speed: SpeedNotes | None
    total: SpeedNotes | None  # beside the reference run plainly; None: that would say nothing
    compile: CompileNotes | None
    layout: LayoutNotes | None
    int8: Int8Notes | None = None  # of a network that is in INT8
    beside: str | None = None  # digest of the reference's pictures that tiles were judged beside; None: it ran there
    peak_mib: float | None
    work: float  # pixels that the network is run on, per pixel of the largest picture

    @property
    def is_emulated(self) -> bool:
        """INT8 was asked for, and some layer of it was not run so: its times would say nothing."""
        return self.int8 is not None and self.int8.is_emulated


def read_network_notes(evidence: Evidence) -> NetworkNotes | None:
    """Return the notes of a candidate's first eval; None where no eval is fit.

    Raises:
        EvidenceError: no notes, or not those of a network.
    """
    path = next((evidence.folder / f"{name}.json" for name in evidence.records), None)
    return None if path is None else parse_notes(path)


def parse_notes(path: Path) -> NetworkNotes:
    """Return the notes of one file.

    Raises:
        EvidenceError: no file, or not the notes of a network.
    """
    try:
        return NetworkNotes.model_validate_json(path.read_bytes())
    except OSError:
        raise EvidenceError(f"{path}: expected notes of a network, found no file; run `dvc repro`") from None
    except ValidationError as error:
        raise EvidenceError(f"{path}: not the notes of a network: {first_problem(error)}; run `dvc repro`") from None
