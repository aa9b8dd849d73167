"""What a sweep shows of each setting: four numbers with intervals, the gate's verdict, and the Pareto set.

Intervals of the metrics and all verdicts are the gate's own. The Pareto set follows from the estimates: no other
setting has fewer saturated pixels and a CLIP similarity as high, or the reverse. The share of bootstrap samples in
which a setting is in the set shows how far that depends on these prompts. Whole clusters are drawn, the same ones for
every setting, as all have rendered the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples.guidance_sweep.settings import SATURATION, SIMILARITY, read_setting
from pipeline.errors import EvidenceError
from pipeline.gate.audits import CandidateFindings
from pipeline.gate.case_table import CaseTable
from pipeline.gate.compare import compare_release
from pipeline.gate.pairing import read_scores
from pipeline.products.images import ImagesKind
from pipeline.products.images.settings import GuidanceStep, ImagesProduct
from pipeline.records.evaluations import CaseRecord
from pipeline.records.verdicts import Comparison, Verdict

OVERSATURATION, STD_RATIO = "oversaturated_image_rate", "guided_std_ratio"
_NUM_DRAWS = 2_000

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SweepRow:
    """One setting.

    Attributes:
        estimates: by metric: saturation of pixels and of images, similarity, ratio of deviations.
        verdict: of the gate, against the reference; None for the reference itself.
        is_pareto: no other setting is better in saturation or similarity without being worse in the other.
        pareto_share: of bootstrap samples of the prompts in which that holds.
    """

    name: str
    step: GuidanceStep
    num_prompts: int
    estimates: dict[str, Estimate]
    verdict: Verdict | None
    is_pareto: bool
    pareto_share: float

    def find_comparison(self, metric: str) -> Comparison | None:
        """Return the gate's comparison of a metric over all prompts, None for the reference."""
        comparisons = self.verdict.comparisons if self.verdict else ()
        return next((c for c in comparisons if c.metric.rpartition("/")[2] == metric and c.bucket is None), None)


def judge_sweep(product: ImagesProduct, build: Path) -> list[SweepRow]:
    """Judge every setting that was rendered, in the product's order: the reference first.

    Args:
        product: of `make_sweep_product`.
        build: folder that holds what was rendered.

    Raises:
        EvidenceError: the records of a setting can't be judged at all.
    """
    compared = compare_release(product, ImagesKind().get_auditor(), build)
    (eval_name,) = product.evals
    records = {name: _read_records(compared.findings[name], eval_name) for name in product.candidates}
    clusters = CaseTable.of(records[product.reference]).clusters
    saturated, similar = (
        np.array([read_scores(rows, score, where=name) for name, rows in records.items()])
        for score in ("saturated", "clip")
    )
    pareto = find_pareto_set(saturated.mean(1), similar.mean(1))
    shares = resample_pareto_set(saturated, similar, clusters)
    verdicts = {verdict.candidate: verdict for verdict in compared.judgement.verdicts}
    rows = []
    for i, name in enumerate(product.candidates):
        rows.append(
            SweepRow(
                name=name,
                step=read_setting(product, name),
                num_prompts=len(clusters),
                is_pareto=bool(pareto[i]),
                pareto_share=float(shares[i]),
                estimates=_read_estimates(compared.findings[name]),
                verdict=verdicts.get(name),
            )
        )
    return rows


def find_pareto_set(saturated: Floats, similar: Floats) -> Bools:
    """Say of each setting whether no other is as good in both and better in one.

    Args:
        saturated: of each setting, lower is better; shape (..., settings).
        similar: higher is better, the same shape.
    """
    fewer, as_few = (op(saturated[..., None, :], saturated[..., :, None]) for op in (np.less, np.less_equal))
    nearer, as_near = (op(similar[..., None, :], similar[..., :, None]) for op in (np.greater, np.greater_equal))
    is_beaten = (as_few & as_near & (fewer | nearer)).any(axis=-1)
    return np.logical_not(is_beaten)


def resample_pareto_set(saturated: Floats, similar: Floats, clusters: NDArray[np.int64], *, seed: int = 0) -> Floats:
    """Return the share of bootstrap samples in which each setting is in the Pareto set.

    Args:
        saturated: shape (settings, prompts).
        similar: the same shape.
        clusters: of each prompt, 0-based without holes.
        seed: of the draws.

    Reference: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 8 (clusters as units).
    """
    num_clusters = int(clusters.max()) + 1
    draws = np.random.default_rng(seed).multinomial(num_clusters, np.full(num_clusters, 1 / num_clusters), _NUM_DRAWS)
    weights = draws[:, clusters].astype(np.float64)
    weights /= weights.sum(1, keepdims=True)
    # no matrix product: it may round equal rows differently, and one of equal settings would beat the other
    sets = [find_pareto_set((saturated * w).sum(1), (similar * w).sum(1)) for w in weights]
    shares: Floats = np.mean(sets, axis=0)
    return shares


def _read_records(findings: CandidateFindings, eval_name: str) -> list[CaseRecord]:
    if findings.evidence is None or eval_name not in findings.evidence.records:
        raise EvidenceError(findings.refusals[0])
    return sorted(findings.evidence.records[eval_name], key=lambda record: record.input_digest)


def _read_estimates(findings: CandidateFindings) -> dict[str, Estimate]:
    names = (SATURATION, OVERSATURATION, SIMILARITY, STD_RATIO)
    metrics = {m.name.rpartition("/")[2]: m for m in findings.metrics if m.bucket is None}
    return {
        name: Estimate(m.value, m.low if m.low is not None else m.value, m.high if m.high is not None else m.value)
        for name in names
        if (m := metrics[name])
    }


def list_pareto(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Return the Pareto set, the least saturated first."""
    return sorted((row for row in rows if row.is_pareto), key=lambda row: row.estimates[SATURATION].value)
