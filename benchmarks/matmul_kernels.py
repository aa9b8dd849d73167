"""How fast does torch multiply by weights of few bits? One matrix product each, in the shapes of an 8B Llama, on a GPU.

    python -m benchmarks.matmul_kernels [--rows 1 16 256] [--rounds 15] [--json FILE]

Rows are the tokens that a step takes together: requests in flight while decoding, prompt tokens before. The formats:
bfloat16 by cuBLAS; FP8 weights and inputs, with a scale for each row of both (as `FP8_DYNAMIC` stores them) and with
one for all; INT4 weights in groups of 128 and bfloat16 inputs (as `W4A16`), in torch's own layout. Inputs are rounded
beforehand, outputs are bfloat16, FP8 sums with fast accumulation. Each product is held against one of the same rounded
operands in float32.

A time is that of one product within a CUDA graph of many, replayed between two CUDA events, each with weights of its
own: together they take 256 MiB, so none is in the L2 cache. Formats take turns within a round; a ratio is taken within
its round, and intervals cover the median with 95 % (`pipeline/records/medians.py`). The last table adds up a decoder
layer: 4096 x 6144 for q, k and v, 4096 x 4096 for o, 4096 x 14336 twice for gate and up, 14336 x 4096 for down.

Not covered: the kernels that vLLM brings (Machete, Marlin, its CUTLASS): `vllm_on_gpu` times them in a whole server;
rounding the inputs to FP8, which an engine does in a kernel before; several GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_timing import ratio

GROUP_SIZE = 128
INNER_TILES = 8  # of the INT4 layout: torch's own choice
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
WEIGHTS_BYTES = 256 << 20  # of a graph's weights together: five times the L2 cache of an H100
BATCH_S = 0.002  # between two events, at least
WARM_UPS = 3
TOLERANCE = 0.02  # of the largest output; bfloat16 keeps 0.004

Product = Callable[[], torch.Tensor]
# what is read anew for each product: weight and scales; the product of them; and the same in float32
Built = tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor], torch.Tensor]
Build = Callable[[torch.Tensor, torch.Tensor], Built]  # of inputs and weight, both in bfloat16


@dataclass(frozen=True)
class Shape:
    """A linear layer of the model."""

    name: str
    num_inputs: int
    num_outputs: int
    count: int  # in a decoder layer


SHAPES = (
    Shape("q, k and v", 4096, 6144, 1),
    Shape("o", 4096, 4096, 1),
    Shape("gate, up", 4096, 14_336, 2),
    Shape("down", 14_336, 4096, 1),
)


@dataclass
class Timed:
    """One format of one shape and number of rows."""

    replay: Callable[[], None]
    reads: object  # what the graph reads, which it does not keep itself
    num_products: int  # in a replay
    kernel: str
    error: float  # largest difference, relative to the largest output
    seconds: list[float] = field(default_factory=list)  # of one product, by round


def main(argv: Sequence[str]) -> int:
    """Time every format, shape and number of rows; print a row each, then decoder layers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="every time in seconds")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.matmul_kernels: expected a GPU, found none; run it on one", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| layer | rows | format | µs | of bfloat16's time | largest error | kernel |")
    print("|---|---:|---|---:|---:|---:|---|")
    times: dict[tuple[str, int], dict[str, list[float]]] = {}
    for shape in SHAPES:
        for rows in arguments.rows:
            cell = times[shape.name, rows] = {}
            for name, text, seconds in measure(shape, rows, rounds=arguments.rounds):
                print(f"| {shape.name} | {rows} | {name} | {text}", flush=True)
                cell[name] = seconds
    print("\n".join(["", *format_layers(times, arguments.rows)]))
    if arguments.json is not None:
        data = [{"layer": layer, "rows": rows, "seconds": cell} for (layer, rows), cell in times.items()]
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(shape: Shape, rows: int, *, rounds: int) -> Iterator[tuple[str, str, list[float]]]:
    """Yield of each format its name, the rest of its row, and its seconds; those of one that fails are none."""
    torch.manual_seed(0)
    inputs = torch.randn(rows, shape.num_inputs, dtype=torch.bfloat16, device="cuda")
    weight = 0.02 * torch.randn(shape.num_outputs, shape.num_inputs, dtype=torch.bfloat16, device="cuda")
    prepared: dict[str, Timed | str] = {}
    for name, build in FORMATS.items():
        try:
            prepared[name] = prepare(build, inputs, weight)
        except RuntimeError as error:  # the others are still worth having
            prepared[name] = " ".join(str(error).split())[:160]
    timed = {name: one for name, one in prepared.items() if isinstance(one, Timed)}
    for _ in range(rounds):
        for one in timed.values():
            one.seconds.append(time_replays(one))
    base = timed["bfloat16"].seconds
    for name, found in prepared.items():
        if isinstance(found, Timed):
            share = ratio(found.seconds, base)
            micros = 1e6 * statistics.median(found.seconds)
            yield name, f"{micros:.1f} | {share} | {found.error:.4f} | `{found.kernel}` |", found.seconds
        else:
            yield name, f"– | – | – | {found} |", []


