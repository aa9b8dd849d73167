"""Measure whether a part of a pipeline gains by channels-last, and decide: keep it or leave it off.

Both memory formats run the same inputs, taken from the pipeline's own rendering, in turn on one thread; what is
compared is the ratio of CPU seconds (`pipeline/running/timing.py`) within a pair, so that what else runs meets both.
`benchmarks/sdxl_shapes.py` times GPUs at full shape.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pipeline.products.images.denoisers import find_denoiser
from pipeline.products.images.rendering import Prompt, make_latents, unscale_latents
from pipeline.records.medians import GAIN_BELOW, MedianInterval, bound_median
from pipeline.records.serving import PipelineServing
from pipeline.running.timing import Run, compare_outputs, find_tolerance, read_seconds, time_in_turn

Part = Literal["unet", "vae"]
Decision = Literal["keep", "leave off"]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class LayoutMeasurement:
    """What channels-last does to one part."""

    part: Part
    ratio: MedianInterval  # time with channels last to that with channels first, within a pair
    channels_first_s: float  # median
    channels_last_s: float
    difference: float  # largest of the two outputs, in units of the output's standard deviation
    tolerance: float

    @property
    def decision(self) -> Decision:
        """Keep channels-last or leave it off."""
        return decide_layout(self.ratio, difference=self.difference, tolerance=self.tolerance)


def decide_layout(ratio: MedianInterval, *, difference: float, tolerance: float) -> Decision:
    """Keep channels-last where it surely saves 5 % of the time and changes nothing but rounding.

    Args:
        ratio: of the time with channels last to that with channels first.
        difference: of the two outputs, in units of the output's standard deviation; NaN where one is not finite.
        tolerance: in the same units.
    """
    return "keep" if ratio.high < GAIN_BELOW and difference <= tolerance else "leave off"


def measure_layout(
    pipe: Any,
    part: Part,
    prompts: Sequence[Prompt],
    serving: PipelineServing,
    *,
    rounds: int = 20,
    wrap: Wrap = lambda call: call,
) -> LayoutMeasurement:
    """Time one part with channels first and last, on what rendering the prompts feeds it.

    Args:
        pipe: a loaded pipeline; it keeps its memory format.
        part: which component.
        prompts: one batch, of one category.
        serving: how the pipeline is run.
        rounds: pairs that are timed; six at least.
        wrap: makes another callable of the part's own, `torch.compile` for example.

    Raises:
        EvidenceError: too few rounds for an interval.
        EngineError: the pipeline refused the prompts.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first, last = bind_layouts(pipe, part, prompts, serving, wrap=wrap)
        difference = compare_outputs(last(), first())
        model = getattr(pipe, part)
        tolerance = find_tolerance(model.dtype, model.device)
        return measure_runs(
            part,
            first,
            last,
            rounds=rounds,
            difference=difference,
            tolerance=tolerance,
            clock=functools.partial(read_seconds, model.device),
        )
    finally:
        torch.set_num_threads(threads)


def measure_runs(
    part: Part,
    first: Run,
    last: Run,
    *,
    rounds: int,
    difference: float,
    tolerance: float,
    clock: Callable[[], float] = time.process_time,
) -> LayoutMeasurement:
    """Time two runs in pairs whose order alternates, after some that are not counted.

    Args:
        part: what they run.
        first: with channels first.
        last: with channels last.
        rounds: pairs.
        difference: of their outputs, see `compare_outputs`.
        tolerance: of that.
        clock: seconds; CPU seconds are fair beside other work.
    """
    pairs = time_in_turn(first, last, rounds=rounds, clock=clock)
    firsts, lasts = (bound_median(column).median for column in zip(*pairs, strict=True))
    return LayoutMeasurement(part, bound_median([b / a for a, b in pairs]), firsts, lasts, difference, tolerance)


@torch.inference_mode()
def bind_layouts(
    pipe: Any, part: Part, prompts: Sequence[Prompt], serving: PipelineServing, *, wrap: Wrap = lambda call: call
) -> tuple[Run, Run]:
    """Return what runs a copy of a part with channels first and last, on what rendering the prompts feeds it.

    The U-Net gets the arguments of its first step, the VAE's decoder the latents; these come with channels first, as
    they do in the pipeline.
    """
    arguments, named = _record_arguments(pipe, part, prompts, serving)
    runs = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = copy.deepcopy(getattr(pipe, part)).to(memory_format=memory_format)
        runs.append(_bind(wrap(model if part == "unet" else model.decode), arguments, named))
    return runs[0], runs[1]


def _record_arguments(
    pipe: Any, part: Part, prompts: Sequence[Prompt], serving: PipelineServing
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = find_denoiser(pipe)[1].register_forward_pre_hook(
        lambda _module, arguments, named: calls.append((arguments, dict(named))), with_kwargs=True
    )
    try:
        latents = make_latents(pipe, prompts, serving)
    finally:
        handle.remove()
    if part == "unet":
        return calls[0][0], calls[0][1] | {"return_dict": False}
    return (unscale_latents(pipe.vae, latents.values).to(pipe.vae.dtype),), {"return_dict": False}


def _bind(call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Run:
    @torch.inference_mode()
    def run() -> torch.Tensor:
        output: torch.Tensor = call(*arguments, **named)[0]
        return output

    return run
