"""The pictures of the image track's report: the worst images of each candidate, and the headroom of its decoder.

Which images are worst follows from the records alone: unsound ones first, then those that lost most of any gated
metric, in units of its spread over the cases. Drawn without dates, so that equal images give equal files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.images import headroom, read_decoder
from pipeline.gate.metrics import METRICS_BY_EVAL_KIND
from pipeline.gate.pairing import Evidence, PairedCases
from pipeline.gate.plots import save_figure

_NUM_WORST = 3  # of a candidate
_DIFFERENCE_GAIN = 4  # differences are too small to see as they are
_DPI = 110
_MODULES_SHOWN = 12
_LEAST_BITS = -4.0  # drawn for a module that overflowed

Picture = NDArray[np.uint8]


def plot_worst_images(compared: ReleaseComparison, path: Path) -> None:
    """Draw reference, candidate and difference of the worst images: a row a candidate."""
    reference = compared.measured[compared.judgement.policy.reference].evidence
    rows = [(name, m.evidence, m.pairs) for name, m in compared.measured.items() if m.evidence and m.pairs]
    figure = Figure(figsize=(1.15 * 3 * _NUM_WORST + 1.4, 1.35 * max(len(rows), 1) + 0.6), dpi=_DPI,
                    layout="constrained")  # fmt: skip
    axes = figure.subplots(max(len(rows), 1), 3 * _NUM_WORST, squeeze=False)
    for axis in axes.ravel():
        axis.set_axis_off()
    for line, (name, evidence, pairs) in zip(axes, rows, strict=False):
        line[0].text(-0.15, 0.5, name, transform=line[0].transAxes, ha="right", va="center", fontsize=7)
        assert evidence is not None and reference is not None
        for k, (eval_name, i) in enumerate(list_worst(pairs)[:_NUM_WORST]):
            ours, theirs = (_read_picture(e, eval_name, case) for e, case in (
                (reference, pairs[eval_name].reference[i]), (evidence, pairs[eval_name].candidate[i])))  # fmt: skip
            gap = np.abs(ours.astype(int) - theirs.astype(int)) * _DIFFERENCE_GAIN
            for axis, picture in zip(line[3 * k : 3 * k + 3], (ours, theirs, np.clip(gap, 0, 255)), strict=True):
                axis.imshow(picture.astype(np.uint8), interpolation="nearest")
            line[3 * k + 1].set_title(pairs[eval_name].reference[i].case_id, fontsize=5)
    figure.suptitle(f"worst images: reference, candidate, difference × {_DIFFERENCE_GAIN}", fontsize=8)
    save_figure(figure, path)


def list_worst(pairs: Mapping[str, PairedCases]) -> list[tuple[str, int]]:
    """Return (eval, position) of all cases of a candidate, the worst first."""
    ranked = []
    for eval_name, paired in pairs.items():
        losses = np.zeros(len(paired.reference))
        for definition in METRICS_BY_EVAL_KIND["images"]:
            sign = 1.0 if definition.better == "higher" else -1.0
            ours, theirs = (np.array([r.scores.get(definition.score, 0.0) for r in side])
                            for side in (paired.reference, paired.candidate))  # fmt: skip
            harm = sign * (ours - theirs)
            weight = 1e6 if definition.estimator == "proportion" else 1 / (harm.std() or 1.0)
            losses = np.maximum(losses, harm * weight)
        ranked += [(-float(loss), eval_name, i) for i, loss in enumerate(losses)]
    return [(eval_name, i) for _, eval_name, i in sorted(ranked)]


def plot_headroom(compared: ReleaseComparison, path: Path) -> None:
    """Draw how many times the largest activation of each decoder module can double before float16 overflows."""
    found = {name: read_decoder(m.evidence, eval_name) for name, m in compared.measured.items() if m.evidence
             for eval_name in list(m.evidence.records)[:1]}  # fmt: skip
    figure = Figure(figsize=(8.5, 1.0 + 1.5 * max(len(found), 1)), dpi=_DPI, layout="constrained")
    axes = figure.subplots(max(len(found), 1), 1, squeeze=False, sharex=True).ravel()
    for axis, (name, modules) in zip(axes, found.items(), strict=False):
        all_bits = {name: headroom(module, "headroom_bits_float16") for name, module in modules.items()}
        worst = sorted(all_bits, key=lambda n: all_bits[n])[:_MODULES_SHOWN][::-1]
        bits = [max(_LEAST_BITS, all_bits[n]) for n in worst]
        colours = ["#D55E00" if b < 1 else "#0072B2" for b in bits]
        axis.barh(range(len(worst)), bits, color=colours)
        axis.set_yticks(range(len(worst)), [name or "(output)" for name in worst], fontsize=4)
        axis.axvline(0, color="#000000", linewidth=1)
        axis.set_title(name, fontsize=7, loc="left")
        axis.tick_params(axis="x", labelsize=6, labelbottom=True)
        axis.set_xlim(_LEAST_BITS, 16)
    figure.supxlabel("doublings left under float16's largest number, worst modules (orange: under 1, or it overflowed)",
                     fontsize=7)  # fmt: skip
    save_figure(figure, path)


def _read_picture(evidence: Evidence, eval_name: str, record: Any) -> Picture:
    from PIL import Image

    with Image.open(evidence.folder / eval_name / f"{record.case_id}.png") as opened:
        return np.asarray(opened.convert("RGB"))
