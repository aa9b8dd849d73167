"""Which pictures a reviewer should see of each run of a product that makes or reads pictures.

Pure: records in, names of files out; `run_pictures.py` draws them and `tracking.py` writes them. A case is a key in
MLflow and every run shows the same ones, each candidate's worst: its image grid has a row a key and a column a run.
Keys are sorted, hence the number in front. More are a run's own: the difference from the reference in its worst case,
the headroom of an image pipeline's decoder, a stitch of an upscaler's tiles. MLflow's own charts have one key each and
little room, so a saved view comes along that has them all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.gate.pairing import PairedCases, align
from pipeline.gate.verdicts import Judgement
from pipeline.gate.wording import escape_markdown
from pipeline.products.images.findings.decoder import headroom
from pipeline.products.vision.show.runs import (
    ShownBoxes,
    ShownStitch,
    find_stitch,
    judge_boxes,
    rank_losses,
    read_network_costs,
)
from pipeline.products.vision.show.seams import SEAM_GAIN
from pipeline.records.digests import digest_file
from pipeline.report.flips import list_worst_images
from pipeline.report.mlflow_runs.predictions import Scored
from pipeline.report.pictures.images import DIFFERENCE_GAIN, LEAST_BITS, JudgedImage, locate_image
from pipeline.settings.base import Eval

MAX_CASES = 8
MAX_NAME = 100  # characters of a case id in a key, which becomes a file name
SECTION = "images"  # of the charts
VIEW = "images-side-by-side"  # key of the saved view
COLUMN = "quantgate.column"  # tag of a run that the view sorts by
_MAX_COLUMNS = 10  # that MLflow's image grid shows, those listed first
_ROW_HEIGHT, _MARGINS = 170, 120  # pixels

Case = tuple[str, str]  # eval, case id


@dataclass(frozen=True)
class ShownImage:
    """One image of a run: a case as it is, or something drawn.

    Attributes:
        key: names its chart.
        images: one is shown as it is; of two, the reference's first, the difference is drawn.
        notes: of the eval whose decoder's headroom is drawn, where there are no images.
        caption: of the difference: its case.
        gain: of the difference.
    """

    key: str
    images: tuple[JudgedImage, ...] = ()
    notes: Path | None = None
    caption: str = ""
    gain: int = DIFFERENCE_GAIN

    @property
    def identity(self) -> list[str | None]:
        """Name what is shown and the content of its files; None where there is none."""
        files = [image.path for image in self.images] + ([self.notes] if self.notes else [])
        return [self.key, self.caption, *(digest_file(file) if file.is_file() else None for file in files)]


Shown = ShownImage | ShownBoxes | ShownStitch


@dataclass(frozen=True)
class Sides:
    """A run beside the reference: the folders of both evaluations and the records in them."""

    kind: str  # of product
    finds_boxes: bool
    folders: tuple[Path, Path]
    scored: tuple[Scored, Scored]

    def locate(self, side: int, case: Case) -> JudgedImage | None:
        """Return the image of a case; None where a side has no such case."""
        eval_name, case_id = case
        record, _ = self.scored[side].get(eval_name, {}).get(case_id, (None, None))
        return None if record is None else locate_image(self.folders[side], eval_name, record)


@dataclass(frozen=True)
class ImageContents:
    """What a run shows, a line of its note that says where to look, its column in the saved view, and its costs."""

    shown: tuple[Shown, ...] = ()
    note: str = ""
    column: str = ""
    costs: dict[str, float] = field(default_factory=dict)


def choose_images(
    judgement: Judgement, evals: Mapping[str, Eval], scored: Mapping[str, Scored], build: Path
) -> dict[str, ImageContents]:
    """Choose the images of every run.

    Args:
        judgement: which candidates there are, and which are to be released: their worst cases come first.
        evals: settings of each.
        scored: candidate -> eval -> case id -> record, the reference's among them; empty where unreadable.
        build: the folder that holds `evaluations/`.
    """
    policy = judgement.policy
    reference, finds_boxes = policy.reference, "detection" in policy.eval_kinds.values()
    folders = {name: build / "evaluations" / name for name in scored}
    ordered = sorted(judgement.verdicts, key=lambda v: not v.is_release)  # stable
    worst = {
        v.candidate: case
        for v in ordered
        if (
            case := find_worst(
                scored[reference], scored[v.candidate], evals, (folders[reference], folders[v.candidate])
            )
        )
    }
    keys = name_cases(worst)
    by_use = sorted(ordered, key=lambda v: not v.is_release and v.candidate not in worst)
    columns = order_columns([reference, *(v.candidate for v in by_use)])
    contents = {}
    for name, own in scored.items():
        sides = Sides(policy.kind, finds_boxes, (folders[reference], folders[name]), (scored[reference], own))
        is_same = _list_outputs(own) == _list_outputs(scored[reference])
        note = (
            _name_owners(keys, worst)
            if name == reference
            else _name_worst(keys, worst.get(name), "" if not is_same else "boxes" if finds_boxes else "pixels")
        )
        cases = [image for case, key in keys.items() if (image := _show_case(sides, case, key))]
        shown = (*cases, *_list_own(sides, worst.get(name), is_reference=name == reference))
        costs = _read_costs(folders[name], own) if policy.kind == "images" else read_network_costs(folders[name], own)
        contents[name] = ImageContents(shown, note, columns[name], costs)
    return contents


def find_worst(
    reference: Scored, candidate: Scored, evals: Mapping[str, Eval], folders: tuple[Path, Path]
) -> Case | None:
    """Return the case in which a candidate is worst; None where no case can be paired or no output is another one.

    Of a detector, that in which most objects are lost; None where none is.

    Args:
        reference: its records.
        candidate: its records.
        evals: settings of each.
        folders: the evaluations of both.
    """
    pairs: dict[str, PairedCases] = {}
    for eval_name, cases in candidate.items():
        ours, theirs = ([record for record, _ in side.values()] for side in (reference.get(eval_name, {}), cases))
        try:
            pairs[eval_name] = align(ours, theirs, where=eval_name)
        except EvidenceError:
            continue  # the verdict was refused for it
    is_detector = any(e.kind == "detection" for e in evals.values())
    ranked = rank_losses(pairs, folders) if is_detector else list_worst_images(pairs, evals)
    return next(
        (
            (eval_name, pairs[eval_name].reference[i].case_id)
            for eval_name, i in ranked
            if pairs[eval_name].reference[i].output != pairs[eval_name].candidate[i].output
        ),
        None,
    )


def name_cases(worst: Mapping[str, Case]) -> dict[Case, str]:
    """Return the cases to show and a key for each, in the characters that MLflow takes.

    Args:
        worst: candidate -> its worst case, those first that matter most.
    """
    owners: dict[Case, list[str]] = {}
    for name, case in worst.items():
        owners.setdefault(case, []).append(name)
    has_many = len({eval_name for eval_name, _ in owners}) > 1
    keys = {}
    for number, (case, names) in enumerate(list(owners.items())[:MAX_CASES], start=1):
        said = re.sub(r"[^A-Za-z0-9_. -]", "_", " ".join(case) if has_many else case[1])[:MAX_NAME]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        keys[case] = f"{SECTION}/{number} {said} - worst of {names[0]}{others}"
    return keys


def order_columns(names: Sequence[str]) -> dict[str, str]:
    """Return what the list of runs has to be sorted by for the image grid to show these runs in this order.

    The grid takes the first ten runs of the list and shows them from the last to the first.
    """
    return {name: f"{_MAX_COLUMNS - 1 - i if i < _MAX_COLUMNS else i:04}" for i, name in enumerate(names)}


def describe_view(runs: Sequence[Sequence[Shown]]) -> dict[str, Any]:
    """Describe the saved view in the words of MLflow's page: one grid of all images, above the other charts.

    Args:
        runs: the images of each run.
    """
    keys = sorted({image.key for shown in runs for image in shown})
    grid = {
        "type": "IMAGE",
        "uuid": VIEW,
        "metricSectionId": VIEW,
        "runsCountToCompare": _MAX_COLUMNS,
        "deleted": False,
        "isGenerated": False,
        "imageKeys": keys,
        "step": 0,
        "showRunParams": False,
    }
    section = {
        "uuid": VIEW,
        "name": "images side by side",
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
        "columns": 1,
        "cardHeight": _ROW_HEIGHT * len(keys) + _MARGINS,
    }
    return {
        "compareRunCharts": [grid],
        "compareRunSections": [section],
        "isAccordionReordered": True,
        "runListHidden": True,
        "orderByKey": f"tags.`{COLUMN}`",
        "orderByAsc": True,
    }


def _show_case(sides: Sides, case: Case, key: str) -> Shown | None:
    """Return what a run shows of a case; None where it has no such case."""
    eval_name, case_id = case
    if sides.finds_boxes:
        ours, theirs = (
            judge_boxes(folder, eval_name, scored, case_id)
            for folder, scored in zip(sides.folders, sides.scored, strict=True)
        )
        return ShownBoxes(key, ours, theirs) if ours and theirs else None
    image = sides.locate(1, case)
    return None if image is None else ShownImage(key, (image,))


def _list_own(sides: Sides, worst: Case | None, *, is_reference: bool) -> list[Shown]:
    """List what only this run has: the difference in its worst case, its decoder's headroom, a stitch of its tiles."""
    own: list[Shown] = []
    if sides.finds_boxes:
        return own
    both = tuple(image for side in (0, 1) if worst and (image := sides.locate(side, worst)))
    if len(both) == 2:
        gain = DIFFERENCE_GAIN if sides.kind == "images" else SEAM_GAIN
        own.append(ShownImage(f"{SECTION}/difference x {gain}", both, caption=both[0].path.stem, gain=gain))
    if sides.kind == "images":
        own += [
            ShownImage(f"{SECTION}/headroom", notes=sides.folders[1] / f"{eval_name}.json")
            for eval_name in list(sides.scored[1])[:1]
        ]
    elif not is_reference and (stitch := find_stitch(sides.folders, *sides.scored, SECTION)):
        own.append(stitch)
    return own


