"""What a candidate costs beside its baseline: time, memory, compilation, and whether its memory format survives.

The baseline of a memory format or of compilation is the same candidate without them, as that is the choice at hand.
Any other candidate is timed beside the same weights run plainly, in float32 without a step, in the same tiles where
there are any.
The total time of a candidate is shown beside the reference run plainly, too: channels-last may be five times as fast
as bfloat16 without it where float32 is forty times as fast. What is slower in total has no gain, and is timed no
further.

Time is of one batch, in pairs whose order alternates, while no other batches run (`running/turns.py`). Of the same
weights it is shown only where both outputs are equal within the number format's rounding (`rounding.py`). Another
checkpoint, as an INT8 artefact is, and tiles beside whole pictures give other outputs by nature: their loss is the
gate's matter. An emulated policy has no speed of its own (`benchmarks/winograd_speed.py` measures real kernels).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from pipeline.errors import EngineError
from pipeline.numerics.tile_grid import place_tiles
from pipeline.products.vision.int8_conv import read_kernels
from pipeline.products.vision.loading import Network, list_tensors
from pipeline.products.vision.rounding import differ, limit_rounding
from pipeline.records.medians import MIN_ROUNDS, bound_median
from pipeline.records.serving import NetworkServing
from pipeline.running.memory_format import count_reorders, list_other_formats, log_onednn
from pipeline.running.timing import find_tolerance, measure_peak_bytes, read_seconds, time_in_turn
from pipeline.running.turns import keep_nobody_waiting

ROUNDS = 12  # pairs that are timed where their ratio decides; else MIN_ROUNDS
_LIMIT_REACHED = "Dynamo recompile limit exceeded"  # starts the reason that torch counts (_dynamo/convert_frame.py)
_LAYOUT = {"channels_last": False, "compile_mode": None, "compile_dynamic": None}

Floats = NDArray[np.float64]
Load = Callable[[NetworkServing], Network]  # the candidate's own weights, run in another way


def choose_baseline(serving: NetworkServing) -> NetworkServing | None:
    """Return what a candidate is timed against; None where its time would say nothing."""
    other = serving.model_copy(update=_LAYOUT)
    return other if other != serving and not serving.conv_policy else serving.plain_tiled


def measure_costs(
    load: Load,
    network: Network,
    timed: torch.Tensor,
    largest: torch.Tensor,
    batches: Iterable[torch.Tensor],
    *,
    load_reference: Load | None = None,
) -> dict[str, Any]:
    """Return what is noted of a candidate's costs, as JSON.

    Args:
        load: sets the candidate's network up as a serving config says.
        network: the candidate's, which has not run yet.
        timed: batch of uint8 pixels, (pictures, rows, columns, 3).
        largest: the largest picture, (1, rows, columns, 3), whose memory is weighed.
        batches: one of each shape that the eval meets; read only where something is compiled.
        load_reference: sets the reference's weights up, where the candidate's are others.
    """
    serving = network.serving
    # first: what is timed then is what has met every shape, as the network that serves has
    compilations = _count_compilations(network, batches)
    _check_repeats(network, timed)
    x = network.prepare(timed)
    kernels = read_kernels(network.module, partial(network.run, x))
    is_emulated = kernels is not None and kernels["num_kernel_calls"] < kernels["num_layers"]
    speed, total = (None, None) if is_emulated else _measure_speeds(load, serving, timed, network, load_reference)
    return {
        "int8": kernels,
        "speed": speed,
        "total": total,
        "compile": compilations,
        "layout": _follow_layout(load, serving, timed),
        "peak_mib": _measure_peak_mib(load, serving, largest),
        "peak_pixels": list(largest.shape[1:3]),
        "work": count_work(largest.shape[1:3], serving),
    }


def _measure_speeds(
    load: Load, serving: NetworkServing, pixels: torch.Tensor, network: Network, load_reference: Load | None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the times beside the candidate's baseline and beside the reference run plainly."""
    baseline, plain = choose_baseline(serving), serving.choose_total(is_other=load_reference is not None)
    total = measure_speed(load, serving, plain, pixels, network, load_base=load_reference) if plain else None
    if baseline == plain and load_reference is None:
        return total, total
    if baseline is None or is_surely_slower(total):
        return None, total
    return measure_speed(load, serving, baseline, pixels, network), total


