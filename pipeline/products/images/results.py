"""What the steps and the workers of the image product return, and the name of what a worker was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.evalsets.cases import PromptCase
from pipeline.records.digests import digest_json
from pipeline.records.evaluations import CaseRecord, Fallback, LayerCoverage
from pipeline.records.serving import PipelineServing


@dataclass(frozen=True)
class StepResult:
    """The serving config after a step, what else is worth recording, and where something else was done than asked.

    `coverage` is the format of each layer, of a step that quantises.
    """

    serving: PipelineServing
    record: dict[str, Any] = field(default_factory=dict)
    fallbacks: tuple[Fallback, ...] = ()
    coverage: tuple[LayerCoverage, ...] = ()


@dataclass(frozen=True)
class Rendered:
    """What came of one batch."""

    records: tuple[CaseRecord, ...]
    pixels: NDArray[np.uint8]  # (n, height, width, 3)
    ranges: dict[str, Any]  # of the decoder's modules, see pipeline/numerics/activation_watch.py
    std_ratios: tuple[float, ...]  # of the guided prediction to the conditional one, per step, mean over the batch
    denoise_s: float | None  # see pipeline/running/timing.py for what a second is; None: the latents were taken
    latents_differ: bool  # from the reference's, though what makes them is the same (`shared_latents.py`)
    decode_s: tuple[float, float] | None  # and by the reference's VAE in float32, in turn; None: not timed
    peak_memory_mib: float  # of the process
    peak_gpu_memory_mib: float | None  # of its tensors; None without a GPU

    def as_json(self) -> dict[str, Any]:
        """Return all but records and pixels as JSON, for a journal."""
        names = [field.name for field in fields(self) if field.name not in ("records", "pixels")]
        kept = {name: getattr(self, name) for name in names}
        return kept | {"ranges": {name: astuple(module_range) for name, module_range in self.ranges.items()}}


def name_batch(cases: Sequence[PromptCase], category: str | None) -> str:
    """Return the digest of what a batch is of: its prompts, and the category whose guidance it has."""
    return digest_json([category, *(case.digest for case in cases)])
