"""What report and MLflow show of kind `text`: task completion, speed, what the path changes, and what drafts did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence
from pipeline.products.text.findings.canary import describe_canary
from pipeline.products.text.findings.speculation import describe_speculation
from pipeline.products.text.settings import TextProduct
from pipeline.products.text.show.plots import plot_completion, plot_sizes, plot_speed
from pipeline.products.text.show.runs import format_step, measure_run
from pipeline.products.text.show.speed import build_speed_section
from pipeline.records.benchmarks import Machine
from pipeline.records.verdicts import Verdict
from pipeline.report.built_candidate import describe_built_candidate
from pipeline.report.presenting import JudgedRun, Presenter, Words
from pipeline.report.sections import Block, Figure, Section
from pipeline.settings.base import Eval

_COMPLETION = Figure("completion.png", "Task completion", "Task completion by bucket", plot_completion)
_SIZES = Figure("sizes.png", "Quality by size", "The headline metric by the bytes of the weights", plot_sizes)
_SPEED = Figure("speed.png", "Speed", "Throughput of every cell of the benchmark, candidate / reference", plot_speed)


class TextPresenter(Presenter[TextProduct]):
    """What is shown of kind `text`."""

    words = Words(
        units="percent for\nperplexity",
        clusters="a template or a document",
        marks="- · reported only. Divergence (KL, changed outputs) says where to look and never decides.\n",
    )

    def list_figures(self, product: TextProduct) -> tuple[Figure, ...]:
        """Return task completion by bucket, quality by size, and speed."""
        return _COMPLETION, _SIZES, _SPEED

    def list_columns(self, evals: Mapping[str, Eval]) -> list[str]:
        """Return the divergence from the reference, token by token."""
        return [f"{name}/kl_nats_per_token" for name, settings in evals.items() if settings.kind == "perplexity"]

    def build_overview(self, compared: ReleaseComparison) -> list[Block]:
        """Return the pictures."""
        judgement = compared.judgement
        chats = "trajectories" in judgement.policy.eval_kinds.values()
        is_timed = any(verdict.speed for verdict in judgement.verdicts)
        sizes = {m.evidence.candidate.checkpoint.num_bytes for m in compared.findings.values() if m.evidence}
        shown = [(_COMPLETION, chats), (_SIZES, len(sizes) > 1), (_SPEED, is_timed)]
        return [figure for figure, has_content in shown if has_content]

    def build_candidate(
        self, verdict: Verdict, findings: CandidateFindings, evidence: Evidence, reference: Evidence | None
    ) -> list[Block]:
        """Return its steps, what drafts did, and what the canary showed of another path or other weights."""
        blocks: list[Block] = [describe_built_candidate(evidence.candidate)]
        counts, drafts = evidence.evaluation.speculation, evidence.candidate.serving.speculative
        if counts is not None and drafts is not None:
            blocks.append(describe_speculation(counts, drafts.method))
        if verdict.canary is not None and not verdict.canary.is_same_weights:
            blocks.append(describe_canary(verdict.canary))
        return blocks

    def build_speed(self, findings: CandidateFindings, here: Machine | None) -> Section | None:
        """Return the grid of the benchmark, and how it was measured."""
        return build_speed_section(findings, here)

    def format_step(self, step: Mapping[str, Any]) -> str:
        """Return a step in the short forms of its field: int4 g128 sym, k4."""
        return format_step(step)

    def measure_run(self, run: JudgedRun) -> dict[str, float]:
        """Return the benchmark's medians, answers of the canary that differ, and drafts that were accepted."""
        return measure_run(run)
