"""Which pictures a reviewer should see of each run of a product that makes or reads pictures.

Pure: records in, names of files out; `pictures/shown.py` draws them and `tracking.py` writes them. A case is a key in
MLflow and every run shows the same ones, each candidate's worst. Keys are sorted, hence the number in front. More are
a run's own, such as the difference from the reference in its worst case. How cases are ranked and shown is the kind's
matter (`PictureRules`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.gate.pairing import PairedCases, align
from pipeline.gate.verdicts import Judgement
from pipeline.gate.wording import escape_markdown
from pipeline.report.mlflow_runs.picture_view import SECTION, order_columns
from pipeline.report.mlflow_runs.predictions import Scored
from pipeline.report.pictures.images import JudgedImage, locate_image
from pipeline.report.pictures.shown import Shown, ShownImage
from pipeline.settings.base import Eval

MAX_CASES = 8
MAX_NAME = 100  # characters of a case id in a key, which becomes a file name

Case = tuple[str, str]  # eval, case id
Pairs = Mapping[str, PairedCases]  # by eval
Folders = tuple[Path, Path]  # evaluations of reference and candidate


@dataclass(frozen=True)
class PictureContents:
    """What a run shows, a line of its note that says where to look, and its column in the saved view."""

    shown: tuple[Shown, ...] = ()
    note: str = ""
    column: str = ""


@dataclass(frozen=True)
class Sides:
    """A run beside the reference: the folders of both evaluations and the records in them."""

    folders: Folders
    scored: tuple[Scored, Scored]

    @property
    def is_reference(self) -> bool:
        """Whether the run is the reference's own."""
        return self.folders[0] == self.folders[1]

    def locate(self, side: int, case: Case) -> JudgedImage | None:
        """Return the image of a case; None where a side has no such case."""
        eval_name, case_id = case
        record, _ = self.scored[side].get(eval_name, {}).get(case_id, (None, None))
        return None if record is None else locate_image(self.folders[side], eval_name, record)


@dataclass(frozen=True)
class PictureRules:
    """How a kind ranks and shows its cases.

    Attributes:
        alike: what all pictures of a run and of the reference have in common where no output differs.
        rank: returns (eval, position) of the cases that lost, the worst first.
        show_case: returns what a run shows of a case, under a key; None where it has no such case.
        list_own: lists what only this run has, given its worst case.
    """

    alike: str
    rank: Callable[[Pairs, Mapping[str, Eval], Folders], list[tuple[str, int]]]
    show_case: Callable[[Sides, Case, str], Shown | None]
    list_own: Callable[[Sides, Case | None], list[Shown]]


def choose_pictures(
    judgement: Judgement, evals: Mapping[str, Eval], scored: Mapping[str, Scored], build: Path, *, rules: PictureRules
) -> dict[str, PictureContents]:
    """Choose the pictures of every run.

    Args:
        judgement: which candidates there are, and which are to be released: their worst cases come first.
        evals: settings of each.
        scored: candidate -> eval -> case id -> record, the reference's among them; empty where unreadable.
        build: the folder that holds `evaluations/`.
        rules: of the kind of product.
    """
    reference = judgement.policy.reference
    sides = {
        name: Sides(
            (build / "evaluations" / reference, build / "evaluations" / name), (scored[reference], scored[name])
        )
        for name in scored
    }
    ordered = sorted(judgement.verdicts, key=lambda v: not v.is_release)  # stable
    worst = {v.candidate: case for v in ordered if (case := _find_worst(sides[v.candidate], evals, rules))}
    keys = _name_cases(worst)
    by_use = sorted(ordered, key=lambda v: not v.is_release and v.candidate not in worst)
    columns = order_columns([reference, *(v.candidate for v in by_use)])
    contents = {}
    for name, side in sides.items():
        is_same = _list_outputs(scored[name]) == _list_outputs(scored[reference])
        note = (
            _name_owners(keys, worst)
            if side.is_reference
            else _name_worst(keys, worst.get(name), rules.alike if is_same else "")
        )
        cases = [picture for case, key in keys.items() if (picture := rules.show_case(side, case, key))]
        shown = (*cases, *rules.list_own(side, worst.get(name)))
        contents[name] = PictureContents(shown, note, columns[name])
    return contents


def show_image(sides: Sides, case: Case, key: str) -> ShownImage | None:
    """Return the image of a case; None where a run has no such case."""
    image = sides.locate(1, case)
    return None if image is None else ShownImage(key, (image,))


def show_difference(sides: Sides, worst: Case | None, *, gain: int) -> list[Shown]:
    """Return the difference from the reference in a run's worst case, where it has one."""
    both = tuple(image for side in (0, 1) if worst and (image := sides.locate(side, worst)))
    if len(both) < 2:
        return []
    return [ShownImage(f"{SECTION}/difference x {gain}", both, caption=both[0].path.stem, gain=gain)]


def _find_worst(sides: Sides, evals: Mapping[str, Eval], rules: PictureRules) -> Case | None:
    """Return the case in which a candidate is worst; None where no case can be paired or no output is another one."""
    pairs: dict[str, PairedCases] = {}
    for eval_name, cases in sides.scored[1].items():
        ours, theirs = ([record for record, _ in side.values()] for side in (sides.scored[0].get(eval_name, {}), cases))
        try:
            pairs[eval_name] = align(ours, theirs, where=eval_name)
        except EvidenceError:
            continue  # the verdict was refused for it
    return next(
        (
            (eval_name, pairs[eval_name].reference[i].case_id)
            for eval_name, i in rules.rank(pairs, evals, sides.folders)
            if pairs[eval_name].reference[i].output != pairs[eval_name].candidate[i].output
        ),
        None,
    )


def _name_cases(worst: Mapping[str, Case]) -> dict[Case, str]:
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
        title = re.sub(r"[^A-Za-z0-9_. -]", "_", " ".join(case) if has_many else case[1])[:MAX_NAME]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        keys[case] = f"{SECTION}/{number} {title} - worst of {names[0]}{others}"
    return keys


def _name_owners(keys: Mapping[Case, str], worst: Mapping[str, Case]) -> str:
    """Say on the reference's page which image is whose worst."""
    owners = [" and ".join(name for name, shown in worst.items() if shown == case) for case in keys]
    images = ", ".join(f"image {number} of {names}" for number, names in enumerate(owners, start=1))
    return f"\n- shown of every run are the worst images of each candidate: {images}" if keys else ""


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
