"""What MLflow shows of drawn images beside the pictures of every kind: their costs, and the decoder's headroom."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import EvidenceError
from pipeline.gate.case_table import CaseTable
from pipeline.products.images.findings.decoder import headroom
from pipeline.products.images.findings.likeness import locate_likeness
from pipeline.products.images.metrics import LIKENESS_SCORE
from pipeline.products.images.show.headroom import (
    AMPLE,
    LEAST_BITS,
    MOST_BITS,
    SCARCE,
    SCARCE_BITS,
    list_scarcest,
)
from pipeline.records.likeness import Likeness
from pipeline.records.record_files import read_record
from pipeline.report.mlflow_runs.picture_contents import (
    Case,
    Folders,
    Pairs,
    PictureRules,
    Sides,
    show_difference,
    show_image,
)
from pipeline.report.mlflow_runs.picture_view import SECTION
from pipeline.report.mlflow_runs.predictions import Scored
from pipeline.report.pictures.images import DIFFERENCE_GAIN
from pipeline.report.pictures.shown import Shown, digest_shown, render_figure
from pipeline.report.pictures.worst import list_worst_images
from pipeline.settings.base import Eval

if TYPE_CHECKING:
    from PIL.Image import Image

_MODULES_SHOWN = 6


@dataclass(frozen=True)
class ShownHeadroom:
    """How often the largest activation of a decoder's modules can double: those that have least.

    Attributes:
        key: names its chart.
        notes: file of the eval whose decoder it is.
    """

    key: str
    notes: Path

    @property
    def identity(self) -> list[str | None]:
        """Name what is shown and the content of its file; None where there is none."""
        return [self.key, "", *digest_shown([self.notes])]

    def draw(self) -> Image:
        """Draw it."""
        return _draw_headroom(_read_scarcest(self.notes))


def _list_own(sides: Sides, worst: Case | None) -> list[Shown]:
    """List the difference in a run's worst case, and its decoder's headroom."""
    notes = [sides.folders[1] / f"{eval_name}.json" for eval_name in list(sides.scored[1])[:1]]
    return [
        *show_difference(sides, worst, gain=DIFFERENCE_GAIN),
        *(ShownHeadroom(f"{SECTION}/headroom", path) for path in notes),
    ]


def _rank(pairs: Pairs, evals: Mapping[str, Eval], folders: Folders) -> list[tuple[str, int]]:
    """Rank by likeness where it was measured, as the report does: these records do not hold it."""
    build, name = folders[1].parents[1], folders[1].name
    try:
        rows = read_record(locate_likeness(build, name), Likeness).evals
    except EvidenceError:  # a release from before it
        rows = {}
    scored = {}
    for eval_name, paired in pairs.items():
        known = {row.case_id: row.ssim for row in rows.get(eval_name, ())}
        candidate = CaseTable.of(paired.candidate)
        if all(record.case_id in known for record in candidate):
            candidate = candidate.with_score(LIKENESS_SCORE, [known[record.case_id] for record in candidate])
        scored[eval_name] = replace(paired, candidate=candidate)
    return list_worst_images(scored, evals)


PICTURES = PictureRules(
    alike="pixels",
    rank=_rank,
    show_case=show_image,
    list_own=_list_own,
)


def read_costs(folder: Path, scored: Scored) -> dict[str, float]:
    """Return what the first eval noted of time, memory and room, as metrics of a run; nothing where it can't be read.

    An overflow has no number of doublings left: it is shown as the least that is drawn.
    """
    for eval_name in list(scored)[:1]:
        try:
            notes = json.loads((folder / f"{eval_name}.json").read_text(encoding="utf-8"))
            numbers = {
                f"cost/{key}": float(notes[key])
                for key in ("step_ms_per_image", "decode_ms_per_image", "decode_peak_mib")
                if notes[key] is not None
            }
            if ratio := notes["decode_to_float32"]:
                numbers["cost/decode_percent_of_float32"] = 100 * ratio["median"]
            room = min(map(headroom, notes["decoder"].values()), default=None)
            return numbers | ({} if room is None else {"cost/least_headroom_doublings": max(LEAST_BITS, room)})
        except (OSError, ValueError, KeyError, TypeError):
            return {}
    return {}


def _read_scarcest(notes: Path) -> list[tuple[str, float]]:
    try:
        return list_scarcest(json.loads(notes.read_text(encoding="utf-8"))["decoder"], limit=_MODULES_SHOWN)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvidenceError(
            f"{notes}: expected the ranges of a decoder's modules, got {type(error).__name__} while "
            "reading them; run `dvc repro`"
        ) from None


def _draw_headroom(scarcest: Sequence[tuple[str, float]]) -> Image:
    """Draw how often the largest activation can double under float16's largest number, worst modules first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4), dpi=100, layout="constrained")
    axis = figure.subplots()
    axis.barh(
        range(len(scarcest)),
        [bits for _, bits in scarcest],
        height=0.9,
        alpha=0.55,
        color=[SCARCE if bits < SCARCE_BITS else AMPLE for _, bits in scarcest],
    )
    for height, (name, _) in enumerate(scarcest):
        axis.text(LEAST_BITS + 0.3, height, name, va="center", fontsize=14, parse_math=False)
    axis.axvline(0, color="#000000", linewidth=1)
    axis.set_xlim(LEAST_BITS, MOST_BITS)
    axis.set_ylim(_MODULES_SHOWN - 0.4, -0.6)
    axis.set_yticks([])
    axis.set_title(f"doublings left in float16\n(orange: under {SCARCE_BITS:g}, or it overflowed)", fontsize=14)
    axis.tick_params(axis="x", labelsize=13)
    return render_figure(figure)
