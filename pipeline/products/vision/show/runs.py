"""What MLflow shows of networks beside what it shows of all pictures: boxes, a stitch between tiles, and costs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import EvidenceError
from pipeline.gate.pairing import PairedCases
from pipeline.products.vision.findings.notes import NetworkNotes, parse_notes
from pipeline.products.vision.show.boxes import JudgedBoxes, draw_boxes, find_lost, rank_losses
from pipeline.products.vision.show.costs import find_scarcest_layer, find_worst_layer
from pipeline.products.vision.show.seams import SEAM_GAIN, cut_strip
from pipeline.records.detections import load_matches
from pipeline.records.digests import digest_text
from pipeline.records.evaluations import CaseRecord, Evaluation
from pipeline.records.record_files import read_record
from pipeline.records.serving import Tiling
from pipeline.report.mlflow_runs.picture_contents import (
    Case,
    Folders,
    PictureRules,
    Sides,
    show_difference,
    show_image,
)
from pipeline.report.mlflow_runs.picture_view import SECTION
from pipeline.report.mlflow_runs.predictions import Scored
from pipeline.report.pictures.images import (
    JudgedImage,
    amplify_difference,
    locate_image,
    measure_given,
    read_given,
    read_image,
)
from pipeline.report.pictures.shown import Shown, digest_shown, fit_size
from pipeline.report.pictures.worst import list_worst_images

if TYPE_CHECKING:
    from PIL.Image import Image

STITCH = f"stitch - reference and candidate and difference x {SEAM_GAIN}"  # ends the key of a strip
_BOLDNESS = 2  # of boxes, which must show in a small picture
_GAP = 4  # pixels between the parts of a strip
_LEAST_BITS = -4.0  # doublings: shown of an overflow, which has no number of them left


@dataclass(frozen=True)
class ShownBoxes:
    """A picture with the boxes of one run, and those of the reference that it lost."""

    key: str
    reference: JudgedBoxes
    candidate: JudgedBoxes

    @property
    def identity(self) -> list[str | None]:
        """Name what is shown and the content of its files; None where there is none."""
        outputs = [digest_text(side.record.output) for side in (self.reference, self.candidate)]
        files = [Path(self.candidate.record.prompt), self.reference.table, self.candidate.table]
        return [self.key, *outputs, *digest_shown(files)]

    def draw(self) -> Image:
        """Draw it."""
        boxes = self.candidate.read()
        lost = find_lost(self.reference.read(), boxes)
        return fit_size(draw_boxes(read_given(self.candidate.record), boxes, lost, boldness=_BOLDNESS))


@dataclass(frozen=True)
class ShownStitch:
    """A stitch of a picture that was run in tiles, beside the reference's."""

    key: str
    images: tuple[JudgedImage, JudgedImage]
    record: CaseRecord
    tiling: Tiling

    @property
    def identity(self) -> list[str | None]:
        """Name what is shown and the content of its files; None where there is none."""
        return [self.key, self.record.case_id, *digest_shown(image.path for image in self.images)]

    def draw(self) -> Image:
        """Draw the stitch of both sides and the difference side by side, enlarged, with white between them."""
        ours, theirs = map(read_image, self.images)
        strip = cut_strip(ours, theirs, measure_given(self.record), self.tiling)
        if strip is None:
            raise EvidenceError(f"{self.images[1].path}: the picture is not cut into tiles")
        parts = (strip.reference, strip.candidate, amplify_difference(strip.reference, strip.candidate, SEAM_GAIN))
        gap = np.full((parts[0].shape[0], _GAP, 3), 255, dtype=np.uint8)
        return fit_size(np.concatenate([parts[0], gap, parts[1], gap, parts[2]], axis=1))


def _show_boxes(sides: Sides, case: Case, key: str) -> ShownBoxes | None:
    eval_name, case_id = case
    ours, theirs = (
        _judge_boxes(folder, eval_name, scored, case_id)
        for folder, scored in zip(sides.folders, sides.scored, strict=True)
    )
    return ShownBoxes(key, ours, theirs) if ours and theirs else None


def _judge_boxes(folder: Path, eval_name: str, scored: Scored, case_id: str) -> JudgedBoxes | None:
    """Return where the boxes of a case lie; None where there is no such case."""
    cases = scored.get(eval_name, {})
    if case_id not in cases:
        return None
    return JudgedBoxes(cases[case_id][0], folder / f"{eval_name}.npz", list(cases).index(case_id), len(cases))


