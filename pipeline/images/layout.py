"""Measure whether a part of a pipeline gains by channels-last, and decide: keep it or leave it off.

Both memory formats run the same inputs, taken from the pipeline's own rendering, in turn on one thread; what is
compared is the ratio of CPU seconds (`timing.py`) within a pair, so that what else runs meets both. Also here: what
oneDNN's log says of reorders, the copies it makes of activations between two memory formats. Copies that torch makes
itself are not in that log, which a GPU does not write; `benchmarks/sdxl_shapes.py` times GPUs at full shape.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pipeline.images.rendering import Prompt, make_latents, unscale_latents
from pipeline.images.timing import read_seconds
from pipeline.medians import bound_median
from pipeline.records import PipelineServing
from pipeline.verdict_records import MedianInterval

Part = Literal["unet", "vae"]
Decision = Literal["keep", "leave off"]
Run = Callable[[], torch.Tensor]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

KEPT_BELOW = 0.95  # of the time with channels first: a smaller gain is not worth another memory format
# of the output's standard deviation: float32 sums in another order stay far below; in 16 bits about 50 roundings
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.4}
WARM_UPS = 2


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
    return "keep" if ratio.high < KEPT_BELOW and difference <= tolerance else "leave off"


def measure_layout(
    pipe: Any, part: Part, prompts: Sequence[Prompt], serving: PipelineServing, *, rounds: int = 20,
    wrap: Wrap = lambda call: call,
) -> LayoutMeasurement:  # fmt: skip
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
        return measure_runs(part, first, last, rounds=rounds, difference=difference, tolerance=TOLERANCES[model.dtype],
                            clock=functools.partial(read_seconds, model.device))  # fmt: skip
    finally:
        torch.set_num_threads(threads)


def measure_runs(
    part: Part, first: Run, last: Run, *, rounds: int, difference: float, tolerance: float,
    clock: Callable[[], float] = time.process_time,
) -> LayoutMeasurement:  # fmt: skip
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
    for run in (first, last) * WARM_UPS:
        run()
    pairs = []
    for i in range(rounds):
        took = {}
        for name, run in sorted({"first": first, "last": last}.items(), reverse=bool(i % 2)):
            start = clock()
            run()
            took[name] = clock() - start
        pairs.append((took["first"], took["last"]))
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


def compare_outputs(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference in units of the expected output's standard deviation; NaN if one is not finite."""
    difference = (got.double() - expected.double()).abs().max() / expected.double().std()
    return float(difference) if got.isfinite().all() and expected.isfinite().all() else float("nan")


def count_reorders(log: str, weights: Collection[tuple[int, ...]]) -> int:
    """Count the reorders of activations in a log that oneDNN wrote with ONEDNN_VERBOSE=1.

    Args:
        log: its lines, among others; fields are separated by commas: "onednn_verbose", version, "primitive", "exec",
            engine, kind of primitive, ..., shape such as 4x32x16x16, milliseconds.
        weights: shapes of the model's parameters. Weights are reordered too, whatever the activations' format, and so
            are matrices, which no memory format concerns: neither is counted.
    """
    known = {"x".join(map(str, shape)) for shape in weights}
    fields = [line.split(",") for line in log.splitlines() if line.startswith("onednn_verbose,")]
    shapes = [line[-2] for line in fields if "exec" in line and "reorder" in line]
    return sum(shape.count("x") == 3 and shape not in known for shape in shapes)


def _record_arguments(
    pipe: Any, part: Part, prompts: Sequence[Prompt], serving: PipelineServing
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = pipe.unet.register_forward_pre_hook(
        lambda _module, arguments, named: calls.append((arguments, dict(named))), with_kwargs=True)  # fmt: skip
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
