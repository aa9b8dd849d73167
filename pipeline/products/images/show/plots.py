"""The pictures of the report on images that show images and decoders: the worst ones, and the headroom of each.

Drawn without dates, so that equal images and numbers give equal files. An image that can't be shown leaves its place
empty with a word in it: pictures explain a judgement and must not stop it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.errors import EvidenceError
from pipeline.gate.audits import Measured
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence
from pipeline.gate.verdicts import Policy
from pipeline.products.images.findings.decoder import read_decoder
from pipeline.products.vision.show.seams import SEAM_GAIN
from pipeline.report.flips import list_worst_images
from pipeline.report.pictures.images import (
    AMPLE,
    DIFFERENCE_GAIN,
    LEAST_BITS,
    MOST_BITS,
    SCARCE,
    SCARCE_BITS,
    amplify_difference,
    crop_most_different,
    list_scarcest,
    locate_image,
    read_image,
)
from pipeline.report.plots import save_figure

_NUM_WORST = 3  # of a candidate
_DPI = 110
_MODULES_SHOWN = 12


def plot_worst_images(compared: ReleaseComparison, path: Path) -> None:
    """Draw reference, candidate and difference of the worst images: a row a candidate."""
    reference = compared.measured[compared.judgement.policy.reference].evidence
    rows = {name: m for name, m in compared.measured.items() if reference and m.evidence and m.pairs}
    figure = Figure(
        figsize=(1.15 * 3 * _NUM_WORST + 1.4, 1.35 * max(len(rows), 1) + 0.6), dpi=_DPI, layout="constrained"
    )
    axes = figure.subplots(max(len(rows), 1), 3 * _NUM_WORST, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    for line, (name, measured) in zip(axes, rows.items(), strict=False):
        line[0].text(-0.15, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=7)
        assert reference is not None
        _draw_worst(line, reference, measured, compared)
    gain = _choose_gain(compared.judgement.policy)
    figure.suptitle(f"worst images: reference, candidate, difference × {gain}", fontsize=8)
    save_figure(figure, path)


def _choose_gain(policy: Policy) -> int:
    """Return by how much a difference is amplified: an upscaler is close to its reference."""
    return SEAM_GAIN if policy.kind == "vision" else DIFFERENCE_GAIN


def _draw_worst(line: Sequence[Axes], reference: Evidence, measured: Measured, compared: ReleaseComparison) -> None:
    assert measured.evidence is not None
    for k, (eval_name, i) in enumerate(list_worst_images(measured.pairs, compared.evals)[:_NUM_WORST]):
        pairs, axes = measured.pairs[eval_name], line[3 * k : 3 * k + 3]
        axes[1].set_title(pairs.reference[i].case_id, fontsize=5, parse_math=False)
        try:
            ours = read_image(locate_image(reference.folder, eval_name, pairs.reference[i]))
            theirs = read_image(locate_image(measured.evidence.folder, eval_name, pairs.candidate[i]))
            ours, theirs = crop_most_different(ours, theirs)
            pictures = ours, theirs, amplify_difference(ours, theirs, _choose_gain(compared.judgement.policy))
        except EvidenceError:
            axes[1].text(0.5, 0.5, "can't be shown", ha="center", va="center", fontsize=6)
            continue
        for axis, picture in zip(axes, pictures, strict=True):
            axis.imshow(picture, interpolation="nearest")


def plot_headroom(compared: ReleaseComparison, path: Path) -> None:
    """Draw how many times the largest activation of each decoder module can double before float16 overflows."""
    found = {
        name: read_decoder(m.evidence, eval_name)
        for name, m in compared.measured.items()
        if m.evidence
        for eval_name in list(m.evidence.records)[:1]
    }
    figure = Figure(figsize=(8.5, 1.0 + 1.5 * max(len(found), 1)), dpi=_DPI, layout="constrained")
    axes = figure.subplots(max(len(found), 1), 1, squeeze=False, sharex=True).ravel()
    for axis, (name, modules) in zip(axes, found.items(), strict=False):
        scarcest = list_scarcest(modules, limit=_MODULES_SHOWN)[::-1]
        axis.barh(
            range(len(scarcest)),
            [bits for _, bits in scarcest],
            color=[SCARCE if bits < SCARCE_BITS else AMPLE for _, bits in scarcest],
        )
        axis.set_yticks(range(len(scarcest)), [module for module, _ in scarcest], fontsize=4)
        axis.axvline(0, color="#000000", linewidth=1)
        axis.set_title(name, fontsize=7, loc="left")
        axis.tick_params(axis="x", labelsize=6, labelbottom=True)
        axis.set_xlim(LEAST_BITS, MOST_BITS)
    figure.supxlabel(
        "doublings left under float16's largest number, worst modules (orange: under 1, or it overflowed)", fontsize=7
    )
    save_figure(figure, path)