def prepare(build: Build, inputs: torch.Tensor, weight: torch.Tensor) -> Timed:
    """Check a format's product, name its kernels, and capture a graph of products with copies of its weight."""
    operands, multiply, reference = build(inputs, weight)
    product = multiply(*operands)
    error = float((product.float() - reference).abs().max() / reference.abs().max())
    if error > TOLERANCE:
        raise RuntimeError(f"expected the product of its operands, got one that is {error:.3f} off")
    num_copies = -(-WEIGHTS_BYTES // sum(tensor.nbytes for tensor in operands))
    # a transposed view stays one: its layout is what the kernel is written for
    copies = [
        tuple(tensor.clone(memory_format=torch.preserve_format) for tensor in operands) for _ in range(num_copies)
    ]
    kernel = name_kernels(lambda: multiply(*operands))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            multiply(*copies[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in copies:
            multiply(*copy)

    return Timed(graph.replay, (multiply, copies), num_copies, kernel, error)


def time_replays(timed: Timed) -> float:
    """Return the seconds of one product: two replays that are not counted, then some between two events."""
    count = 1
    timed.replay()
    while True:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        timed.replay()
        start.record()
        for _ in range(count):
            timed.replay()
        end.record()
        torch.cuda.synchronize()
        seconds = start.elapsed_time(end) / 1e3
        if seconds >= BATCH_S:
            return seconds / (count * timed.num_products)
        count = max(count + 1, int(1.5 * count * BATCH_S / seconds))


def name_kernels(multiply: Product) -> str:
    """Return the names of the kernels that a product starts, without what their templates say."""
    from torch.profiler import ProfilerActivity, profile

    multiply()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        multiply()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return " + ".join(shorten(name) for name in dict.fromkeys(names) if not name.startswith("Mem"))


def shorten(name: str) -> str:
    """Return the name of a kernel without its return type, its template's arguments and its own."""
    return name.removeprefix("void ").replace("(anonymous namespace)::", "").partition("<")[0].partition("(")[0]


def build_bfloat16(inputs: torch.Tensor, weight: torch.Tensor) -> Built:
    """Plain bfloat16."""
    return (weight.t(),), lambda w: torch.mm(inputs, w), inputs.float() @ weight.float().t()


def build_fp8_rows(inputs: torch.Tensor, weight: torch.Tensor) -> Built:
    """FP8 with a scale for each row of the inputs, and for each row of the weight."""
    return _build_fp8(inputs, weight, dim=1)


def build_fp8_tensor(inputs: torch.Tensor, weight: torch.Tensor) -> Built:
    """FP8 with one scale for the inputs and one for the weight."""
    return _build_fp8(inputs, weight, dim=None)


def _build_fp8(inputs: torch.Tensor, weight: torch.Tensor, *, dim: int | None) -> Built:
    (x, x_scale), (w, w_scale) = (round_fp8(tensor, dim=dim) for tensor in (inputs, weight))
    reference = (x.float() * x_scale) @ (w.float() * w_scale).t()

    def multiply(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x, w, x_scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    return (w.t(), w_scale.t() if dim is not None else w_scale), multiply, reference


def round_fp8(tensor: torch.Tensor, *, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values in FP8, and the scale of all or of each row."""
    wide = tensor.float()
    largest = wide.abs().amax() if dim is None else wide.abs().amax(dim=dim, keepdim=True)
    scale = largest / FP8_MAX
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def build_int4(inputs: torch.Tensor, weight: torch.Tensor) -> Built:
    """INT4 weights in groups, in torch's own layout."""
    levels, scales = round_int4(weight)
    reference = inputs.float() @ restore_int4(levels, scales).t()
    packed = torch.ops.aten._convert_weight_to_int4pack(pack_nibbles(levels), INNER_TILES)
    return (packed, scales), lambda w, s: torch.ops.aten._weight_int4pack_mm(inputs, w, GROUP_SIZE, s), reference


def round_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return levels from 0 to 15, of which 8 stands for nothing, and by group of each row its scale and offset (0)."""
    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    scales = (groups.abs().amax(dim=2) / 7.5).to(torch.bfloat16)
    levels = ((groups / scales.float()[..., None]).round() + 8).clamp(0, 15).to(torch.uint8).flatten(1)
    return levels, torch.stack([scales.t(), torch.zeros_like(scales.t())], dim=2).contiguous()


def restore_int4(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight that levels and scales stand for."""
    wide = levels.float().unflatten(1, (-1, GROUP_SIZE)) - 8
    return (wide * scales[..., 0].t().float()[..., None]).flatten(1)


def pack_nibbles(levels: torch.Tensor) -> torch.Tensor:
    """Return two levels a byte, the first in the upper half."""
    return levels[:, ::2] << 4 | levels[:, 1::2]


FORMATS: Mapping[str, Build] = {
    "bfloat16": build_bfloat16,
    "FP8, scales by row": build_fp8_rows,
    "FP8, one scale": build_fp8_tensor,
    "INT4, groups of 128": build_int4,
}


def format_layers(times: Mapping[tuple[str, int], Mapping[str, Sequence[float]]], rows: Sequence[int]) -> Iterator[str]:
    """Write what the products of a decoder layer take together, and how many times as fast as in bfloat16 that is."""
    yield "| a decoder layer | " + " | ".join(f"{number} rows" for number in rows) + " |"
    yield "|---|" + "---:|" * len(rows)
    totals: dict[str, list[str]] = {name: [] for name in FORMATS}
    for number in rows:
        base = add_up("bfloat16", times, number)
        for name, texts in totals.items():
            total = add_up(name, times, number)
            speed = base and total and statistics.median(b / t for b, t in zip(base, total, strict=True))
            texts.append(f"{1e6 * statistics.median(total):,.0f} µs, {speed:.2f} times" if total and speed else "–")
    for name, texts in totals.items():
        yield f"| {name} | " + " | ".join(texts) + " |"


def add_up(name: str, times: Mapping[tuple[str, int], Mapping[str, Sequence[float]]], rows: int) -> list[float]:
    """Return the seconds of a decoder layer by round; none where a shape has none."""
    cells = [(shape.count, times[shape.name, rows].get(name, ())) for shape in SHAPES]
    if not all(seconds for _, seconds in cells):
        return []
    return [
        sum(count * one for (count, _), one in zip(cells, row, strict=True))
        for row in zip(*(s for _, s in cells), strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
