"""What channels-last and compile modes do to the time of a pass: ResNet-50, a U-Net and a small MLP, on a GPU.

    python -m benchmarks.network_modes [--layouts ...] [--modes ...] [--blocks 20] [--cudnn-benchmark] [--json FILE]
    python -m benchmarks.network_modes --tiny          checks the script anywhere; its times mean nothing

A setting is network:batch:dtype for `--layouts` and network:batch:dtype:layout:mode for `--modes`. A pass is timed
between two synchronisations. What is compared takes turns in blocks of 50 passes (the U-Net 10), 20 blocks each after
four that are not counted: 1,000 passes timed and 200 not (200 and 40). A number is the median over blocks of a block's
median, with the interval that covers it with 95 % (`pipeline/records/medians.py`); a ratio is that of neighbouring
blocks.

Layouts are compared as called, with Python and every launch in it, and replayed as a CUDA graph, which is the GPU's own
time. A compile mode is compared with eager in NCHW, both as called. It is compiled with empty caches, and the seconds
of the first call are those. Counted are graphs, breaks between them, graphs that were compiled again
later, and graphs for which the compiler left CUDA graphs off. Nothing is timed whose output isn't that of eager NCHW in
the same number format, but for rounding (`find_tolerance` of `pipeline/running/timing.py`). Weights are random, shapes
static, one GPU. Not covered: training, batches that vary, several streams.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from benchmarks.gpu_timing import Run, bound_milliseconds, capture, ratio, synchronize, write_times
from benchmarks.mode_networks import Bench
from pipeline.running.timing import compare_outputs, find_tolerance

milliseconds = partial(bound_milliseconds, digits=3)

WARM_UP_BLOCKS = 4
LAYOUTS = (
    "resnet:16:float16",
    "resnet:1:float16",
    "resnet:16:bfloat16",
    "resnet:1:bfloat16",
    "resnet:16:float32",
    "resnet:1:float32",
    "unet:4:float16",
    "unet:4:bfloat16",
    "unet:4:float32",
)
# max-autotune tries kernels for minutes for each network: it comes last
MODES = tuple(
    f"{setting}:{mode}"
    for modes in (("default", "reduce-overhead"), ("max-autotune-no-cudagraphs", "max-autotune"))
    for setting in (
        "mlp:1:float16:NCHW",
        "mlp:64:float16:NCHW",
        "resnet:16:float16:NCHW",
        "resnet:1:float16:NCHW",
        "unet:4:float16:NCHW",
        "resnet:16:float16:NHWC",
        "resnet:1:float16:NHWC",
    )
    for mode in modes
)


@dataclass(frozen=True)
class Compiled:
    """What compiling a network came to."""

    run: Run
    first_call_s: float
    num_graphs: int  # of the first call

    def count_again(self) -> int:
        """Return how many graphs were compiled since the first call."""
        return counters["stats"]["unique_graphs"] - self.num_graphs


def main(argv: list[str]) -> int:
    """Measure layouts and compile modes; print a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS, metavar="NETWORK:BATCH:DTYPE")
    parser.add_argument("--modes", nargs="*", default=MODES, metavar="NETWORK:BATCH:DTYPE:LAYOUT:MODE")
    parser.add_argument("--blocks", type=int, default=20, help="blocks timed; six at least")
    parser.add_argument("--tiny", action="store_true", help="tiny networks, blocks of 2 passes, on whatever there is")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms")
    parser.add_argument("--last-compile-after-s", type=float, default=float("inf"), help="start none later than that")
    parser.add_argument("--json", type=Path, help="the median seconds of every block")
    settings = parser.parse_args(argv)
    if not torch.cuda.is_available() and not settings.tiny:
        print("benchmarks.network_modes: expected a GPU, found none; run it on one, or with --tiny", file=sys.stderr)
        return 1
    start, times = time.perf_counter(), {}
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    print(describe_machine(), flush=True)
    with torch.no_grad():
        if settings.layouts:
            print(
                "\n| network | batch | dtype | timed | NCHW, ms | NHWC, ms | NHWC to NCHW | off, of the std |"
                "\n|---|---:|---|---|---:|---:|---:|---:|"
            )
        for key in settings.layouts:
            times[key] = show_layouts(key, blocks=settings.blocks, tiny=settings.tiny)
            write_times(settings.json, times)
        if settings.modes:
            print(
                "\n| network | batch | dtype | layout | mode | ms | eager NCHW, ms | to eager | first call, s "
                "| graphs | breaks | compiled again | without CUDA graphs | off, of the std |\n"
                "|---|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
            )
        for key in settings.modes:
            if time.perf_counter() - start < settings.last_compile_after_s:
                times[key] = show_mode(key, blocks=settings.blocks, tiny=settings.tiny)
                write_times(settings.json, times)
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    return 0


