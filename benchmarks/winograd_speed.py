"""How fast ncnn's direct, F(2,3) and F(4,3) kernels run the shipped people detector on a CPU, layer by layer and whole.

    python -m benchmarks.winograd_speed [--rounds 41] [--seconds 0.01]
    pip install 'ncnn>=1.0.20261020,<2'            the extra ncnn of pyproject.toml: nothing else needs it

**float32, not fp16.** ncnn has no fp16 arithmetic on x86: asked for fp16, its convolutions give the float32 output. So
the speed of Winograd comes from here, and what fp16 loses comes from the emulation (`pipeline/numerics/winograd.py`).

One image of 320 x 320, one thread. Each shape of a convolution is a network of its own with the shipped weights and
what an image feeds the layer, channels interleaved as ncnn keeps them between layers; direct is ncnn's matrix product
of gathered patches. Weights are transformed ahead of time and not counted. A time is in CPU seconds, over as many calls
as fill `--seconds`, after one that isn't counted; everything takes turns within a round, in one order and then in the
opposite. A ratio is taken within its round, intervals cover the median with 95 % (`pipeline/records/medians.py`).

A policy is timed twice: what its convolutions add up to, all 26 of them, and the whole detector as one network, with
upsampling and additions, unless it mixes F(2,3) and F(4,3), which ncnn can't be told to. Before any time is taken, each
output is compared with torch's, and no two algorithms may give the same bits: else ncnn has run something else. Not
covered: fp16 kernels, other CPUs, ncnn's F(6,3), several threads.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import platform
import sys
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.ncnn_nets import (
    ALGORITHMS,
    LEVELS,
    Layer,
    Run,
    bind_run,
    describe_detector,
    describe_layer,
    list_layers,
    load_network,
    unpack,
)
from evalsets.make.scenes import render
from models.people.detector import open_detector, preprocess
from pipeline.records.medians import bound_median
from pipeline.running.timing import TOLERANCES, compare_outputs

ROOT = Path(__file__).resolve().parent.parent
Key = TypeVar("Key", bound=Hashable)
WARM_UPS = 3


@dataclass(frozen=True)
class Policy:
    """Which algorithm runs a layer: that of its 3x3 convolutions with stride 1, but for some that are named."""

    name: str
    algorithm: str
    rules: tuple[tuple[str, str], ...] = ()  # pattern of layer names, algorithm

    @property
    def is_one_network(self) -> bool:
        """Tell whether ncnn can run it as one network: a layer of it can be kept from Winograd, and no more."""
        return {algorithm for _, algorithm in self.rules} <= {"direct"}

    def choose(self, layer: Layer) -> str:
        """Return the algorithm of a layer."""
        named = (algorithm for pattern, algorithm in self.rules if fnmatch.fnmatchcase(layer.name, pattern))
        return next(named, self.algorithm) if layer.takes_winograd else "direct"


POLICIES = (
    Policy("direct", "direct"),
    Policy("F(2,3)", "winograd_f23"),
    Policy("F(4,3)", "winograd_f43"),
    # what params.yaml's `winograd-calibrated` asks for
    Policy(
        "F(4,3), `branches.small.1.0` and `.2.0` F(2,3)",
        "winograd_f43",
        (("branches.small.1.0", "winograd_f23"), ("branches.small.2.0", "winograd_f23")),
    ),
    Policy("F(4,3), `branches.small.*` direct", "winograd_f43", (("branches.small.*", "direct"),)),
)


def main(argv: list[str]) -> int:
    """Check the outputs, time the layers and the policies, and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--seconds", type=float, default=0.01, help="CPU seconds that a time is taken over")
    settings = parser.parse_args(argv)
    if importlib.util.find_spec("ncnn") is None:
        print(
            "benchmarks.winograd_speed: expected ncnn, found none; pip install 'ncnn>=1.0.20261020,<2'", file=sys.stderr
        )
        return 1
    torch.set_num_threads(1)
    model = open_detector(ROOT / "models/people")
    x = preprocess(torch.from_numpy(render(np.random.default_rng(0)).pixels[None]))
    layers = list_layers(model, x)
    with torch.no_grad():
        layer_runs, off = bind_layers(layers)
        policy_runs, policy_off = bind_policies(layers, x, [level[0] for level in model(x)])
    times = time_rounds(layer_runs | policy_runs, settings.rounds, settings.seconds)
    print(describe_machine())
    show_layers(layers, times, off)
    show_policies(layers, times, policy_off)
    return 0


