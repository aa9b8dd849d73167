"""Render the image product's reference over a grid of guidance settings, and say what each would cost.

    python -m examples.guidance_sweep [--scales 5 9 12 15] [--rescales 0 0.3 0.5 0.7 1]
                                      [--percentiles none 99.5] [--max-values 1] [--prompts N] [--eval NAME]
                                      [--out build/sweep]

Run from the project root.

Reads a product of kind `images`: the reference's checkpoint, sampling, prompts, CLIP and tolerances. Prints
the table and writes it with its picture to `sweep.md` and `sweep.png` in `build/sweep`. A percentile turns the
scheduler's own thresholding on, and a maximum limits its threshold. Finished settings are kept in
`build/<product>/sweep`: the same command goes on after a kill. `--prompts` takes some of the prompts, the same ones in
each run.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from examples.guidance_sweep.judging import judge_sweep
from examples.guidance_sweep.plot import plot_sweep
from examples.guidance_sweep.rendering import render_settings, take_prompts
from examples.guidance_sweep.settings import list_settings, make_sweep_product
from examples.guidance_sweep.table import format_pareto, format_verdicts, render_sweep, render_table
from pipeline.errors import SettingsError
from pipeline.gate.wording import use_metrics
from pipeline.products.images.denoiser_checks import check_denoiser
from pipeline.products.images.preflight import check_images
from pipeline.products.images.settings import SAMPLE_MAX, ImagesProduct
from pipeline.products.params import choose_product, load_params
from pipeline.records.files import write_text
from stages.cli import run_stage

PICTURE, TABLE = "sweep.png", "sweep.md"


def main(argv: list[str]) -> int:
    """Render, judge, write; return 0 whatever the verdicts are, 130 on Ctrl-C."""
    options, start = _parse(argv), time.monotonic()
    images = choose_product(load_params(), options.product, kind=ImagesProduct)
    check_images(images, Path())
    build = images.build / "sweep" / ("all" if options.prompts is None else str(options.prompts))
    product = _make_product(options, images, build)
    for name in product.candidates:
        check_denoiser(product, name, Path())
    try:
        rendered = render_settings(product, root=Path(), build=build, say=_say)
    except KeyboardInterrupt:
        _say("interrupted; finished settings and batches are kept, run the same command to go on")
        return 130
    with use_metrics(product.metrics):
        rows = judge_sweep(product, build)
        plot_sweep(rows, product, options.out / PICTURE)
        write_text(options.out / TABLE, render_sweep(rows, product, picture=PICTURE))
        print(f"{render_table(rows)}\n\nPareto set:\n{format_pareto(rows)}\n\n{format_verdicts(rows)}")
    _say(f"{options.out / TABLE}: {len(rows)} settings, {len(rendered)} rendered now, {time.monotonic() - start:.0f} s")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="guidance_sweep", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scales", type=float, nargs="+", default=[5, 9, 12, 15])
    parser.add_argument("--rescales", type=float, nargs="+", default=[0, 0.3, 0.5, 0.7, 1])
    parser.add_argument(
        "--percentiles",
        type=_parse_percentile,
        nargs="+",
        default=[None, 99.5],
        help="of dynamic thresholding, or none (none 99.5)",
    )
    parser.add_argument(
        "--max-values",
        type=float,
        nargs="+",
        default=[SAMPLE_MAX],
        help=f"upper limit of the threshold ({SAMPLE_MAX:g})",
    )
    parser.add_argument("--prompts", type=int, help="how many; else all")
    parser.add_argument("--eval", help="whose prompts; else the first eval's")
    parser.add_argument("--out", type=Path, default=Path("build/sweep"), help="folder of the report (build/sweep)")
    parser.add_argument("--product", help="of kind images; needed where there are several")
    return parser.parse_args(argv)


def _parse_percentile(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected none or a percentile such as 99.5, got {text!r}") from None


def _make_product(options: argparse.Namespace, images: ImagesProduct, build: Path) -> ImagesProduct:
    name = options.eval or next(iter(images.evals))
    if name not in images.evals:
        raise SettingsError(f"--eval: expected one of {', '.join(images.evals)}, got {name!r}")
    evalset = images.evals[name].evalset
    settings = list_settings(options.scales, options.rescales, options.percentiles, options.max_values)
    if options.prompts is not None:
        take_prompts(Path(evalset), options.prompts, build / "prompts")
        evalset = (build / "prompts").as_posix()
    return make_sweep_product(images, settings, eval_name=name, evalset=evalset)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_stage("guidance_sweep", main)
