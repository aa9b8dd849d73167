"""What each convolution policy costs the people detector, and what the gate says: `python -m benchmarks.conv_policies`.

Direct sums, F(2,3) and F(4,3) wherever they fit, and the calibrated policy, in float32, bfloat16 and float16, each
evaluated and judged as a candidate of the product `people` is, against the same reference and tolerances, in a
temporary folder. A policy is calibrated on the product's `calibration_images` for each number format. The arithmetic is
emulated: what a kernel gains is measured by `benchmarks/winograd_speed.py`. `--checkpoint models/people` judges the
network whose channels are alike.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from pipeline.evalsets.cards import load_evalset
from pipeline.evalsets.pictures import read_picture
from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import compare_release
from pipeline.gate.wording import use_metrics
from pipeline.products import KINDS, list_known_metrics
from pipeline.products.params import get_product, load_params
from pipeline.products.vision.adapters import load_adapter
from pipeline.products.vision.candidate import build_network_candidate
from pipeline.products.vision.evaluate import evaluate_network
from pipeline.products.vision.loading import load_network
from pipeline.products.vision.policy_settings import choose_default, list_rules
from pipeline.products.vision.proposal import find_saved_fraction, propose_policy
from pipeline.products.vision.serving import run_plainly
from pipeline.products.vision.settings import VisionProduct
from pipeline.records.verdicts import Comparison, Verdict

DTYPES = ("float32", "bfloat16", "float16")
UNIFORM = ("direct", "winograd_f23", "winograd_f43")
METRICS = ("ap", "ap_small", "ap_medium", "ap_large")


def main() -> int:
    """Evaluate, judge, print."""
    parser = argparse.ArgumentParser(prog="conv_policies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--product", default="people")
    parser.add_argument("--checkpoint", default="models/people-hard")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    options = parser.parse_args()
    product = get_product(load_params(), options.product, kind=VisionProduct)
    candidates = {"reference": {"checkpoint": options.checkpoint, "steps": []}}
    candidates |= {
        f"{algorithm.replace('_', '-')}-{dtype}": _make_candidate(options.checkpoint, algorithm, dtype, [])
        for dtype in options.dtypes
        for algorithm in UNIFORM
    }
    for dtype in options.dtypes:
        candidates[f"calibrated-{dtype}"] = _calibrate(product, options.checkpoint, dtype)
    judged = {"candidates": candidates, "reference": "reference", "release": list(candidates)[1:]}
    product = VisionProduct.model_validate(product.model_dump() | judged)
    with tempfile.TemporaryDirectory(dir=".", prefix=".policies-") as folder:
        for name in candidates:
            build = Path(folder)
            evaluate_network(
                build_network_candidate(name, product, root=Path(), build=build), product, root=Path(), build=build
            )
        compared = compare_release(product, KINDS[product.kind].get_auditor(), Path(folder))
        print(_tabulate(compared.judgement.verdicts, compared.findings))
    return 0


def _make_candidate(checkpoint: str, algorithm: str, dtype: str, rules: list[dict]) -> dict:
    step = {"kind": "conv_policy", "algorithm": algorithm, "dtype": dtype, "rules": rules}
    return {"checkpoint": checkpoint, "steps": [step]}


def _calibrate(product: VisionProduct, checkpoint: str, dtype: str) -> dict:
    """Return a candidate with the policy that is proposed for a number format."""
    torch.set_num_threads(product.serving.num_threads)
    network = load_network(Path(checkpoint), load_adapter(Path(product.adapter)), run_plainly(product))
    folder = Path(product.calibration_images or "")
    inputs = [
        network.prepare(torch.from_numpy(read_picture(folder / case.image, case.sha256))[None])
        for case in load_evalset(folder).cases
    ]
    proposals = propose_policy(network.module, inputs, dtype=dtype, run=network.run)
    chosen = [p.algorithm for p in proposals if p.can_run_winograd]
    print(
        f"calibrated {dtype}: {', '.join(f'{chosen.count(a)} {a}' for a in UNIFORM)}, "
        f"{find_saved_fraction(proposals):.0%} of the multiplications saved",
        flush=True,
    )
    default = choose_default(proposals)
    return _make_candidate(checkpoint, default, dtype, list_rules(proposals, algorithm=default, dtype=dtype))


def _tabulate(verdicts: tuple[Verdict, ...], findings: dict[str, CandidateFindings]) -> str:
    lines = ["| policy | " + " | ".join(METRICS) + " | finite | verdict |", "|---|" + "---:|" * 5 + "---|"]
    for verdict in verdicts:
        found = {c.metric.partition("/")[2]: c for c in verdict.comparisons if c.bucket is None}
        cells = [_show(found[name]) for name in METRICS]
        lines.append(
            f"| {verdict.candidate} | {' | '.join(cells)} | {found['finite_output_rate'].candidate:.1%} "
            f"| {verdict.outcome} |"
        )
    return "\n".join(lines)


def _show(c: Comparison) -> str:
    """Return a value, and the loss with its one-sided 95 % bounds in points."""
    return f"{100 * c.candidate:.1f} ({-100 * c.harm:+.2f}; {-100 * c.high:+.2f} to {-100 * c.low:+.2f})"


if __name__ == "__main__":
    with use_metrics(list_known_metrics()):  # what a stage does
        raise SystemExit(main())
