"""What number formats, memory formats and compile modes do to SDXL's U-Net and VAE at full shape, on a GPU.

    python -m benchmarks.sdxl_shapes [--rounds 15] [--cudnn-benchmark] [--skip precision layout modes] [--json FILE]
    python -m benchmarks.sdxl_shapes --tiny          checks the script anywhere; its times mean nothing

One image of 1024 x 1024: a U-Net step takes two latents, as guidance does, a decode takes one. Weights are random:
speed and memory need no trained ones; what a number format does to trained weights is not shown here. A time is that of
one call between two synchronisations, after three that are not counted; the settings of a table take turns within each
round, and each round starts with another one. Each is timed as called, with Python and every launch, and replayed as
a CUDA graph, which is the GPU's own time. A ratio is taken within its round. Intervals cover the median with 95 %
(`pipeline/records/medians.py`). Peak memory is what the caching allocator held at most: a part's own weights, and what
its call
took beside them.
Not covered: text encoders, several images at once, CPUs.

torch runs float32 convolutions in TF32 by default, and float32 matrix products not: the row "float32" is that, the row
"float32, no TF32" has neither.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_timing import Run, bound_milliseconds, capture, ratio, synchronize, write_times
from benchmarks.sdxl_models import Inputs

milliseconds = partial(bound_milliseconds, digits=1)

NUM_STEPS = 30  # of an image, where a whole one is added up
WARM_UPS = 3
HOW = ("called", "replayed")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# the U-Net's and the VAE's, in the order of the table
PAIRS = (
    ("float32, no TF32", "float32, no TF32"),
    ("float32", "float32"),
    ("float16", "float32"),
    ("float16", "bfloat16"),
    ("float16", "float16"),
)
# what is worth most comes first: a compilation can't be interrupted in good order
MODES = (
    ("unet", "default"),
    ("vae", "default"),
    ("vae", "max-autotune-no-cudagraphs"),
    ("vae", "max-autotune"),
    ("unet", "max-autotune-no-cudagraphs"),
    ("unet", "max-autotune"),
)
PARTS = {"unet": "U-Net step", "vae": "VAE decode"}


@dataclass(frozen=True)
class Memory:
    """MiB of a part's weights, and of what one call held at most beside everything that was there before."""

    weights_mib: float
    call_mib: float

    @property
    def peak_mib(self) -> float:
        """Return the peak of a process that holds this part alone."""
        return self.weights_mib + self.call_mib


