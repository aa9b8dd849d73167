"""How often the gate fails what is equal: `python -m benchmarks.label_swap [--runs N] [--candidates NAME ...]`.

Takes the records of a finished project, swaps reference and candidate within each cluster by a coin, so that neither
side is better, and judges the swapped pairs as the gate would: every gated metric and bucket is measured anew from the
records and judged by `judge_all`, the release as one family, other candidates alone. Whatever fails then, fails
falsely; at most alpha of the runs may. It is the slow and complete form of what a certificate computes from sums.

Average precision is measured with 10 resamples instead of 1,000: they widen bounds, and no fail rests on a bound.
Not covered: what else can refuse or fail a candidate (canary, speed, drafts).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
from statsmodels.stats.proportion import proportion_confint

from pipeline.gate import detection
from pipeline.gate.audits import CandidateFindings
from pipeline.gate.case_table import CaseTable
from pipeline.gate.compare import compare_release
from pipeline.gate.decision import Measurement, judge_all
from pipeline.gate.measure import measure_metric
from pipeline.gate.pairing import PairedCases
from pipeline.gate.resampling import draw_weights
from pipeline.gate.wording import definition_of, use_metrics
from pipeline.products import KINDS, list_known_metrics
from pipeline.products.params import get_product, load_params
from pipeline.records.detections import join_tables
from pipeline.records.verdicts import Comparison
from pipeline.settings.base import Product

Family = dict[
    str, tuple[CandidateFindings, list[Comparison]]
]  # candidates that are judged together, with what is gated of each
NUM_RESAMPLES = 10


def swap_labels(pairs: PairedCases, rng: np.random.Generator) -> PairedCases:
    """Exchange reference and candidate in each cluster with probability one half."""
    is_swapped = (rng.random(int(pairs.clusters.max()) + 1) < 0.5)[pairs.clusters]
    both = list(zip(pairs.reference, pairs.candidate, is_swapped.tolist(), strict=True))
    tables = None
    if pairs.tables is not None:
        n = len(is_swapped)
        joined, own = join_tables(pairs.tables), np.arange(n)
        tables = joined.at(own + n * is_swapped), joined.at(own + n * ~is_swapped)
    return replace(
        pairs,
        reference=CaseTable.of([b if swap else a for a, b, swap in both]),
        candidate=CaseTable.of([a if swap else b for a, b, swap in both]),
        tables=tables,
    )


def measure_swapped(
    findings: CandidateFindings, gated: Sequence[Comparison], alpha: float, seed: int
) -> list[Measurement]:
    """Swap the labels in every eval of one candidate, and measure what is gated anew."""
    rng = np.random.default_rng(seed)
    swapped = {name: swap_labels(pairs, rng) for name, pairs in findings.pairs.items()}
    return [
        measure_metric(
            swapped[eval_name],
            definition_of(c.metric),
            c.bucket,
            eval_name=eval_name,
            tolerance=c.tolerance,
            alpha=alpha,
            tier=c.tier,
        )
        for c in gated
        for eval_name in [c.metric.partition("/")[0]]
    ]


def count_fails(family: Family, release: Sequence[str], *, runs: int, alpha: float) -> int:
    """Return in how many runs any comparison of the family fails."""
    fails = 0
    for run in range(runs):
        findings = {
            name: measure_swapped(m, gated, alpha, seed=run * len(family) + i)
            for i, (name, (m, gated)) in enumerate(family.items())
        }
        judged = judge_all(findings, release, alpha=alpha)
        fails += any(c.outcome == "fail" for comparisons in judged.values() for c in comparisons)
    return fails


def list_families(product: Product) -> list[Family]:
    """Return the candidates of a product by the family that they are judged in: the release, then each other alone."""
    compared = compare_release(product, KINDS[product.kind].get_auditor(), product.build)
    found = {
        v.candidate: (compared.findings[v.candidate], [c for c in v.comparisons if c.tolerance is not None])
        for v in compared.judgement.verdicts
    }
    found = {name: (findings, gated) for name, (findings, gated) in found.items() if gated}
    released = {name: entry for name, entry in found.items() if name in product.release}
    return [
        family
        for family in [released, *({name: entry} for name, entry in found.items() if name not in released)]
        if family
    ]


def main(runs: int, products: Sequence[str], candidates: Sequence[str]) -> None:
    """Print a row for each family of each product, or for those that one of the candidates belongs to."""
    print("| product | candidates | gated comparisons | cases that flip | false fails | 95 % interval | CPU s |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    params = load_params()
    for product in (get_product(params, name, kind=Product) for name in products or params.products):
        for family in list_families(product):
            if candidates and not family.keys() & set(candidates):
                continue
            started = time.process_time()
            with patch.object(detection, "draw_weights", partial(draw_weights, num_resamples=NUM_RESAMPLES)):
                fails = count_fails(family, product.release, runs=runs, alpha=product.gate.alpha)
            low, high = proportion_confint(fails, runs, method="beta")
            gated = [c for _, comparisons in family.values() for c in comparisons]
            flips = sum((c.b or 0) + (c.c or 0) for c in gated if c.bucket is None)
            print(
                f"| {product.name} | {', '.join(f'`{name}`' for name in family)} | {len(gated)} | {flips:,} | "
                f"{fails} of {runs:,} | {low:.1%} to {high:.1%} | {time.process_time() - started:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    with use_metrics(list_known_metrics()):  # what a stage does
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--runs", type=int, default=1_000)
        parser.add_argument("--products", nargs="+", default=[], help="of params.yaml; else all")
        parser.add_argument("--candidates", nargs="*", default=[], help="families to measure, by a name in each")
        arguments = parser.parse_args()
        main(arguments.runs, arguments.products, arguments.candidates)
