"""A decode of SDXL's VAE at 1024 px: float32, TF32, and float32 by parts on tensor cores, beside float64.

    python -m benchmarks.split_products          half a minute on a GPU
    python -m benchmarks.split_products --tiny   the same code paths on a CPU, where no row is faster

Weights are random. Errors are those of one picture, in units of its standard deviation. On a GPU that gains nothing by
parts (`pipeline/numerics/split_products.py`) the last row is plain float32.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from contextlib import AbstractContextManager

import torch

from benchmarks.sdxl_models import Inputs
from pipeline.numerics.split_products import SplitProducts

ROUNDS = 7
ROWS: dict[str, tuple[bool, AbstractContextManager[object]]] = {
    "float32": (False, contextlib.nullcontext()),
    "TF32": (True, contextlib.nullcontext()),
    "float32 by parts": (False, SplitProducts()),
}


def time_decode(inputs: Inputs, model: torch.nn.Module, name: str) -> tuple[torch.Tensor, float, float]:
    """Return a picture, the median ms of a decode after one to warm up, and the GiB that tensors took at most."""
    tf32, by_parts = ROWS[name]
    run, times = inputs.bind("vae", model, tf32=tf32), []
    on_gpu = inputs.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode(), by_parts:
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            picture = run()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - start))
    return picture, statistics.median(times[1:]), torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def main() -> None:
    """Decode in each way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a network of a second")
    inputs = Inputs(tiny=parser.parse_args().tiny)
    with torch.inference_mode():
        exact = inputs.bind("vae", inputs.build("vae", torch.float64))().cpu()
    model = inputs.build("vae", torch.float32)
    print("| decode | ms | off, mean square | off at most | GiB |\n|---|---:|---:|---:|---:|")
    for name in ROWS:
        picture, took_ms, peak = time_decode(inputs, model, name)
        off = (picture.double().cpu() - exact) / exact.std()
        mean, most = float(off.square().mean().sqrt()), float(off.abs().max())
        print(f"| {name} | {took_ms:.1f} | {mean:.1e} | {most:.1e} | {peak:.1f} |", flush=True)


if __name__ == "__main__":
    main()
