"""What report and MLflow show of kind `images`: the worst images, what they cost, the decoder's room, guidance."""

from __future__ import annotations

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence
from pipeline.gate.verdicts import Policy
from pipeline.products.images.settings import ImagesProduct
from pipeline.products.images.show.costs import COSTS_LEGEND, tabulate_costs
from pipeline.products.images.show.guidance import explain_guidance, list_guided, plot_guidance
from pipeline.products.images.show.headroom import plot_headroom
from pipeline.products.images.show.likeness import build_likeness_blocks
from pipeline.products.images.show.rendering import build_rendering_blocks, describe_files
from pipeline.products.images.show.runs import PICTURES, read_costs
from pipeline.records.verdicts import Verdict
from pipeline.report.built_candidate import describe_built_candidate
from pipeline.report.mlflow_runs.picture_contents import PictureRules
from pipeline.report.pictures.worst import plot_worst_images
from pipeline.report.presenting import JudgedRun, Presenter, Words
from pipeline.report.sections import Block, Figure, Table

_WORST = Figure(
    "worst.png",
    "The worst pictures beside the reference",
    "Reference, candidate and difference of the worst images",
    plot_worst_images,
)
_GUIDANCE = Figure(
    "guidance.png",
    "What guidance does: saturation against similarity",
    "Saturated pixels against CLIP similarity of what guides otherwise",
    plot_guidance,
)
_HEADROOM = Figure("headroom.png", "Room left in the decoder", "Headroom of the decoder's modules", plot_headroom)


class ImagesPresenter(Presenter[ImagesProduct]):
    """What is shown of kind `images`."""

    words = Words(
        units="others\nin their own unit",
        clusters="as the evalset says",
        marks="- · reported only. Divergence (KL, changed outputs) says where to look and never decides.\n",
        given="prompt",
    )

    def list_figures(self, product: ImagesProduct) -> tuple[Figure, ...]:
        """Return the worst images, guidance, and the headroom of the decoders."""
        return _WORST, _GUIDANCE, _HEADROOM

    def build_overview(self, compared: ReleaseComparison) -> list[Block]:
        """Return the tables of costs and likeness and the pictures, guidance where a candidate guides otherwise."""
        evidence = {name: findings.evidence for name, findings in compared.findings.items()}
        guided = list_guided(evidence, compared.judgement.policy.reference)
        likeness = build_likeness_blocks(compared)
        costs: list[Block] = [Table(tabulate_costs(compared)), COSTS_LEGEND, *likeness, _WORST, _HEADROOM]
        return costs + ([_GUIDANCE, explain_guidance(guided)] if guided else [])

    def build_candidate(
        self, verdict: Verdict, findings: CandidateFindings, evidence: Evidence, reference: Evidence | None
    ) -> list[Block]:
        """Return its steps, the files it differs in, what rendering cost, and what a range fix proved."""
        files = [describe_files(evidence, reference)] if reference else []
        return [describe_built_candidate(evidence.candidate), *files, *build_rendering_blocks(evidence)]

    def measure_run(self, run: JudgedRun) -> dict[str, float]:
        """Return time, memory and room."""
        return read_costs(run.folder, run.scored)

    def choose_rules(self, policy: Policy) -> PictureRules:
        """Show each candidate's worst images, its difference from the reference, and its decoder's headroom."""
        return PICTURES
