"""What a step of the image product returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.records.evaluations import Fallback
from pipeline.records.serving import PipelineServing


@dataclass(frozen=True)
class StepResult:
    """The serving config after a step, what else is worth recording, and where something else was done than asked."""

    serving: PipelineServing
    record: dict[str, Any] = field(default_factory=dict)
    fallbacks: tuple[Fallback, ...] = ()
