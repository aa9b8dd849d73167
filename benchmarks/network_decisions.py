"""How often is a memory format or a compile mode kept? `python -m benchmarks.network_decisions [--repeats 20]`.

The references of the products of kind vision in params.yaml, each with channels-last, compiled (in modes named by
`--modes`), and both, in float32 and bfloat16: each is timed against itself without the step as an evaluation does it
(12 pairs in turn, one batch, one thread, CPU seconds), again and again, and the gate's rule is applied to each
repeat: a gain is an interval of the ratio wholly below 0.95. Beside it what oneDNN copies between memory formats in
one run, which modules of the eager network write channels first, and graph breaks.
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.evalsets.cards import load_evalset
from pipeline.evalsets.pictures import read_picture
from pipeline.products.params import get_product, load_params
from pipeline.products.vision.adapters import load_adapter
from pipeline.products.vision.costs import choose_baseline, measure_costs, measure_speed
from pipeline.products.vision.loading import load_network
from pipeline.products.vision.settings import VisionProduct
from pipeline.records.medians import GAIN_BELOW
from pipeline.records.serving import NetworkServing

STEPS = ("channels-last", "compile", "both")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="network_decisions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--products", nargs="+", default=[], help="of params.yaml; else all of kind vision")
    parser.add_argument("--modes", nargs="+", default=["default"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--steps", nargs="+", default=STEPS, choices=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, one thread; a gain is a ratio surely below {GAIN_BELOW}\n\n"
        "| network | format | step | ratio of the first repeat | medians of all repeats | outputs differ by "
        "| reorders, first -> last | other formats | graph breaks | gain, of repeats |\n"
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
        flush=True,
    )
    params = load_params()
    names = [name for name, product in params.products.items() if isinstance(product, VisionProduct)]
    for product in [get_product(params, name, kind=VisionProduct) for name in options.products or names]:
        for dtype in options.dtypes:
            steps: dict[str, list[tuple[str, dict[str, Any]]]] = {
                "channels-last": [("channels-last", {"channels_last": True})],
                "compile": [(f"compile {mode}", {"compile_mode": mode}) for mode in options.modes],
                "both": [(f"both, {mode}", {"channels_last": True, "compile_mode": mode}) for mode in options.modes],
            }
            for step, changes in chain.from_iterable(steps[name] for name in options.steps):
                serving = NetworkServing(dtype=dtype, batch_size=product.serving.batch_size, **changes)
                print(_measure(product, step, serving, options.repeats), flush=True)
    return 0


def _measure(product: VisionProduct, step: str, serving: NetworkServing, repeats: int) -> str:
    """Return the row of one network and step."""
    (settings,), adapter = product.evals.values(), load_adapter(Path(product.adapter))
    folder = Path(settings.evalset)
    cases = load_evalset(folder).cases[: serving.batch_size]
    pixels = torch.from_numpy(np.stack([read_picture(folder / case.image, case.sha256) for case in cases]))
    load = partial(load_network, Path(product.candidates[product.reference].checkpoint), adapter)
    costs = measure_costs(load, load(serving), pixels, pixels[:1], [pixels])
    base = choose_baseline(serving)
    assert base is not None
    speeds = [costs["speed"], *(measure_speed(load, serving, base, pixels) for _ in range(repeats - 1))]
    differs = max(speed["difference"] for speed in speeds)
    if any(speed["timed"] is None for speed in speeds):
        return f"| {product.name} | {serving.dtype} | {step} | not timed | – | {differs:.2g} | – | – | – | – |"
    ratios = [speed["timed"][speed["clock"]]["ratio"] for speed in speeds]
    medians, kept = [r["median"] for r in ratios], Counter(r["high"] < GAIN_BELOW for r in ratios)
    layout, compiled, first = costs["layout"], costs["compile"], ratios[0]
    return (
        f"| {product.name} | {serving.dtype} | {step} | {first['median']:.3f} ({first['low']:.3f} to "
        f"{first['high']:.3f}) | {min(medians):.3f} to {max(medians):.3f} | {differs:.1e} | "
        + (
            f"{layout['num_reorders']['first']} -> {layout['num_reorders']['last']} | {len(layout['other_formats'])} | "
            if layout
            else "– | – | "
        )
        + (f"{compiled['num_graph_breaks']} | " if compiled else "– | ")
        + f"{kept[True]} of {repeats} |"
    )


if __name__ == "__main__":
    raise SystemExit(main())
