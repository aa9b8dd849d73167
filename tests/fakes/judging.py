"""Judge a product of any kind by what its kind knows of it, as stage compare does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.gate import compare
from pipeline.gate.audits import Auditor
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.verdicts import Judgement
from pipeline.products import KINDS
from pipeline.records.benchmarks import Machine
from pipeline.records.verdicts import Verdict
from pipeline.report import markdown_report
from pipeline.report.explain import explain_release
from pipeline.report.mlflow_runs import run_contents
from pipeline.report.mlflow_runs.run_contents import RunContents
from pipeline.settings.base import Product


def compare_release(product: Product, build: Path, auditor: Auditor[Any] | None = None) -> ReleaseComparison:
    """Judge all candidates of a product against its reference, by what its kind knows of it or by another auditor."""
    return compare.compare_release(product, auditor or KINDS[product.kind].get_auditor(), build)


def list_said(verdict: Verdict) -> list[str]:
    """Return the reasons of a verdict as people read them."""
    return [str(reason) for reason in verdict.reasons]


def render_report(compared: ReleaseComparison, here: Machine | None = None) -> str:
    """Write the report as stage compare does."""
    presenter = KINDS[compared.judgement.policy.kind].get_presenter()
    explanation = explain_release(compared, quotes_outputs=not presenter.words.given)
    return markdown_report.render_report(compared, explanation, presenter, here)


def build_runs(judgement: Judgement, build: Path) -> list[RunContents]:
    """Return a run per judged candidate, by the evals that the judgement names."""
    kinds = KINDS[judgement.policy.kind].evals
    evals = {name: kinds[asked["kind"]].model_validate(asked) for name, asked in judgement.policy.evals.items()}
    presenter = KINDS[judgement.policy.kind].get_presenter()
    return run_contents.build_runs(judgement, evals, build, presenter)