def _name_owners(keys: Mapping[Case, str], worst: Mapping[str, Case]) -> str:
    """Say on the reference's page which image is whose worst."""
    owners = [" and ".join(name for name, own in worst.items() if own == case) for case in keys]
    said = ", ".join(f"image {number} of {names}" for number, names in enumerate(owners, start=1))
    return f"\n- shown of every run are the worst images of each candidate: {said}" if keys else ""


def _list_outputs(scored: Scored) -> dict[Case, str]:
    return {
        (eval_name, case_id): record.output
        for eval_name, cases in scored.items()
        for case_id, (record, _) in cases.items()
    }


def _name_worst(keys: Mapping[Case, str], case: Case | None, same: str) -> str:
    """Say which image is a candidate's worst, or why there is none; `same` is what all images have in common."""
    if case is None:
        return f"\n- every image has the {same} of the reference's" if same else ""
    where = f"image {keys[case].partition('/')[2].split()[0]}" if case in keys else "its difference alone is shown"
    return f"\n- worst image: {escape_markdown(case[1])} ({where})"


def _read_costs(folder: Path, scored: Scored) -> dict[str, float]:
    """Return what the first eval noted of time, memory and room, as metrics of a run; nothing where it can't be read.

    An overflow has no number of doublings left: it is shown as the least that is drawn.
    """
    for eval_name in list(scored)[:1]:
        try:
            notes = json.loads((folder / f"{eval_name}.json").read_text(encoding="utf-8"))
            numbers = {
                f"cost/{key}": float(notes[key])
                for key in ("step_ms_per_image", "decode_ms_per_image", "decode_peak_mib")
            }
            if ratio := notes["decode_to_float32"]:
                numbers["cost/decode_percent_of_float32"] = 100 * ratio["median"]
            room = min(map(headroom, notes["decoder"].values()), default=None)
            return numbers | ({} if room is None else {"cost/least_headroom_doublings": max(LEAST_BITS, room)})
        except (OSError, ValueError, KeyError, TypeError):
            return {}
    return {}
