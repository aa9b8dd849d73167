"""What a run of a network product shows beside what every run of pictures shows: boxes, a stitch, and its costs.

Pure, as `image_contents.py`: records in, names of files out; `run_pictures.py` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.gate.pairing import PairedCases
from pipeline.products.vision.findings.notes import NetworkNotes, parse_notes
from pipeline.products.vision.show.boxes import JudgedBoxes, list_losses
from pipeline.products.vision.show.costs import find_scarcest_layer, find_worst_layer
from pipeline.products.vision.show.seams import SEAM_GAIN
from pipeline.records.detections import load_matches
from pipeline.records.digests import digest_file, digest_text
from pipeline.records.evaluations import CaseRecord, Evaluation
from pipeline.records.record_files import read_record
from pipeline.records.serving import Tiling
from pipeline.report.mlflow_runs.predictions import Scored
from pipeline.report.pictures.images import LEAST_BITS, JudgedImage, locate_image

STITCH = f"stitch - reference and candidate and difference x {SEAM_GAIN}"  # ends the key of a strip


@dataclass(frozen=True)
class ShownBoxes:
    """A picture with the boxes of one run, and those of the reference that it lost."""

    key: str
    reference: JudgedBoxes
    candidate: JudgedBoxes

    @property
    def identity(self) -> list[str | None]:
        """Name what is shown and the content of its files; None where there is none."""
        files = [Path(self.candidate.record.prompt), self.reference.table, self.candidate.table]
        outputs = [digest_text(side.record.output) for side in (self.reference, self.candidate)]
        return [self.key, *outputs, *(digest_file(file) if file.is_file() else None for file in files)]


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
        files = [image.path for image in self.images]
        return [self.key, self.record.case_id, *(digest_file(f) if f.is_file() else None for f in files)]


def judge_boxes(folder: Path, eval_name: str, scored: Scored, case_id: str) -> JudgedBoxes | None:
    """Return where the boxes of a case lie; None where there is no such case."""
    cases = scored.get(eval_name, {})
    if case_id not in cases:
        return None
    return JudgedBoxes(cases[case_id][0], folder / f"{eval_name}.npz", list(cases).index(case_id), len(cases))


def rank_losses(pairs: Mapping[str, PairedCases], folders: tuple[Path, Path]) -> list[tuple[str, int]]:
    """Return (eval, position) of the pictures on which a detector lost any object, the worst first.

    Args:
        pairs: by eval.
        folders: evaluations of reference and candidate.
    """
    found = []
    for eval_name, paired in pairs.items():
        try:
            ours, theirs = (
                load_matches(folder / f"{eval_name}.npz", num_images=len(paired.reference)) for folder in folders
            )
            losses = list_losses(replace(paired, tables=(ours, theirs.at(paired.candidate_order))))
        except EvidenceError:
            continue  # the verdict was refused for it
        found += [(-num, eval_name, i) for num, i in losses]
    return [(eval_name, i) for _, eval_name, i in sorted(found)]


def find_stitch(folders: tuple[Path, Path], reference: Scored, candidate: Scored, section: str) -> ShownStitch | None:
    """Return a stitch of the case with the largest seam; None where a candidate does not run in tiles."""
    tiling = _read_tiling(folders[1])
    cases = [
        (-record.scores.get("worst_seam_levels", 0.0), eval_name, case_id)
        for eval_name, found in candidate.items()
        for case_id, (record, _) in found.items()
        if case_id in reference.get(eval_name, {})
    ]
    if tiling is None or not cases:
        return None
    _, eval_name, case_id = min(cases)
    records = reference[eval_name][case_id][0], candidate[eval_name][case_id][0]
    ours, theirs = (locate_image(folder, eval_name, record) for folder, record in zip(folders, records, strict=True))
    return ShownStitch(f"{section}/{STITCH}", (ours, theirs), records[1], tiling)


def _read_tiling(folder: Path) -> Tiling | None:
    try:
        return read_record(folder / "evaluation.json", Evaluation).serving.tiling
    except EvidenceError:
        return None


def read_network_costs(folder: Path, scored: Scored) -> dict[str, float]:
    """Return what the first eval noted of time, memory and numbers, as metrics of a run; nothing where it can't be.

    An overflow has no number of doublings left: it is shown as the least that is drawn.
    """
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
        numbers |= {} if least == math.inf else {"least_headroom_doublings": max(LEAST_BITS, least)}
    return {name: float(value) for name, value in numbers.items()}
