"""The pictures of the image track's report: the worst images of each candidate, and the headroom of its decoder.

Which images are worst follows from the records alone: unsound ones first, then those that lost most of any gated
metric, in units of its spread over the cases. Drawn without dates, so that equal images give equal files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.metrics import METRICS_BY_EVAL_KIND
from pipeline.gate.pairing import Evidence, PairedCases
from pipeline.records import replace_whole

_NUM_WORST = 3  # of a candidate
_DIFFERENCE_GAIN = 4  # differences are too small to see as they are
_DPI = 110
_MODULES_SHOWN = 12

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
    _save(figure, path)


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
    """Draw how many times the largest activation of each decoder module can double in the format it runs in."""
    found = {name: notes for name, m in compared.measured.items() if m.evidence and (notes := read_decoder(m.evidence))}
    figure = Figure(figsize=(8.5, 1.0 + 1.5 * max(len(found), 1)), dpi=_DPI, layout="constrained")
    axes = figure.subplots(max(len(found), 1), 1, squeeze=False, sharex=True).ravel()
    for axis, (name, modules) in zip(axes, found.items(), strict=False):
        worst = sorted(modules, key=lambda n: _headroom(modules[n]))[:_MODULES_SHOWN][::-1]
        bits = [max(-2.0, _headroom(modules[n])) for n in worst]
        colours = ["#D55E00" if modules[n]["nonfinite_count"] or b < 1 else "#0072B2" for n, b in
                   zip(worst, bits, strict=True)]  # fmt: skip
        axis.barh(range(len(worst)), bits, color=colours)
        axis.set_yticks(range(len(worst)), worst, fontsize=4)
        axis.axvline(0, color="#000000", linewidth=1)
        axis.set_title(name, fontsize=7, loc="left")
        axis.tick_params(axis="x", labelsize=6, labelbottom=True)
        axis.set_xlim(-2, 20)
    figure.supxlabel("doublings left under the format's largest number, worst modules (orange: overflows, or under 1)",
                     fontsize=7)  # fmt: skip
    _save(figure, path)


def read_decoder(evidence: Evidence) -> dict[str, dict[str, Any]]:
    """Return the ranges of the decoder's modules of the first eval that has notes, {} when none has."""
    for file in evidence.evaluation.evals.values():
        path = (evidence.folder / file.records).with_suffix(".json")
        if file.notes_sha256 and path.is_file():
            return dict(json.loads(path.read_text(encoding="utf-8"))["decoder"])
    return {}


def _headroom(module: Mapping[str, Any]) -> float:
    # None stands for infinite: of a module that overflowed, or that only wrote zeros
    return float(module["headroom_bits"]) if module["headroom_bits"] is not None else (
        -math.inf if module["nonfinite_count"] else math.inf)


def _read_picture(evidence: Evidence, eval_name: str, record: Any) -> Picture:
    from PIL import Image

    with Image.open(evidence.folder / eval_name / f"{record.case_id}.png") as opened:
        return np.asarray(opened.convert("RGB"))


def _save(figure: Figure, path: Path) -> None:
    with replace_whole(path) as temporary:
        FigureCanvasAgg(figure).print_png(temporary, metadata={"Software": None})