def is_surely_slower(speed: dict[str, Any] | None) -> bool:
    """Say whether a result of `measure_speed` is surely slower than its baseline, by some clock."""
    clocks = speed["timed"] if speed else None
    return any(clock["ratio"]["low"] > 1 for clock in (clocks or {}).values())


def _check_repeats(network: Network, pixels: torch.Tensor) -> None:
    """Refuse a network that gives other outputs for the same pictures: one draw would be judged as if it were all."""
    x = network.prepare(pixels)
    outputs = [[t.float().nan_to_num() for t in list_tensors(network.run(x))] for _ in range(2)]
    tolerance = find_tolerance(getattr(torch, network.serving.dtype), network.device)
    if (difference := differ(*outputs).max()) > tolerance:
        raise EngineError(
            f"{network.adapter.path}: two runs of the same pictures differ by {difference:.2g} of the "
            f"outputs' standard deviation, expected at most {tolerance:g}; take what is random out of "
            "the module"
        )


def measure_speed(
    load: Load,
    serving: NetworkServing,
    base: NetworkServing,
    pixels: torch.Tensor,
    network: Network | None = None,
    *,
    load_base: Load | None = None,
) -> dict[str, Any]:
    """Return the times of a candidate and of its baseline on one batch, in CPU seconds and by the wall clock, as JSON.

    `timed` is None where the outputs differ by more than rounding; those of other weights or tiles are not compared. A
    network that is given is the candidate's, loaded before; `load_base` loads the baseline where its weights are
    others.
    """
    ours, theirs = network or load(serving), (load_base or load)(base)
    x, y = ours.prepare(pixels), theirs.prepare(pixels)
    speed: dict[str, Any] = {
        "baseline": f"the reference, {theirs.serving.summary}" if load_base else base.summary,
        "difference": None,
        "tolerance": None,
        "timed": None,
    }
    if load_base is None and base.tiling == serving.tiling:
        differences = differ(ours.run(x), theirs.run(y))
        exact = load(serving.model_copy(update=_LAYOUT | {"dtype": "float32", "autocast": False}))
        limits = limit_rounding(exact, pixels, getattr(torch, serving.dtype), len(differences))
        worst = int(np.argmax(differences / limits))  # NaN is the largest
        speed |= {"difference": _finite(differences[worst]), "tolerance": _finite(limits[worst])}
        if not (differences <= limits).all():
            return speed

    def clock() -> Floats:
        return np.array([read_seconds(ours.device), time.perf_counter()])

    decides = base == serving.model_copy(update=_LAYOUT) and load_base is None
    rounds = ROUNDS if decides else MIN_ROUNDS
    # [round, theirs or ours, clock]
    pairs: Floats = np.array(time_in_turn(lambda: theirs.run(y), lambda: ours.run(x), rounds=rounds, clock=clock))
    names = ("cpu" if ours.device.type == "cpu" else "device", "wall")
    return speed | {
        "timed": {
            name: {
                "baseline_ms": bound_median((1e3 * pairs[:, 0, i] / len(pixels)).tolist()).model_dump(),
                "candidate_ms": bound_median((1e3 * pairs[:, 1, i] / len(pixels)).tolist()).model_dump(),
                "ratio": bound_median((pairs[:, 1, i] / pairs[:, 0, i]).tolist()).model_dump(),
            }
            for i, name in enumerate(names)
        },
        "clock": names[0],
        "batch": len(pixels),
        "rounds": rounds,
    }


