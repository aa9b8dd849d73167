"""The pictures of a network product's report that show pictures: boxes that were lost, and stitches between tiles.

Drawn without dates. A picture that can't be shown leaves its place empty with a word in it: pictures explain a
judgement and must not stop it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.errors import EvidenceError, NumericsError
from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence, PairedCases
from pipeline.products.vision.show.boxes import BOXES_LEGEND, Found, draw_boxes, find_lost, rank_losses, read_both
from pipeline.products.vision.show.seams import SEAM_GAIN, Strip, cut_strip
from pipeline.report.pictures.images import amplify_difference, locate_image, measure_given, read_given, read_image
from pipeline.report.plots import save_figure

_NUM_WORST = 3  # of a candidate
_SHOWN_PART = 0.5  # of a picture's longer side
_DPI = 96
_SIDES = (("reference", "#4D4D4D", "--"), ("candidate", "#D55E00", "-"))


def plot_found(compared: ReleaseComparison, path: Path) -> None:
    """Draw the pictures on which a detector lost most objects, beside the reference: a row a candidate."""
    lost = {name: rank_losses(m.pairs)[:_NUM_WORST] for name, m in compared.findings.items() if m.evidence and m.pairs}
    rows = {name: worst for name, worst in lost.items() if worst}
    figure = Figure(figsize=(2.1 * 2 * _NUM_WORST, 2.3 * max(len(rows), 1) + 0.7), dpi=_DPI, layout="constrained")
    axes = figure.subplots(max(len(rows), 1), 2 * _NUM_WORST, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    for line, (name, worst) in zip(axes, rows.items(), strict=False):
        line[0].text(-0.05, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=8, rotation=90)
        for k, (eval_name, i) in enumerate(worst):
            _draw_found(line[2 * k : 2 * k + 2], compared.findings[name].pairs[eval_name], i)
    unharmed = ", ".join(name for name, worst in lost.items() if not worst)
    figure.suptitle(
        f"worst pictures, cut to what is lost: reference left, candidate right ({BOXES_LEGEND})"
        + (f"\nno such object is lost by: {unharmed}" if unharmed else ""),
        fontsize=8,
    )
    save_figure(figure, path)


def _draw_found(axes: Sequence[Axes], pairs: PairedCases, i: int) -> None:
    record, sides = pairs.reference[i], read_both(pairs, i)
    lost = find_lost(*sides)
    counts = [f"{side.is_hit.sum()} of {record.scores['objects']:g}" for side in sides]
    axes[0].set_title(f"{record.case_id}: {counts[0]}", fontsize=6, parse_math=False)
    axes[1].set_title(counts[1], fontsize=6)
    try:
        picture = read_given(record)
    except EvidenceError:
        axes[0].text(0.5, 0.5, "can't be shown", ha="center", va="center", fontsize=7)
        return
    for axis, side in zip(axes, sides, strict=True):
        axis.imshow(
            draw_boxes(picture, side, lost),
            interpolation="antialiased",
            extent=(0, picture.shape[1], picture.shape[0], 0),
        )
        _cut_to(axis, lost, picture.shape[1], picture.shape[0])


def _cut_to(axis: Axes, lost: Found, width: int, height: int) -> None:
    """Show a square round some boxes, of half the picture or as large as it takes."""
    ends = np.stack([lost.boxes[:, :2].min(axis=0), (lost.boxes[:, :2] + lost.boxes[:, 2:]).max(axis=0)])
    side = min(max(_SHOWN_PART * max(width, height), 1.1 * (ends[1] - ends[0]).max()), width, height)
    left, top = (
        float(np.clip(middle - side / 2, 0, most - side))
        for middle, most in zip(ends.mean(axis=0), (width, height), strict=True)
    )
    axis.set_xlim(left, left + side)
    axis.set_ylim(top + side, top)


def plot_seams(compared: ReleaseComparison, path: Path) -> None:
    """Draw a stitch of the worst picture of each tiled candidate beside the reference, and the step across it."""
    reference = compared.findings[compared.judgement.policy.reference].evidence
    tiled = {
        name: m
        for name, m in compared.findings.items()
        if m.pairs and m.evidence and m.evidence.candidate.serving.tiling
    }
    figure = Figure(figsize=(9.5, 2.2 * max(len(tiled), 1) + 0.5), dpi=_DPI, layout="constrained")
    axes = figure.subplots(max(len(tiled), 1), 4, squeeze=False, width_ratios=(1, 1, 1, 1.7))
    for axis in axes.ravel():
        axis.set_axis_off()
    for line, (name, findings) in zip(axes, tiled.items(), strict=False):
        line[0].set_title(name, fontsize=8, loc="left", parse_math=False)
        try:
            case_id, strip = _find_strip(findings, reference)
        except (EvidenceError, NumericsError):
            line[1].text(0.5, 0.5, "can't be shown", ha="center", va="center", fontsize=7)
            continue
        line[1].set_title(case_id, fontsize=7, parse_math=False)
        _draw_strip(line, strip)
    figure.suptitle(
        "a stitch of the worst picture: reference, candidate, difference × "
        f"{SEAM_GAIN}, and the mean signed step along it"
        if tiled
        else "no candidate runs in tiles",
        fontsize=8,
    )
    save_figure(figure, path)


def _find_strip(findings: CandidateFindings, reference: Evidence | None) -> tuple[str, Strip]:
    """Return the case with the largest seam, and its worst stitch."""
    for eval_name, i in _order_by_seam(findings):
        pairs = findings.pairs[eval_name]
        if reference is None or findings.evidence is None:
            break
        given = measure_given(pairs.candidate[i])
        ours, theirs = (
            read_image(locate_image(side.folder, eval_name, records[i]))
            for side, records in ((reference, pairs.reference), (findings.evidence, pairs.candidate))
        )
        strip = cut_strip(ours, theirs, given, findings.evidence.candidate.serving.tiling)
        if strip is not None:
            return pairs.reference[i].case_id, strip
    raise EvidenceError("seams: no picture is cut")


def _order_by_seam(findings: CandidateFindings) -> Iterator[tuple[str, int]]:
    places = [
        (-record.scores.get("worst_seam_levels", 0.0), eval_name, i)
        for eval_name, pairs in findings.pairs.items()
        for i, record in enumerate(pairs.candidate)
    ]
    yield from ((eval_name, i) for _, eval_name, i in sorted(places))


def _draw_strip(line: Sequence[Axes], strip: Strip) -> None:
    difference = amplify_difference(strip.reference, strip.candidate, SEAM_GAIN)
    for axis, picture in zip(line[:3], (strip.reference, strip.candidate, difference), strict=True):
        axis.imshow(picture, interpolation="nearest")
        for end in (0, 1):  # marks of the stitch, outside of the pixels
            axis.plot(
                [strip.stitch - 0.5] * 2,
                [-0.04 if end else 1.0, 0.0 if end else 1.04],
                color="#000000",
                linewidth=1.2,
                transform=axis.get_xaxis_transform(),
                clip_on=False,
            )
    places = np.arange(strip.steps.shape[1]) + 1 - strip.stitch
    for steps, (label, colour, style) in zip(strip.steps, _SIDES, strict=True):
        line[3].plot(places, steps, style, color=colour, linewidth=1.2, label=label)
    line[3].set_axis_on()
    line[3].axvline(0, color="#000000", linewidth=0.6)
    line[3].set_ylabel("grey levels", fontsize=7)
    line[3].set_xlabel("pixels from the stitch", fontsize=7)
    line[3].tick_params(labelsize=7)
    line[3].legend(fontsize=7, frameon=False)