def bind_layers(layers: Sequence[Layer]) -> tuple[dict[Any, Run], dict[Any, float]]:
    """Return what runs each shape of layer by each algorithm, and how far any layer of that shape is from torch's.

    Raises:
        ValueError: an output is wrong, or ncnn did not run the algorithm.
    """
    runs: dict[Any, Run] = {}
    off: dict[Any, float] = {}
    for layer in layers:
        expected, outputs = layer.conv(layer.x)[0], {}
        for algorithm in ALGORITHMS if layer.takes_winograd else ("direct",):
            key, operations = (layer.shape, algorithm), describe_layer(layer)
            net = load_network(operations, layers, algorithm)
            outputs[algorithm] = unpack(bind_run(net, layer.x, ["out"], is_raw=False)())[0]
            off[key] = max(off.get(key, 0.0), check_output(outputs[algorithm], expected, f"{layer.name}, {algorithm}"))
            runs.setdefault(key, bind_run(net, layer.x, ["out"], is_raw=True))
        check_algorithms(outputs, layer.name)
    return runs, off


def bind_policies(
    layers: Sequence[Layer], x: torch.Tensor, expected: Sequence[torch.Tensor]
) -> tuple[dict[Any, Run], dict[Any, float]]:
    """Return what runs the whole detector under each policy that ncnn can, and how far its outputs are from torch's."""
    runs: dict[Any, Run] = {}
    off: dict[Any, float] = {}
    for policy in (policy for policy in POLICIES if policy.is_one_network):
        direct = [layer.name for layer in layers if layer.takes_winograd and policy.choose(layer) == "direct"]
        net = load_network(describe_detector(layers, direct=direct), layers, policy.algorithm)
        outputs = unpack(bind_run(net, x, LEVELS, is_raw=False)())
        off[policy.name] = max(
            check_output(got, want, f"{policy.name}, {level}")
            for got, want, level in zip(outputs, expected, LEVELS, strict=True)
        )
        runs[policy.name] = bind_run(net, x, LEVELS, is_raw=True)
    return runs, off


def check_output(got: torch.Tensor, expected: torch.Tensor, name: str) -> float:
    """Return how far an output is off, in units of the expected one's standard deviation.

    Raises:
        ValueError: it is off by more than float32 explains; its speed would be that of other work.
    """
    difference = compare_outputs(got, expected)
    if not difference <= TOLERANCES[torch.float32]:
        raise ValueError(
            f"{name}: expected torch's output within {TOLERANCES[torch.float32]:g} of its standard "
            f"deviation, got {difference:.1e}; nothing is timed"
        )
    return difference


def check_algorithms(outputs: Mapping[str, torch.Tensor], name: str) -> None:
    """Raise a ValueError where two algorithms gave the same bits: one of them can't have run."""
    known = list(outputs)
    for i, first in enumerate(known):
        for second in known[i + 1 :]:
            if torch.equal(outputs[first], outputs[second]):
                raise ValueError(
                    f"{name}: expected {first} and {second} to differ in their last bits, got equal "
                    "outputs; ncnn has ignored one of them"
                )