def show_layouts(key: str, *, blocks: int, tiny: bool) -> dict[str, list[float]]:
    """Time a network with channels first and last, as called and as CUDA graphs, and print a row of each."""
    name, batch, dtype = key.split(":")
    bench = Bench(name, int(batch), getattr(torch, dtype), tiny=tiny)
    runs = {layout: bench.bind(bench.build(layout), layout) for layout in ("NCHW", "NHWC")}
    expected = runs["NCHW"]().clone()
    runs |= {f"{layout} replayed": capture(run, bench.device) for layout, run in runs.items()}
    differences = [compare_outputs(run(), expected) for run in runs.values()]
    head, off = f"| {bench.network.title} | {batch} | {dtype} |", max(differences)
    if not all(difference <= find_tolerance(bench.dtype, torch.device(bench.device)) for difference in differences):
        print(f"{head} not timed: outputs differ | | | | {off:.1e} |", flush=True)
        return {}
    times = time_blocks(bench, runs, blocks, tiny=tiny)
    for how, suffix in (("as called", ""), ("as a CUDA graph", " replayed")):
        first, last = times[f"NCHW{suffix}"], times[f"NHWC{suffix}"]
        print(
            f"{head} {how} | {milliseconds(first)} | {milliseconds(last)} | {ratio(last, first)} | {off:.1e} |",
            flush=True,
        )
    return times


def show_mode(key: str, *, blocks: int, tiny: bool) -> dict[str, list[float]]:
    """Compile a network in one mode, time it against eager with channels first, and print a row."""
    name, batch, dtype, layout, mode = key.split(":")
    bench = Bench(name, int(batch), getattr(torch, dtype), tiny=tiny)
    runs = {"eager": bench.bind(bench.build("NCHW"), "NCHW")}
    expected = runs["eager"]().clone()
    with fresh_cache():
        compiled = compile_network(bench, layout, mode)
        runs[mode] = compiled.run
        off = compare_outputs(runs[mode](), expected)
        head = f"| {bench.network.title} | {batch} | {dtype} | {layout} | `{mode}` |"
        if not off <= find_tolerance(bench.dtype, torch.device(bench.device)):
            print(f"{head} not timed: outputs differ | | | {' | ' * 5}{off:.1e} |", flush=True)
            return {}
        times = time_blocks(bench, runs, blocks, tiny=tiny)
    breaks = sum(counters["graph_break"].values())
    print(
        f"{head} {milliseconds(times[mode])} | {milliseconds(times['eager'])} | {ratio(times[mode], times['eager'])} "
        f"| {compiled.first_call_s:.0f} | {compiled.num_graphs} | {breaks} | {compiled.count_again()} "
        f"| {counters['inductor']['cudagraph_skips']} | {off:.1e} |",
        flush=True,
    )
    return times


def compile_network(bench: Bench, layout: str, mode: str) -> Compiled:
    """Compile a network, with nothing known from earlier ones, and call it once."""
    torch._dynamo.reset()
    counters.clear()
    run = bench.bind(torch.compile(bench.build(layout), mode=mode, dynamic=False), layout)
    start = time.perf_counter()
    run()
    synchronize(bench.device)
    return Compiled(run, time.perf_counter() - start, counters["stats"]["unique_graphs"])


def time_blocks(bench: Bench, runs: Mapping[str, Run], blocks: int, *, tiny: bool) -> dict[str, list[float]]:
    """Return the median seconds of a pass in each block; the runs take turns, to and fro."""
    passes = 2 if tiny else bench.network.block_passes
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(WARM_UP_BLOCKS + blocks):
        for name in runs if i % 2 == 0 else reversed(list(runs)):
            seconds = time_passes(bench, runs[name], passes)
            if i >= WARM_UP_BLOCKS:
                times[name].append(statistics.median(seconds))
    return times


def time_passes(bench: Bench, run: Callable[[], Any], passes: int) -> list[float]:
    """Return the seconds of each of several passes, the GPU idle before and after it."""
    seconds = []
    synchronize(bench.device)
    for _ in range(passes):
        start = time.perf_counter()
        run()
        synchronize(bench.device)
        seconds.append(time.perf_counter() - start)
    return seconds


def describe_machine() -> str:
    """Name the GPU and the versions that the numbers hold for."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "a CPU"
    cudnn = torch.backends.cudnn
    return f"{name}, torch {torch.__version__}, cuDNN {cudnn.version()}, cudnn.benchmark {cudnn.benchmark}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