def _count_compilations(network: Network, batches: Iterable[torch.Tensor]) -> dict[str, Any] | None:
    """Return what compilation met from its first call on, over one batch of each shape.

    Graphs and graph breaks are counted on the first shape, recompilations on the others. A worker's cache is empty at
    first, so its first call takes as long as on a machine that never saw the network. Others go on: no verdict
    rests on its seconds. Where torch has compiled a function as often as its limit allows, it runs it without for every
    further shape and only logs it: `num_over_limit` counts such functions, `shape_over_limit` is the number of the
    shape that was the first.
    """
    if network.serving.compile_mode is None:
        return None
    from torch._dynamo import config
    from torch._dynamo.utils import counters, graph_break_reasons

    torch._dynamo.reset()
    counters.clear()
    graphs: list[int] = []
    breaks, over, seconds = [], [], []
    with keep_nobody_waiting():
        for pixels in batches:
            start = time.perf_counter()
            network.run(network.prepare(pixels))
            seconds.append(time.perf_counter() - start)
            graphs.append(counters["stats"]["unique_graphs"])
            breaks.append(len(graph_break_reasons))  # the counter of that name leaves data-dependent branches out
            over.append(sum(n for why, n in counters["unimplemented"].items() if why.startswith(_LIMIT_REACHED)))
    return {
        "mode": network.serving.compile_mode,
        "num_graphs": graphs[0],
        "num_recompilations": graphs[-1] - graphs[0],
        "num_graph_breaks": breaks[0],
        "num_shapes": len(graphs),
        "first_call_s": round(seconds[0], 2),
        "limit": config.recompile_limit,
        "num_over_limit": over[-1],
        "shape_over_limit": next((i for i, num in enumerate(over, start=1) if num), None),
    }


def _follow_layout(load: Load, serving: NetworkServing, pixels: torch.Tensor) -> dict[str, Any] | None:
    """Return whether channels-last survives: which modules write another format, and what oneDNN copies."""
    if not serving.channels_last:
        return None
    eager = load(serving.model_copy(update={"compile_mode": None, "compile_dynamic": None}))
    networks = {"last": load(serving), "first": load(serving.model_copy(update={"channels_last": False}))}
    weights = {tuple(parameter.shape) for parameter in eager.module.parameters()}
    x = {name: network.prepare(pixels) for name, network in networks.items()}
    with keep_nobody_waiting() if serving.compile_mode else contextlib.nullcontext():
        for name, network in networks.items():
            network.run(x[name])  # compiles, and reorders weights
    return {
        "other_formats": list_other_formats(eager.module, lambda: eager.run(x["last"])),
        "num_reorders": {
            name: count_reorders(log_onednn(partial(network.run, x[name])), weights)
            for name, network in networks.items()
        },
    }


def _measure_peak_mib(load: Load, serving: NetworkServing, pixels: torch.Tensor) -> float | None:
    """Return the MiB that running one picture takes at most, weights included; of a compiled one without compiling.

    On a CPU nothing is computed: tensors without content are counted. None where a module can't run on those, and for
    an emulation.
    """
    if serving.conv_policy:
        return None
    network = load(serving.model_copy(update={"compile_mode": None, "compile_dynamic": None}))
    stored = itertools.chain(network.module.parameters(), network.module.buffers())  # INT8 weights are buffers
    weights = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    x = network.prepare(pixels)
    if network.device.type != "cpu":
        return round((measure_peak_bytes(lambda: network.run(x), network.device) + weights) / 2**20, 2)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            state = {name: mode.from_tensor(tensor) for name, tensor in network.module.state_dict().items()}
            network.call = partial(functional_call, network.module, state)
            if serving.tiling:
                network.call = _run_twice(network.call)
            peak = measure_peak_bytes(lambda: network.run(mode.from_tensor(x)), network.device)
    except Exception:  # whatever a module does with values that are not there
        return None
    return round((peak + weights) / 2**20, 2)


def _run_twice(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a call that gives empty outputs from its third tile on.

    Tiles are of one size, and what holds the most is any but the first, which is run before there is a picture to put
    it in. A picture has dozens, and each operation without content takes about as long as a small one with.
    """
    ran: list[tuple[torch.Size, torch.dtype]] = []

    def run(tile: torch.Tensor) -> torch.Tensor:
        if len(ran) == 2:
            return torch.empty(ran[1][0], dtype=ran[1][1])
        output = call(tile)
        ran.append((output.shape, output.dtype))
        return output

    return run


def count_work(size: Sequence[int], serving: NetworkServing) -> float:
    """Return the pixels that a network is run on, as a multiple of those of a picture of this size."""
    if serving.tiling is None:
        return 1.0
    tile, overlap = serving.tiling.tile, serving.tiling.overlap_pixels
    run = np.prod([len(place_tiles(side, tile, overlap)) * min(tile, side) for side in size])
    return float(run / np.prod(list(size)))


def _finite(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None
