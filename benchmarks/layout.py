"""What channels-last does to the shipped U-Net and VAE on a CPU, and how sure the decision to keep it is.

    python -m benchmarks.layout [--repeats 20] [--rounds 20] [--batch 16] [--parts unet vae] [--modes eager compiled]

One thread, float32, `models/product-shots`, the first prompts of `evalsets/shots` in one batch. Each repeat measures as
`pipeline/products/images/layout.py` does, pairs of CPU seconds in turn on what the pipeline feeds the part, and decides
anew; eager repeats copy the part anew too, compiled ones share one compilation. Then a process of its own, with
ONEDNN_VERBOSE=1, logs one call in each memory format, and the reorders of activations in it are counted. Not covered:
copies that torch makes outside oneDNN, several threads, GPUs (`benchmarks/sdxl_shapes.py`).
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from pipeline.evalsets.cards import load_evalset
from pipeline.products.images.layout import LayoutMeasurement, bind_layouts, measure_layout, measure_runs
from pipeline.products.images.rendering import Prompt, load_pipeline
from pipeline.records.serving import PipelineServing
from pipeline.running.memory_format import count_reorders
from pipeline.running.timing import TOLERANCES, compare_outputs

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "models/product-shots"
EVALSET = ROOT / "evalsets/shots"
SERVING = PipelineServing(num_inference_steps=20, guidance_scale=5.0)
# static shapes: else the second memory format would be compiled for strides that vary
COMPILE = functools.partial(torch.compile, dynamic=False)
WRAPS: dict[str, Any] = {"eager": lambda call: call, "compiled": COMPILE}
MARK = "logged call, channels"


def main(argv: list[str]) -> int:
    """Measure each part in each mode; print one row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--parts", nargs="*", default=["unet", "vae"], choices=["unet", "vae"])
    parser.add_argument("--modes", nargs="*", default=list(WRAPS), choices=list(WRAPS))
    parser.add_argument("--log", action="store_true", help=argparse.SUPPRESS)  # the process whose log is read
    settings = parser.parse_args(argv)
    torch.set_num_threads(1)
    pipe = load_pipeline(FOLDER, SERVING)
    prompts = [Prompt(case.prompt, case.seed) for case in load_evalset(EVALSET).cases[: settings.batch]]
    if settings.log:
        log_calls(pipe, settings.parts[0], settings.modes[0], prompts)
        return 0
    print(
        f"torch {torch.__version__}, one thread, float32, batches of {settings.batch}; outputs may differ by "
        f"{TOLERANCES[torch.float32]:g} of their standard deviation\n\n"
        "| part | mode | channels first, ms | last, ms | ratio, first repeat | median ratio of each repeat "
        "| outputs differ by | activation reorders, first | last | decisions |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
        flush=True,
    )
    for part in settings.parts:
        for mode in settings.modes:
            found = repeat_measurement(pipe, part, mode, prompts, repeats=settings.repeats, rounds=settings.rounds)
            print_row(found, mode, log_reorders(pipe, part, mode, settings.batch))
    return 0


def repeat_measurement(
    pipe: Any, part: Any, mode: str, prompts: list[Prompt], *, repeats: int, rounds: int
) -> list[LayoutMeasurement]:
    """Measure one part several times."""
    if mode == "eager":
        return [measure_layout(pipe, part, prompts, SERVING, rounds=rounds) for _ in range(repeats)]
    first, last = bind_layouts(pipe, part, prompts, SERVING, wrap=WRAPS[mode])
    difference = compare_outputs(last(), first())
    return [
        measure_runs(part, first, last, rounds=rounds, difference=difference, tolerance=TOLERANCES[torch.float32])
        for _ in range(repeats)
    ]


def print_row(found: list[LayoutMeasurement], mode: str, reorders: dict[str, int]) -> None:
    """Print what came of all repeats of one part."""
    decided = Counter(measurement.decision for measurement in found)
    medians = [measurement.ratio.median for measurement in found]
    seconds = [statistics.median(getattr(m, f"channels_{name}_s") for m in found) for name in ("first", "last")]
    ratio = found[0].ratio
    print(
        f"| {found[0].part} | {mode} | {1e3 * seconds[0]:.1f} | {1e3 * seconds[1]:.1f} "
        f"| {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) | {min(medians):.3f} to {max(medians):.3f} "
        f"| {max(m.difference for m in found):.1e} | {reorders['first']} | {reorders['last']} "
        f"| {', '.join(f'{name} {count}' for name, count in decided.items())} |",
        flush=True,
    )


def log_reorders(pipe: Any, part: str, mode: str, batch: int) -> dict[str, int]:
    """Count the activation reorders of one call in each memory format, in the log of a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.layout",
        "--log",
        "--parts",
        part,
        "--modes",
        mode,
        "--batch",
        str(batch),
    ]
    log = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"ONEDNN_VERBOSE": "1"}
    ).stdout
    calls = {text.split("\n", 1)[0].strip(): text for text in log.split(MARK)[1:]}
    shapes = {tuple(parameter.shape) for parameter in getattr(pipe, part).parameters()}
    return {name: count_reorders(text, shapes) for name, text in calls.items() if name != "end"}


def log_calls(pipe: Any, part: Any, mode: str, prompts: list[Prompt]) -> None:
    """Run one warm call in each memory format, each after a line that names it."""
    runs = bind_layouts(pipe, part, prompts, SERVING, wrap=WRAPS[mode])
    for name, run in zip(("first", "last"), runs, strict=True):
        run()
        print(f"{MARK} {name}", flush=True)
        run()
        print(f"{MARK} end", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
