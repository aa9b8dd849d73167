"""Which convolutions of the people detector lose in INT8, and what the gate says: `python -m benchmarks.int8_layers`.

First the choice of what stays float, on pictures that nothing is evaluated on: scales from the product's
`calibration_images`, average precision on held-out scenes drawn from a seed. Each group of layers is put into INT8
alone, and each layer of a group that loses. A group or layer stays float where that loses over half of the gate's
tolerance, of AP over all sizes or of one size. The last rows show what remains in INT8 together.

Then the candidates of the choice and the obvious others are built, evaluated and judged on the shipped pictures as
candidates of the product `people` are, in a temporary folder: AP with bounds, CPU time of a batch in one thread beside
float32, bytes of the weights. Not covered: layers that lose only together with others, but for the last rows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch

from evalsets.make.scenes import Scene
from models.make.score_people import find_all, held_out, score
from models.people.detector import find
from pipeline.gate.compare import ReleaseComparison, compare_release
from pipeline.gate.wording import use_metrics
from pipeline.products import KINDS, list_known_metrics
from pipeline.products.params import get_product, load_params
from pipeline.products.vision.adapters import load_adapter
from pipeline.products.vision.candidate import build_network_candidate, read_calibration
from pipeline.products.vision.conv_policy import list_convolutions
from pipeline.products.vision.evaluate import evaluate_network
from pipeline.products.vision.loading import load_network
from pipeline.products.vision.quantize import observe, write_quantized
from pipeline.products.vision.serving import run_plainly
from pipeline.products.vision.settings import VisionProduct
from pipeline.records.medians import MedianInterval
from pipeline.records.verdicts import Comparison

METRICS = ("ap", "ap_small", "ap_medium", "ap_large")
GROUPS = (
    "stem.*",
    *(f"stages.{i}.*" for i in range(3)),
    "laterals.*",
    *(f"branches.{size}.*" for size in ("small", "medium", "large")),
)
HEAD = [f"branches.{size}.3" for size in ("small", "medium", "large")]  # the last layer of each branch
COMPILE = {"kind": "compile", "mode": "default"}
_MARGIN = 0.5  # of a tolerance

Scorer = Callable[[Collection[str]], dict[str, float]]  # of the layers that are in INT8


def main() -> int:
    """Choose, judge, print."""
    parser = argparse.ArgumentParser(prog="int8_layers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", default="models/people-hard")
    parser.add_argument("--pictures", type=int, default=16, help="to calibrate on (16)")
    parser.add_argument("--scenes", type=int, default=200, help="held out, to choose on (200)")
    parser.add_argument("--seed", type=int, default=1, help="of those scenes (1)")
    parser.add_argument(
        "--only", choices=("choice", "verdicts"), help="one of the tables; as chosen is as shipped then"
    )
    options = parser.parse_args()
    product = get_product(load_params(), "people", kind=VisionProduct)
    shipped = product.candidates["int8"].quantize
    lossy = shipped.exclude if shipped else []
    with tempfile.TemporaryDirectory(dir=".", prefix=".int8-") as folder:
        if options.only != "verdicts":
            scenes = held_out(options.scenes, options.seed)
            layers, run = _prepare(product, options.checkpoint, options.pictures, scenes, Path(folder) / "layers")
            lossy = list(_choose(product, layers, run))
            print(f"stays float: {' '.join(lossy)}", flush=True)
        if options.only != "choice":
            steps = _list_steps(options.pictures, lossy)
            print(_judge(product, options.checkpoint, steps, Path(folder)))
    return 0


def _prepare(
    product: VisionProduct, checkpoint: str, num_pictures: int, scenes: Sequence[Scene], folder: Path
) -> tuple[list[str], Scorer]:
    """Return the network's convolutions, and what scores it on scenes with some of them in INT8."""
    torch.set_num_threads(product.serving.num_threads)
    source, adapter, serving = Path(checkpoint), load_adapter(Path(product.adapter)), run_plainly(product)
    exact = load_network(source, adapter, serving)
    layers = list(list_convolutions(exact.module))
    ranges = observe(exact, layers, read_calibration(product, exact, num_pictures, Path()), observer="histogram")
    written: list[Path] = []

    def run(chosen: Collection[str]) -> dict[str, float]:
        written.append(folder / str(len(written)))
        write_quantized(written[-1], source, {name: ranges[name] for name in layers if name in chosen})
        network = load_network(written[-1], adapter, serving)

        def detect(pixels: np.ndarray) -> list:
            return find(network.run(network.prepare(torch.from_numpy(pixels))), network.config)

        return score(scenes, find_all(detect, scenes))

    return layers, run