def _rank_losses(pairs: Mapping[str, PairedCases], folders: Folders) -> list[tuple[str, int]]:
    """Return (eval, position) of the pictures on which a detector lost any object, the worst first.

    Args:
        pairs: by eval.
        folders: evaluations of reference and candidate, where the matched detections lie.
    """
    matched = {}
    for eval_name, paired in pairs.items():
        with contextlib.suppress(EvidenceError):  # the verdict was refused for it
            ours, theirs = (
                load_matches(folder / f"{eval_name}.npz", num_images=len(paired.reference)) for folder in folders
            )
            matched[eval_name] = replace(paired, tables=(ours, theirs.at(paired.candidate_order)))
    return rank_losses(matched)


def _list_restored(sides: Sides, worst: Case | None) -> list[Shown]:
    """List the difference in a run's worst case, and a stitch of its tiles."""
    stitch = None if sides.is_reference else _find_stitch(sides)
    return [*show_difference(sides, worst, gain=SEAM_GAIN), *([stitch] if stitch else [])]


def _find_stitch(sides: Sides) -> ShownStitch | None:
    """Return a stitch of the case with the largest seam; None where a candidate does not run in tiles."""
    (reference, candidate), tiling = sides.scored, _read_tiling(sides.folders[1])
    cases = [
        (-record.scores.get("worst_seam_levels", 0.0), eval_name, case_id)
        for eval_name, records in candidate.items()
        for case_id, (record, _) in records.items()
        if case_id in reference.get(eval_name, {})
    ]
    if tiling is None or not cases:
        return None
    _, eval_name, case_id = min(cases)
    records = reference[eval_name][case_id][0], candidate[eval_name][case_id][0]
    ours, theirs = (
        locate_image(folder, eval_name, record) for folder, record in zip(sides.folders, records, strict=True)
    )
    return ShownStitch(f"{SECTION}/{STITCH}", (ours, theirs), records[1], tiling)


def _read_tiling(folder: Path) -> Tiling | None:
    try:
        return read_record(folder / "evaluation.json", Evaluation).serving.tiling
    except EvidenceError:
        return None


BOXES = PictureRules(
    alike="boxes",
    rank=lambda pairs, evals, folders: _rank_losses(pairs, folders),
    show_case=_show_boxes,
    list_own=lambda sides, worst: [],
)
RESTORED = PictureRules(
    alike="pixels",
    rank=lambda pairs, evals, folders: list_worst_images(pairs, evals),
    show_case=show_image,
    list_own=_list_restored,
)


def read_costs(folder: Path, scored: Scored) -> dict[str, float]:
    """Return what the first eval noted of time, memory and numbers, as metrics of a run; nothing where it can't be."""
    try:
        notes = next((parse_notes(folder / f"{eval_name}.json") for eval_name in scored), None)
    except EvidenceError:
        notes = None
    return {} if notes is None else {f"cost/{name}": value for name, value in _name_costs(notes).items()}


def _name_costs(notes: NetworkNotes) -> dict[str, float]:
    numbers = {"work": notes.work}
    if notes.speed and notes.speed.ratio:
        numbers["time_percent_of_baseline"] = 100 * notes.speed.ratio.median
    if notes.total and notes.total.worse:
        numbers["time_percent_in_total"] = 100 * notes.total.worse[1].median
    if notes.peak_mib is not None:
        numbers["peak_mib"] = notes.peak_mib
    if notes.compile:
        numbers |= {
            "num_graphs": notes.compile.num_graphs + notes.compile.num_recompilations,
            "num_graph_breaks": notes.compile.num_graph_breaks,
            "first_call_s": notes.compile.first_call_s,
            "num_recompilations": notes.compile.num_recompilations,
        }
    if notes.layout:
        numbers["num_other_formats"] = len(notes.layout.other_formats)
        numbers |= {f"num_reorders_{key}": num for key, num in notes.layout.num_reorders.items()}
    if notes.layers:
        worst = notes.layers[find_worst_layer(notes.layers)].error
        numbers |= {} if math.isinf(worst) else {"largest_error_percent": 100 * worst}
        least = notes.layers[find_scarcest_layer(notes.layers)].headroom
        numbers |= {} if least == math.inf else {"least_headroom_doublings": max(_LEAST_BITS, least)}
    return {name: float(value) for name, value in numbers.items()}
