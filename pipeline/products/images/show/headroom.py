"""How much room the modules of a decoder have left: the picture of the report.

Drawn without dates, so that equal numbers give equal files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pipeline.gate.compare import ReleaseComparison
from pipeline.products.images.findings.decoder import headroom, read_decoder
from pipeline.report.plots import save_figure

_DPI = 110
_MODULES_SHOWN = 12
LEAST_BITS, MOST_BITS = -4.0, 16.0  # drawn of headroom; an overflow is drawn as the least
SCARCE_BITS = 1.0  # of headroom, below which a module stands out
SCARCE, AMPLE = "#D55E00", "#0072B2"  # Okabe-Ito


def plot_headroom(compared: ReleaseComparison, path: Path) -> None:
    """Draw how many times the largest activation of each decoder module can double before float16 overflows."""
    decoders = {
        name: read_decoder(m.evidence, eval_name)
        for name, m in compared.findings.items()
        if m.evidence
        for eval_name in list(m.evidence.records)[:1]
    }
    figure = Figure(figsize=(8.5, 1.0 + 1.5 * max(len(decoders), 1)), dpi=_DPI, layout="constrained")
    axes = figure.subplots(max(len(decoders), 1), 1, squeeze=False, sharex=True).ravel()
    for axis, (name, modules) in zip(axes, decoders.items(), strict=False):
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


def list_scarcest(modules: Mapping[str, Mapping[str, Any]], *, limit: int) -> list[tuple[str, float]]:
    """Return name and float16 headroom of the decoder's modules that have least, least first, within what is drawn."""
    bits = {name or "(output)": headroom(module, "headroom_bits_float16") for name, module in modules.items()}
    scarcest = sorted(bits, key=lambda name: bits[name])[:limit]
    return [(name, min(MOST_BITS, max(LEAST_BITS, bits[name]))) for name in scarcest]
