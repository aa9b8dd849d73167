"""How many cases and clusters each bucket of the evals has, read from the evalsets: what a plan of the gate needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pipeline.evalsets.cards import CARD_FILE, Evalset, load_evalset
from pipeline.gate.clusters import hiding_clusters
from pipeline.gate.plan import PlanRow, Sizes, SuiteSize, plan_gate, read_last
from pipeline.gate.verdicts import Judgement
from pipeline.settings.base import Product


def load_evalsets(product: Product, root: Path, *, with_tasks: bool = False) -> dict[str, Evalset]:
    """Return the cases of each eval whose cases are an evalset.

    Args:
        product: settings.
        root: of the project.
        with_tasks: those of lm-eval's tasks that have a card, too, which lm-eval itself may read otherwise.
    """
    folders = {name: getattr(settings, "evalset", None) for name, settings in product.evals.items()}
    if with_tasks:
        tasks = {name: getattr(settings, "include_path", None) for name, settings in product.evals.items()}
        folders |= {name: folder for name, folder in tasks.items() if folder and (root / folder / CARD_FILE).is_file()}
    return {name: load_evalset(root / folder) for name, folder in folders.items() if folder}


def plan_product(product: Product, evalsets: Mapping[str, Evalset], root: Path) -> list[PlanRow]:
    """Return what the cases of a product can prove, as the last judgement of the same cases lets expect."""
    sizes = {
        name: count_sizes([c.cluster for c in e.cases], [c.buckets for c in e.cases], confidence=1 - product.gate.alpha)
        for name, e in evalsets.items()
    }
    last = read_last(product.name, root)
    return plan_gate(product, sizes, last, _list_others(product, evalsets, last) if last else ())


def _list_others(product: Product, evalsets: Mapping[str, Evalset], last: Judgement) -> list[str]:
    """Return the evals whose cases are others than the last judgement's.

    Of an lm-eval task the digest kept is lm-eval's, and before judgements kept any, there was none: their number tells.
    """
    counts: dict[str, int] = {}  # the most that a metric counts: one may leave cases out
    for comparison in (c for v in last.verdicts for c in v.comparisons if c.bucket is None):
        name = comparison.metric.partition("/")[0]
        counts[name] = max(counts.get(name, 0), comparison.n)
    kept = {name: last.cases.get(name) for name in evalsets if hasattr(product.evals[name], "evalset")}
    return [
        name
        for name, evalset in evalsets.items()
        if (kept[name] != evalset.digest if kept.get(name) else counts.get(name) not in (None, len(evalset.cases)))
    ]


def count_sizes(clusters: Sequence[str], buckets: Sequence[Sequence[str]], *, confidence: float = 0.95) -> Sizes:
    """Return the size of an evalset, overall and of each bucket.

    Args:
        clusters: of each case.
        buckets: of each case.
        confidence: of the bounds.
    """
    sizes: Sizes = {}
    for name in [None, *sorted({bucket for own in buckets for bucket in own})]:
        own = [cluster for cluster, carried in zip(clusters, buckets, strict=True) if name is None or name in carried]
        numbers = np.unique(own, return_inverse=True)[1].astype(np.int64)
        sizes[name] = SuiteSize(len(own), hiding_clusters(numbers, confidence=confidence))
    return sizes
