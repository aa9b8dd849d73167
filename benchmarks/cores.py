"""How much work do several cores of this machine do at once, in times of one core's?

    python -m benchmarks.cores [1 2 4 8 16]

Processes that evaluate gain no more by them. Virtual cores share a core's units, and all of them a clock and a memory.
Each process is bound to a core, and does what decoding a small language model on a CPU is made of: products of small
matrices, and keys gathered for attention. Prints a row of Markdown for each number of processes. The first that are
done leave the others alone, so the figure is a little too high.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

NUM_STEPS = 1_000
_ROWS, _WIDTH, _INNER = 128, 256, 768
_HEADS, _REQUESTS, _LENGTH, _CACHED = 4, 4, 130, 40_000


def work() -> None:
    """Say that everything is ready, wait for a line, do the work and print its seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, up, down = torch.randn(_ROWS, _WIDTH), torch.randn(_INNER, _WIDTH), torch.randn(_WIDTH, _INNER)
    cache, pages = torch.randn(_CACHED, _WIDTH), torch.randint(0, _CACHED, (_REQUESTS * _LENGTH,))
    query = torch.randn(_REQUESTS, _HEADS, 1, _WIDTH // _HEADS)

    def step() -> None:
        silu(x @ up.t()) @ down.t()
        for _ in range(8):
            keys = cache.index_select(0, pages).view(_REQUESTS, _LENGTH, _HEADS, -1).transpose(1, 2)
            scaled_dot_product_attention(query, keys, keys)

    for _ in range(NUM_STEPS // 20):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    for _ in range(NUM_STEPS):
        step()
    print(time.perf_counter() - start)


def time_together(cores: list[int]) -> list[float]:
    """Return the seconds of each of several processes that work at the same time, each on a core."""
    command = [sys.executable, "-m", "benchmarks.cores", "--core"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen([*command, str(core)], text=True, **pipes) for core in cores]  # type: ignore[call-overload]
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    seconds = [float(process.stdout.readline()) for process in processes]
    for process in processes:
        process.wait()
    return seconds


def main(arguments: list[str]) -> None:
    """Time one process, then as many as are asked for."""
    if arguments[:1] == ["--core"]:
        os.sched_setaffinity(0, {int(arguments[1])})
        work()
        return
    cores = sorted(os.sched_getaffinity(0))
    counts = [int(argument) for argument in arguments] or [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= len(cores)]
    if max(counts) > len(cores):
        raise SystemExit(f"expected numbers of processes up to {len(cores)}, the cores here, got {max(counts)}")
    [alone] = time_together(cores[:1])
    print("| processes | s each | times the work of one |\n|---:|---:|---:|")
    for count in counts:
        seconds = time_together(cores[:count])
        print(f"| {count} | {sum(seconds) / count:.2f} | {sum(alone / s for s in seconds):.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