def _choose(product: VisionProduct, layers: Sequence[str], run: Scorer) -> Iterator[str]:
    """Print what each group and layer loses alone; yield the patterns of what is to stay float."""
    limits = {name: _MARGIN * product.gate.tolerances[f"scenes/{name}"].overall for name in METRICS}
    exact = run(())
    print(_format_row("INT8", "layers", *METRICS, "stays float"), "|---|---:|---:|---:|---:|---:|---|", sep="\n")
    print(_format_row("none", "0", *(f"{100 * exact[name]:.1f} %" for name in METRICS), ""), flush=True)

    def show(label: str, chosen: Collection[str], note: str = "") -> bool:
        lost = {name: exact[name] - value for name, value in run(chosen).items() if name in limits}
        is_lossy = any(lost[name] > limit for name, limit in limits.items())
        cells = (f"{-100 * lost[name]:+.2f}" for name in METRICS)
        print(_format_row(label, str(len(chosen)), *cells, note or ("yes" if is_lossy else "")), flush=True)
        return is_lossy

    groups, lossy = [], []
    for group in GROUPS:
        inside = [name for name in layers if fnmatchcase(name, group)]
        if show(f"`{group}`", inside):
            groups += inside
            lossy += [name for name in inside if show(f"`{name}`", [name])]
    show("all", layers, "–")
    for what, left in (("groups", groups), ("layers", lossy)):
        show(f"all but those {what}", [name for name in layers if name not in left], "–")
    yield from lossy


def _list_steps(num_pictures: int, lossy: list[str]) -> dict[str, list[dict]]:
    step = {"kind": "quantize", "dtype": "int8", "num_pictures": num_pictures}
    chosen = step | {"exclude": lossy}
    return {
        "all": [step],
        "all, minmax": [step | {"observer": "minmax"}],
        "without the head": [step | {"exclude": HEAD}],
        "without branch small": [step | {"exclude": ["branches.small.*"]}],
        "without all branches": [step | {"exclude": ["branches.*"]}],
        "as chosen": [chosen],
        "as chosen, compiled": [chosen, COMPILE],
    }


def _judge(product: VisionProduct, checkpoint: str, steps: dict[str, list[dict]], build: Path) -> str:
    """Return a row for each candidate with these steps."""
    named = {name.replace(",", "").replace(" ", "-"): (name, given) for name, given in steps.items()}
    candidates = {"reference": {"checkpoint": checkpoint, "steps": []}}
    candidates |= {name: {"checkpoint": checkpoint, "steps": given} for name, (_, given) in named.items()}
    judged = {"candidates": candidates, "reference": "reference", "release": list(named)}
    product = VisionProduct.model_validate(product.model_dump() | judged)
    sizes = {}
    for name in candidates:
        built = build_network_candidate(name, product, root=Path(), build=build)
        sizes[name] = f"{built.checkpoint.num_bytes / 1e3:.0f}"
        evaluate_network(built, product, root=Path(), build=build)
    compared = compare_release(product, KINDS[product.kind].get_auditor(), build)
    labels = {name: label for name, (label, _) in named.items()}
    return _tabulate(compared, labels, sizes)


def _tabulate(compared: ReleaseComparison, labels: dict[str, str], sizes: dict[str, str]) -> str:
    header = ("INT8", "layers", *METRICS, "time, candidate / float32", "weights, kB", "verdict")
    rows = [_format_row(*header), "|---|" + "---:|" * 7 + "---|"]
    for verdict in compared.judgement.verdicts:
        found = {c.metric.partition("/")[2]: c for c in verdict.comparisons if c.bucket is None}
        if len(rows) == 2:
            exact = (f"{100 * found[name].reference:.1f}" for name in METRICS)
            rows.append(_format_row("none: float32", "0", *exact, "1", sizes["reference"], ""))
        finding = compared.findings[verdict.candidate]
        assert finding.evidence is not None
        num = sum(layer.format == "int8" for layer in finding.evidence.candidate.coverage)
        cells = [*(_show(found[name]) for name in METRICS), _show_time(finding.total), sizes[verdict.candidate]]
        rows.append(_format_row(labels[verdict.candidate], str(num), *cells, str(verdict.outcome)))
    return "\n".join(rows)


def _show(c: Comparison) -> str:
    """Return a value, and the loss with its one-sided 95 % bounds in points."""
    return f"{100 * c.candidate:.1f} ({-100 * c.harm:+.2f}; {-100 * c.high:+.2f} to {-100 * c.low:+.2f})"


def _show_time(total: MedianInterval | None) -> str:
    return f"{total.median:.2f} ({total.low:.2f} to {total.high:.2f})" if total else "–"


def _format_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    with use_metrics(list_known_metrics()):  # what a stage does
        raise SystemExit(main())
