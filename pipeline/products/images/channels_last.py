"""The step that lays parts of a pipeline out with channels last, where this machine gains by it.

Each part is measured as the pipeline runs it, on one batch of the candidate's own prompts. It is kept in the format
only where that surely saves 5 % of its time and its output stays the same (`layout.py`). A part that is not kept is a
fallback of the candidate: without any part kept, it is served as if the step were not there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.products.images.layout import LayoutMeasurement, measure_layout
from pipeline.products.images.rendering import Prompt, load_pipeline
from pipeline.products.images.results import StepResult
from pipeline.products.images.settings import ChannelsLastStep
from pipeline.records.evaluations import Fallback
from pipeline.records.medians import GAIN_BELOW
from pipeline.records.serving import PipelineServing

ROUNDS = 12  # pairs that are timed


def run_channels_last(
    folder: Path, serving: PipelineServing, *, step: ChannelsLastStep, prompts: list[Prompt]
) -> StepResult:
    """Measure each part and keep the format where it pays; the record holds the measurements.

    Args:
        folder: of the pipeline; it is only read.
        serving: so far: number formats count.
        step: the parts.
        prompts: one batch of them is rendered.

    Raises:
        EngineError: the pipeline refused the prompts.
    """
    pipe = load_pipeline(folder, serving)
    batch = prompts[: serving.batch_size]
    measurements = [measure_layout(pipe, part, batch, serving, rounds=ROUNDS) for part in sorted(set(step.parts))]
    kept = tuple(m.part for m in measurements if m.decision == "keep")
    fallbacks = tuple(_explain(m) for m in measurements if m.decision != "keep")
    record = {"layout": {m.part: _build_record(m) for m in measurements}}
    return StepResult(serving.model_copy(update={"channels_last": kept}), record, fallbacks)


def _build_record(measured: LayoutMeasurement) -> dict[str, Any]:
    return {
        "decision": measured.decision,
        "ratio": measured.ratio.model_dump(),
        "channels_first_s": measured.channels_first_s,
        "channels_last_s": measured.channels_last_s,
        "difference": measured.difference,
        "tolerance": measured.tolerance,
    }


def _explain(measured: LayoutMeasurement) -> Fallback:
    ratio = measured.ratio
    took = f"it takes {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) of the time with channels first"
    differs = (
        ""
        if measured.difference <= measured.tolerance
        else f", and its output differs by {measured.difference:.2g} of its standard deviation"
    )
    return Fallback(
        layer=measured.part,
        reason=f"channels-last is left off: {took}{differs}; it is kept where it "
        f"surely takes under {GAIN_BELOW} and changes nothing but rounding",
    )
