"""Find a convolution policy on calibration images and write it into params.yaml.

    python scripts/propose_conv_policy.py winograd-calibrated [--dtype float16] [--images N]
                                          [--max-relative-error 0.01] [--min-headroom-bits 1] [--dry-run]

The candidate has a step `conv_policy`; its `algorithm`, `dtype` and `rules` are replaced, with the reason of each rule,
and everything else in params.yaml stays as it is. The network runs in float32 on the product's `calibration_images`,
which must share no picture with its evals, and every convolution tries each algorithm on its own input there
(`pipeline/products/vision/proposal.py`). Prints a row a layer. What the policy costs in the network's results is for
the evaluation to say: `dvc repro` afterwards.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.errors import SettingsError  # noqa: E402
from pipeline.evalsets.cards import load_evalset  # noqa: E402
from pipeline.evalsets.cases import DetectionCase, UpscalingCase  # noqa: E402
from pipeline.evalsets.pictures import read_picture  # noqa: E402
from pipeline.products.params import find_owner, load_params, parse_params  # noqa: E402
from pipeline.products.vision.adapters import load_adapter  # noqa: E402
from pipeline.products.vision.loading import Network, load_network  # noqa: E402
from pipeline.products.vision.policy_settings import tabulate, write_policy  # noqa: E402
from pipeline.products.vision.preflight import check_network  # noqa: E402
from pipeline.products.vision.proposal import LayerProposal, propose_policy  # noqa: E402
from pipeline.products.vision.serving import run_plainly  # noqa: E402
from pipeline.products.vision.settings import ConvPolicyStep, VisionProduct  # noqa: E402
from pipeline.records.files import write_text  # noqa: E402
from stages.cli import run_stage  # noqa: E402

PARAMS = Path("params.yaml")
PictureCase = DetectionCase | UpscalingCase


def main(argv: list[str]) -> int:
    """Calibrate, print, write."""
    options = _parse(argv)
    product = find_owner(load_params(PARAMS), options.candidate, kind=VisionProduct)
    dtype = options.dtype or _find_step(product, options.candidate).dtype
    check_network(product, Path())
    cases = _take_images(product, options.images)
    proposals = _propose(product, cases, dtype, options)
    print(tabulate(proposals))
    text = write_policy(PARAMS.read_text(encoding="utf-8"), options.candidate, dtype, proposals)
    parse_params(YAML(typ="safe").load(text), where=str(PARAMS))
    where = f"candidates.{options.candidate}"
    if options.dry_run:
        print(f"{where}: found on {len(cases)} images; nothing is written")
    else:
        write_text(PARAMS, text)
        print(f"{PARAMS}: {where}: written, found on {len(cases)} images; `dvc repro` evaluates it")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="propose_conv_policy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("candidate", help="one with a step conv_policy")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="else that of the step")
    parser.add_argument("--images", type=int, help="so many of the calibration images (all)")
    parser.add_argument("--max-relative-error", type=float, default=0.01, help="of a layer, rms (0.01)")
    parser.add_argument("--min-headroom-bits", type=float, default=1.0, help="doublings left before overflow (1)")
    parser.add_argument("--dry-run", action="store_true", help="print, and write nothing")
    options = parser.parse_args(argv)
    if not 0 < options.max_relative_error < 1:
        raise SettingsError(f"--max-relative-error: expected a share between 0 and 1, got {options.max_relative_error}")
    if not 0 <= options.min_headroom_bits < math.inf:
        raise SettingsError(f"--min-headroom-bits: expected 0 doublings or more, got {options.min_headroom_bits}")
    return options


def _find_step(product: VisionProduct, candidate: str) -> ConvPolicyStep:
    steps = [step for step in product.candidates[candidate].steps if isinstance(step, ConvPolicyStep)]
    if not steps:
        raise SettingsError(
            f"candidates.{candidate}.steps: expected a step of kind conv_policy, found "
            "none; add `- {kind: conv_policy, algorithm: direct, dtype: float32}`"
        )
    return steps[0]


def _take_images(product: VisionProduct, num: int | None) -> tuple[PictureCase, ...]:
    """Return the calibration images, which `check_network` has found to be on no eval."""
    where = product.locate("calibration_images")
    if product.calibration_images is None:
        raise SettingsError(f"{where}: expected an evalset that nothing is evaluated on, found none; name one")
    cases = load_evalset(Path(product.calibration_images)).cases
    if num is not None and not 1 <= num <= len(cases):
        raise SettingsError(f"--images: expected 1 to {len(cases)}, got {num}")
    return tuple(cases[:num])


def _propose(
    product: VisionProduct, cases: tuple[PictureCase, ...], dtype: str, options: argparse.Namespace
) -> list[LayerProposal]:
    torch.set_num_threads(product.serving.num_threads)
    folder = Path(product.candidates[options.candidate].checkpoint)
    network = load_network(folder, load_adapter(Path(product.adapter)), run_plainly(product))
    return propose_policy(
        network.module,
        _prepare(product, cases, network),
        dtype=dtype,
        run=network.run,
        max_relative_error=options.max_relative_error,
        min_headroom_bits=options.min_headroom_bits,
    )


def _prepare(product: VisionProduct, cases: tuple[PictureCase, ...], network: Network) -> Iterator[torch.Tensor]:
    """Yield the module's input of one image after another."""
    for case in cases:
        pixels = read_picture(Path(product.calibration_images or "") / case.image, case.sha256)
        yield network.prepare(torch.from_numpy(pixels)[None])


if __name__ == "__main__":
    run_stage("propose_conv_policy", main)
