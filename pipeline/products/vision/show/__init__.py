"""What report and MLflow show of kind `vision`: pictures of what was lost, layers and stitches, and costs."""

from __future__ import annotations

from functools import partial

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence
from pipeline.gate.verdicts import Policy
from pipeline.products.vision.findings.speed import list_inexact_layers
from pipeline.products.vision.settings import VisionProduct
from pipeline.products.vision.show.costs import explain_network_costs, tabulate_network_costs
from pipeline.products.vision.show.pictures import plot_found, plot_seams
from pipeline.products.vision.show.plots import plot_buckets, plot_layers
from pipeline.products.vision.show.runs import BOXES, RESTORED, read_costs
from pipeline.products.vision.show.seams import SEAM_GAIN
from pipeline.products.vision.show.sections import build_network_blocks
from pipeline.records.evaluations import CaseRecord
from pipeline.records.verdicts import Verdict
from pipeline.report.mlflow_runs.picture_contents import PictureRules
from pipeline.report.pictures.worst import plot_worst_images
from pipeline.report.presenting import JudgedRun, Presenter, Words
from pipeline.report.sections import Block, Figure, Table

_WORST = "The worst pictures beside the reference"
_LOST = Figure(
    "worst.png", _WORST, "Pictures on which most objects were lost, boxes of reference and candidate", plot_found
)
_BUCKETS = Figure(
    "buckets.png",
    "Average precision by size",
    "Average precision by size of the objects, with 95 % intervals",
    plot_buckets,
)
_DIFFERING = Figure(
    "worst.png",
    _WORST,
    "Reference, candidate and difference of the worst pictures",
    partial(plot_worst_images, gain=SEAM_GAIN),
)
_SEAMS = Figure(
    "seams.png",
    "Stitches between tiles",
    "A stitch of the worst picture of each tiled candidate, and the step across it",
    plot_seams,
)
_LAYERS = Figure(
    "layers.png",
    "How far layers are from float32, and the room they have left",
    "Relative error of each layer against float32",
    plot_layers,
)


class VisionPresenter(Presenter[VisionProduct]):
    """What is shown of kind `vision`."""

    words = Words(
        units="others\nin their own unit",
        clusters="as the evalset says",
        marks="- ➖ **no gain**: nothing is lost, and a step that is there for speed alone is not faster beyond "
        "noise.\n"
        "- · reported only.\n",
        given="picture",
        judged=("NOT FINITE", "finite"),
    )

    def list_figures(self, product: VisionProduct) -> tuple[Figure, ...]:
        """Return the worst pictures, what the task adds, and the error of each layer."""
        return (_LOST, _BUCKETS, _LAYERS) if product.task == "detection" else (_DIFFERING, _SEAMS, _LAYERS)

    def build_overview(self, compared: ReleaseComparison) -> list[Block]:
        """Return the table of costs and the pictures, less those that no candidate has anything to show in."""
        evidence = [findings.evidence for findings in compared.findings.values()]
        finds_boxes = "detection" in compared.judgement.policy.eval_kinds.values()
        is_tiled = any(e is not None and e.candidate.serving.tiling for e in evidence)
        return [
            Table(tabulate_network_costs(compared)),
            explain_network_costs(compared),
            *((_BUCKETS, _LOST) if finds_boxes else (_DIFFERING, _SEAMS) if is_tiled else (_DIFFERING,)),
            *([_LAYERS] if any(map(list_inexact_layers, evidence)) else []),
        ]

    def build_candidate(
        self, verdict: Verdict, findings: CandidateFindings, evidence: Evidence, reference: Evidence | None
    ) -> list[Block]:
        """Return its steps, its policy layer by layer, its fallbacks and its tiles."""
        return build_network_blocks(evidence)

    def format_output(self, record: CaseRecord) -> str:
        """Return the scores: boxes and the digests of pictures are no text."""
        scores = record.scores
        if {"found_50", "objects", "false_alarms"} <= scores.keys():
            return (
                f"{scores['found_50']:g} of {scores['objects']:g} objects found at IoU 0.5, "
                f"{scores['false_alarms']:g} false alarms"
            )
        if {"psnr_db", "ssim", "seam_levels", "finite"} <= scores.keys():
            return f"{scores['psnr_db']:.2f} dB, SSIM {scores['ssim']:.4f}, seams of {scores['seam_levels']:.2f} levels"
        return record.output

    def measure_run(self, run: JudgedRun) -> dict[str, float]:
        """Return time, memory and numbers."""
        return read_costs(run.folder, run.scored)

    def choose_rules(self, policy: Policy) -> PictureRules:
        """Show each candidate's worst pictures, with boxes or beside the difference, and a stitch of its tiles."""
        return BOXES if "detection" in policy.eval_kinds.values() else RESTORED
