"""The worst images of each candidate: which they are, and the picture of the report that shows them.

Drawn without dates, so that equal images and numbers give equal files. An image that can't be shown leaves its place
empty with a word in it: pictures explain a judgement and must not stop it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.errors import EvidenceError
from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence, PairedCases
from pipeline.report.pictures.images import (
    DIFFERENCE_GAIN,
    amplify_difference,
    crop_most_different,
    locate_image,
    read_image,
)
from pipeline.report.plots import save_figure
from pipeline.settings.base import Eval

_NUM_WORST = 3  # of a candidate
_SOUND = ("sound", "finite")  # scores of an image that is one at all
_LIKENESS = "reference_ssim"  # score of an image that was compared with the reference's
_DPI = 110


def plot_worst_images(compared: ReleaseComparison, path: Path, *, gain: int = DIFFERENCE_GAIN) -> None:
    """Draw reference, candidate and difference of the worst images: a row a candidate.

    Args:
        compared: all candidates.
        path: of the file.
        gain: by how much a difference is amplified.
    """
    reference = compared.findings[compared.judgement.policy.reference].evidence
    rows = {name: m for name, m in compared.findings.items() if reference and m.evidence and m.pairs}
    figure = Figure(
        figsize=(1.15 * 3 * _NUM_WORST + 1.4, 1.35 * max(len(rows), 1) + 0.6), dpi=_DPI, layout="constrained"
    )
    axes = figure.subplots(max(len(rows), 1), 3 * _NUM_WORST, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    for line, (name, findings) in zip(axes, rows.items(), strict=False):
        line[0].text(-0.15, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=7)
        assert reference is not None
        _draw_worst(line, reference, findings, list_worst_images(findings.pairs, compared.evals)[:_NUM_WORST], gain)
    figure.suptitle(f"worst images: reference, candidate, difference × {gain}", fontsize=8)
    save_figure(figure, path)


def _draw_worst(
    line: Sequence[Axes], reference: Evidence, findings: CandidateFindings, worst: Sequence[tuple[str, int]], gain: int
) -> None:
    assert findings.evidence is not None
    for k, (eval_name, i) in enumerate(worst):
        pairs, axes = findings.pairs[eval_name], line[3 * k : 3 * k + 3]
        axes[1].set_title(pairs.reference[i].case_id, fontsize=5, parse_math=False)
        try:
            ours = read_image(locate_image(reference.folder, eval_name, pairs.reference[i]))
            theirs = read_image(locate_image(findings.evidence.folder, eval_name, pairs.candidate[i]))
            ours, theirs = crop_most_different(ours, theirs)
            pictures = ours, theirs, amplify_difference(ours, theirs, gain)
        except EvidenceError:
            axes[1].text(0.5, 0.5, "can't be shown", ha="center", va="center", fontsize=6)
            continue
        for axis, picture in zip(axes, pictures, strict=True):
            axis.imshow(picture, interpolation="nearest")


def list_worst_images(pairs: Mapping[str, PairedCases], evals: Mapping[str, Eval]) -> list[tuple[str, int]]:
    """Return (eval, position) of all images of a candidate, the worst first.

    Those that became unsound, then those least alike to the reference's. Where that was not measured, those that lost
    most of any metric in units of its spread over the cases. Other rates count through what they are rates of: an
    image that saturates a little beyond a limit is not the worst.

    Args:
        pairs: by eval.
        evals: settings of each.
    """
    ranked = []
    for eval_name, paired in pairs.items():
        unsound = losses = np.zeros(len(paired.reference))
        for definition in evals[eval_name].metrics:
            ours, theirs = (
                np.array([r.scores.get(definition.score, 0.0) for r in side])
                for side in (paired.reference, paired.candidate)
            )
            harm = definition.sign * (ours - theirs)
            if definition.score in _SOUND:
                unsound = harm
            elif definition.estimator != "proportion":
                losses = np.maximum(losses, harm / (harm.std() or 1.0))
        if all(_LIKENESS in record.scores for record in paired.candidate):
            losses = np.array([1 - record.scores[_LIKENESS] for record in paired.candidate])
        ranked += [(-unsound[i], -losses[i], eval_name, i) for i in range(len(losses))]
    return [(eval_name, i) for _, _, eval_name, i in sorted(ranked)]
