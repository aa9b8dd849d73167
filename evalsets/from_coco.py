"""Make an evalset of COCO's annotations: its cases, copies of the images, and a card to be completed by hand.

    python -m evalsets.from_coco instances.json IMAGES_FOLDER evalsets/mine

Boxes without a width, a height or an area are left out, as COCO's own files hold a few, and those of images that are
not listed. Each image is a cluster of its own. The card names the
categories. Not covered: masks, key points.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from evalsets.seal import render_card, seal_and_warn
from pipeline.errors import EvalsetError
from pipeline.evalsets.cards import CARD_FILE
from pipeline.evalsets.cases import CASES_FILE, DetectionCase
from pipeline.records.digests import digest_file
from pipeline.records.files import write_text
from pipeline.records.record_files import first_problem
from stages.cli import run_stage

_KEYS = ("bbox", "category_id", "area", "iscrowd")


def convert(annotations: Path, images: Path, out: Path) -> str:
    """Write an evalset; returns what was sealed and left out, in one line.

    Raises:
        EvalsetError: annotations that are not COCO's, an image that is not there or can't be used, a folder that is
            there already. What was written until then is removed.
    """
    if out.exists():
        raise EvalsetError(f"{out}: expected the name of a new folder, found one that exists")
    try:
        data = json.loads(annotations.read_text(encoding="utf-8"))
        listed, boxes = data["images"], _group(data["annotations"])
        cases = [_make_case(image, boxes.get(image["id"], []), images) for image in listed]
        names = _name_categories(annotations, data.get("categories", []), cases)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EvalsetError(f"{annotations}: expected COCO's annotations, got {type(error).__name__}: {error}") from None
    left_out = len(data["annotations"]) - sum(len(case.annotations) for case in cases)
    try:
        sealed = _write(out, cases, [images / image["file_name"] for image in listed], names, annotations)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # or the command could not be given again
        raise
    return f"{sealed}; boxes left out: {left_out}; write licence and description into {out / CARD_FILE}"


def _write(out: Path, cases: list[DetectionCase], files: list[Path], names: dict[str, int], annotations: Path) -> str:
    """Copy the images, write cases and card, and seal the folder; return what it holds."""
    for case, file in zip(cases, files, strict=True):
        target = out / case.image
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    write_text(out / CASES_FILE, "".join(f"{case.model_dump_json()}\n" for case in cases))
    write_text(
        out / CARD_FILE,
        render_card(
            {
                "name": out.name,
                "version": "1.0",
                "licence": "TODO",
                "kind": "detection",
                "description": "TODO",
                "made_by": f"python -m evalsets.from_coco {annotations.name}",
                "cluster": "an image",
                **({"categories": names} if names else {}),
            }
        ),
    )
    return seal_and_warn(out)


def _name_categories(file: Path, listed: list[dict[str, Any]], cases: list[DetectionCase]) -> dict[str, int]:
    """Return name -> id of the categories that a file lists; none where it lists none."""
    names: dict[str, int] = {}
    for category in listed:
        name, number = category["name"], category["id"]
        if (first := names.setdefault(name, number)) != number:
            raise EvalsetError(
                f"{file}: categories: expected a name of its own for each, got {name!r} for {first} and {number}; "
                "rename one"
            )
    found = {a.category_id for case in cases for a in case.annotations}
    if names and (strangers := sorted(found - {*names.values()})):
        raise EvalsetError(
            f"{file}: categories: expected those of all annotations, found none with id {strangers[0]} "
            f"({len(strangers)} are missing); add them"
        )
    return names


def _group(annotations: list[dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    """Return the boxes with an extent, by image."""
    grouped = defaultdict(list)
    for box in annotations:
        box = {"area": box["bbox"][2] * box["bbox"][3]} | box
        if min(*box["bbox"][2:], box["area"]) > 0:
            grouped[box["image_id"]].append({key: box[key] for key in _KEYS if key in box})
    return grouped


def _make_case(image: dict[str, Any], boxes: list[dict[str, Any]], images: Path) -> DetectionCase:
    file = images / image["file_name"]
    if not file.is_file():
        raise EvalsetError(f"image with id {image['id']}: expected {file}, found no file")
    try:
        return DetectionCase.model_validate(
            {
                "id": str(image["id"]),
                "cluster": str(image["id"]),
                "image": f"images/{image['file_name']}",
                "sha256": digest_file(file),
                "annotations": boxes,
            }
        )
    except ValidationError as error:
        raise EvalsetError(f"image with id {image['id']}: {first_problem(error)}") from None


def main(argv: list[str]) -> int:
    """Convert the file named on the command line and say what came of it."""
    parser = argparse.ArgumentParser(
        prog="from_coco", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("annotations", type=Path, help="of COCO, as JSON")
    parser.add_argument("images", type=Path, help="folder of the images that it names")
    parser.add_argument("out", type=Path, help="folder that is to be made")
    options = parser.parse_args(argv)
    try:
        print(convert(options.annotations, options.images, options.out))
    except OSError as error:
        raise EvalsetError(str(error)) from None
    return 0


if __name__ == "__main__":
    run_stage("from_coco", main)