def time_rounds(runs: Mapping[Key, Run], rounds: int, seconds: float) -> dict[Key, list[float]]:
    """Return the CPU seconds of one call of each run in each round; they take turns, to and fro."""
    names = list(runs)
    times: dict[Key, list[float]] = {name: [] for name in runs}
    calls = {name: count_calls(runs[name], seconds) for name in names}
    for i in range(rounds):
        order = names if i % 2 == 0 else names[::-1]
        for name in order:
            runs[name]()  # whose memory the run before has pushed out of the caches
            start = time.process_time()
            for _ in range(calls[name]):
                runs[name]()
            times[name].append((time.process_time() - start) / calls[name])
    return times


def count_calls(run: Run, seconds: float) -> int:
    """Warm a run up; return how many calls fill so many CPU seconds."""
    took = []
    for _ in range(WARM_UPS):
        start = time.process_time()
        run()
        took.append(time.process_time() - start)
    return max(1, round(seconds / max(min(took), 1e-6)))


def add_up(policy: Policy, layers: Sequence[Layer], times: Mapping[Any, Sequence[float]]) -> list[float]:
    """Return what the convolutions of a policy take together, in each round."""
    chosen = [times[layer.shape, policy.choose(layer)] for layer in layers]
    return [sum(seconds) for seconds in zip(*chosen, strict=True)]


def show_layers(layers: Sequence[Layer], times: Mapping[Any, Sequence[float]], off: Mapping[Any, float]) -> None:
    """Print a row for each shape that a Winograd algorithm takes."""
    print(
        "\n| channels | pixels | layers | direct, ms | F(2,3), ms | F(4,3), ms | F(2,3) to direct | F(4,3) to direct "
        "| off, of the std: direct | F(2,3) | F(4,3) |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for shape, count in Counter(layer.shape for layer in layers if layer.takes_winograd).items():
        base, *others = ([*times[shape, algorithm]] for algorithm in ALGORITHMS)
        columns = [milliseconds(column) for column in (base, *others)] + [ratio(column, base) for column in others]
        columns += [f"{off[shape, algorithm]:.1e}" for algorithm in ALGORITHMS]
        print(f"| {shape[0]} to {shape[1]} | {shape[4]} x {shape[5]} | {count} | {' | '.join(columns)} |", flush=True)


def show_policies(layers: Sequence[Layer], times: Mapping[Any, Sequence[float]], off: Mapping[str, float]) -> None:
    """Print a row for each policy: its convolutions added up, and the whole detector."""
    print(
        "\n| policy | convolutions by Winograd | sum of all convolutions, ms | to direct | whole detector, ms "
        "| to direct | off, of the std |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    base, base_sum = times[POLICIES[0].name], add_up(POLICIES[0], layers, times)
    for policy in POLICIES:
        count = sum(policy.choose(layer) != "direct" for layer in layers)
        columns = [
            describe_time(add_up(policy, layers, times), base_sum),
            describe_time(times[policy.name], base) if policy.is_one_network else "– | –",
            f"{off[policy.name]:.1e}" if policy.is_one_network else "–",
        ]
        print(f"| {policy.name} | {count} of {len(layers)} | {' | '.join(columns)} |", flush=True)


def describe_time(seconds: Sequence[float], base: Sequence[float]) -> str:
    """Write a time and its ratio to that of the first policy, two columns."""
    return f"{milliseconds(seconds)} | {1 if seconds == base else ratio(seconds, base)}"


def milliseconds(seconds: Sequence[float]) -> str:
    """Write the median of times."""
    return f"{1e3 * bound_median(seconds).median:.3f}"


def ratio(seconds: Sequence[float], base: Sequence[float]) -> str:
    """Write the median of the ratios within a round, with its interval."""
    found = bound_median([s / b for s, b in zip(seconds, base, strict=True)])
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"


def describe_machine() -> str:
    """Name the CPU and the versions that the numbers hold for."""
    import ncnn

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    sets = [s for s in ("avx2", "avx512f", "avx512_fp16") if any(s in line.split() for line in lines)]
    return f"{name} ({', '.join(sets)}), one thread, ncnn {ncnn.__version__}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