def main(argv: list[str]) -> int:
    """Measure number formats, memory formats and compile modes; print a table as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="tiny models, on whatever there is")
    parser.add_argument("--skip", nargs="*", default=[], choices=["precision", "layout", "modes"])
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms")
    parser.add_argument("--modes", nargs="*", default=[f"{part}:{mode}" for part, mode in MODES], metavar="PART:MODE")
    parser.add_argument("--last-compile-after-s", type=float, default=float("inf"), help="start none later than that")
    parser.add_argument("--json", type=Path, help="every time in seconds")
    settings = parser.parse_args(argv)
    if not torch.cuda.is_available() and not settings.tiny:
        print("benchmarks.sdxl_shapes: expected a GPU, found none; run it on one, or with --tiny", file=sys.stderr)
        return 1
    start, times = time.perf_counter(), {}
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    print(describe_machine(), flush=True)
    inputs = Inputs(tiny=settings.tiny)
    with torch.no_grad():
        if "precision" not in settings.skip:
            times["precision"] = show_precision(inputs, settings.rounds)
            write_times(settings.json, times)
        if "layout" not in settings.skip:
            times["layout"] = show_layouts(inputs, settings.rounds)
            write_times(settings.json, times)
        for key in settings.modes if "modes" not in settings.skip else ():
            if time.perf_counter() - start < settings.last_compile_after_s:
                times[key] = show_mode(inputs, *key.split(":"), rounds=settings.rounds)
                write_times(settings.json, times)
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    return 0


def show_precision(inputs: Inputs, rounds: int) -> dict[str, list[float]]:
    """Time and weigh both parts in each number format, and print them alone and as a whole image."""
    runs: dict[Any, Run] = {}
    memory: dict[Any, Memory] = {}
    for part in PARTS:
        for name, dtype in DTYPES.items():
            model = inputs.build(part, dtype)
            runs[part, name] = inputs.bind(part, model)
            if dtype is torch.float32:
                runs[part, "float32, no TF32"] = inputs.bind(part, model, tf32=False)
            for key in [key for key in runs if key not in memory]:
                memory[key] = weigh(inputs, runs[key], model)
    times = time_both_ways(inputs, runs, rounds)
    for part, title in PARTS.items():
        exact = runs[part, "float32, no TF32"]()
        print(
            f"\n| {title} | as called, ms | to float16 | as a CUDA graph, ms | to float16 | peak MiB | of it weights "
            "| to float16 | off, of the std |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
        )
        for name in ("float32, no TF32", *DTYPES):
            key, base = (part, name), (part, "float16")
            columns = [
                column
                for how in HOW
                for column in (milliseconds(times[*key, how]), ratio(times[*key, how], times[*base, how]))
            ]
            print(
                f"| {name} | {' | '.join(columns)} | {memory[key].peak_mib:,.0f} | {memory[key].weights_mib:,.0f} "
                f"| {memory[key].peak_mib / memory[base].peak_mib:.2f} "
                f"| {difference(runs[key](), exact):.1e} |",
                flush=True,
            )
    show_whole_images(times, memory)
    return {" ".join(key): values for key, values in times.items()}


def show_whole_images(times: Mapping[Any, Sequence[float]], memory: Mapping[Any, Memory]) -> None:
    """Print what steps and decode add up to, in each round, and what both parts hold together."""
    print(
        f"\n| {NUM_STEPS} U-Net steps | and decode | as called, ms | to float16 | as CUDA graphs, ms | to float16 "
        "| decode's share | peak MiB | to float16 |\n|---|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    whole, peak = {}, {}
    for unet, vae in PAIRS:
        for how in HOW:
            both = zip(times["unet", unet, how], times["vae", vae, how], strict=True)
            whole[unet, vae, how] = [NUM_STEPS * step + decode for step, decode in both]
        parts = memory["unet", unet], memory["vae", vae]
        peak[unet, vae] = sum(part.weights_mib for part in parts) + max(part.call_mib for part in parts)
    base = PAIRS[-1]
    for pair in PAIRS:
        columns = [
            column
            for how in HOW
            for column in (milliseconds(whole[*pair, how]), ratio(whole[*pair, how], whole[*base, how]))
        ]
        share = ratio(times["vae", pair[1], "replayed"], whole[*pair, "replayed"])
        print(
            f"| {' | '.join([*pair, *columns, share])} | {peak[pair]:,.0f} | {peak[pair] / peak[base]:.2f} |",
            flush=True,
        )


def show_layouts(inputs: Inputs, rounds: int) -> dict[str, list[float]]:
    """Time both parts in float16 with channels first and last."""
    runs: dict[Any, Run] = {}
    memory: dict[Any, Memory] = {}
    for part in PARTS:
        first = inputs.build(part, torch.float16)
        for name, model in (("NCHW", first), ("NHWC", copy.deepcopy(first).to(memory_format=torch.channels_last))):
            runs[part, name] = inputs.bind(part, model)
            memory[part, name] = weigh(inputs, runs[part, name], model)
    times = time_both_ways(inputs, runs, rounds)
    print("\n| float16 | timed | NCHW, ms | NHWC, ms | NHWC to NCHW | peak MiB, NCHW | NHWC | off, of the std |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for part, title in PARTS.items():
        first, last = (part, "NCHW"), (part, "NHWC")
        off = difference(runs[last](), runs[first]())
        for how in HOW:
            print(
                f"| {title} | {how} | {milliseconds(times[*first, how])} | {milliseconds(times[*last, how])} "
                f"| {ratio(times[*last, how], times[*first, how])} | {memory[first].peak_mib:,.0f} "
                f"| {memory[last].peak_mib:,.0f} | {off:.1e} |",
                flush=True,
            )
    return {" ".join(key): values for key, values in times.items()}


def show_mode(inputs: Inputs, part: str, mode: str, *, rounds: int) -> dict[str, list[float]]:
    """Compile one part in one mode, float16, and time it against eager; the compiler may change memory formats."""
    torch._dynamo.reset()
    eager = inputs.build(part, torch.float16)
    start = time.perf_counter()
    call = torch.compile(eager if part == "unet" else eager.decode, mode=mode)
    runs = {"eager": inputs.bind(part, eager), mode: inputs.bind(part, eager, call=call)}
    off = difference(runs[mode](), runs["eager"]())
    seconds = time.perf_counter() - start
    times = time_rounds(inputs, runs, rounds)
    print(f"\n| {PARTS[part]}, float16 | ms | eager, ms | time to eager | compiled in s | off, of the std |")
    print("|---|---:|---:|---:|---:|---:|")
    print(
        f"| {mode} | {milliseconds(times[mode])} | {milliseconds(times['eager'])} "
        f"| {ratio(times[mode], times['eager'])} | {seconds:.0f} | {off:.1e} |",
        flush=True,
    )
    return times


def time_both_ways(inputs: Inputs, runs: Mapping[Any, Run], rounds: int) -> dict[Any, list[float]]:
    """Time each run as called and as a CUDA graph, in turn; the way is the last of a key."""
    both = {(*key, "called"): run for key, run in runs.items()}
    both |= {(*key, "replayed"): capture(run, inputs.device) for key, run in runs.items()}
    return time_rounds(inputs, both, rounds)


def time_rounds(inputs: Inputs, runs: Mapping[Any, Run], rounds: int) -> dict[Any, list[float]]:
    """Return the seconds of each run in each round; they take turns, and each round starts with another one."""
    names, times = list(runs), {name: [] for name in runs}
    for name in names * WARM_UPS:
        runs[name]()
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            synchronize(inputs.device)
            start = time.perf_counter()
            runs[name]()
            synchronize(inputs.device)
            times[name].append(time.perf_counter() - start)
    return times


def weigh(inputs: Inputs, run: Run, model: Any) -> Memory:
    """Return a part's weights and what one warmed-up call of it held at most beside what was there, in MiB."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    run()
    if inputs.device != "cuda":
        return Memory(weights, 0.0)
    synchronize(inputs.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    synchronize(inputs.device)
    return Memory(weights, (torch.cuda.max_memory_allocated() - before) / 2**20)


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two outputs, in units of the expected one's standard deviation."""
    got, expected = got.double(), expected.double()
    return float((got - expected).abs().max() / expected.std())


def describe_machine() -> str:
    """Name the GPU and the versions that the numbers hold for."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else "no GPU"
    return (
        f"{name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, diffusers "
        f"{diffusers.__version__}, cudnn.benchmark {torch.backends.cudnn.benchmark}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
