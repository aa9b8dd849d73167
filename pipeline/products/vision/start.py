"""What a detector or an upscaler starts with as a product: settings, and pictures in their format."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.errors import SettingsError
from pipeline.evalsets.examples import COLOURS, NUMBERS, build_evalset
from pipeline.product import Start
from pipeline.products.vision.files import read_config, read_network_checkpoint
from pipeline.products.vision.onnx_files import find_onnx, inspect_onnx, read_growth
from pipeline.records.digests import digest_bytes

_SECTION = """\
{name}:
  kind: vision
  adapter: {adapter}
  # all others are compared with it, picture by picture
  reference: {name}
  # what would ship: `dvc repro` fails unless the gate passes it
  release: [{candidate}]
  # these settings can change an output
  serving:
    batch_size: 1  # pictures of one size together
    num_threads: 1  # torch threads of each process
  # replace the pictures by your own
  evals:
    {eval_name}: {{kind: {task}, evalset: {folder}}}
  gate:
    alpha: 0.05  # one-sided, per release
    on_inconclusive: block  # or warn
    # the loss that you tolerate: of a rate 0.02 is 2 points. 32 pictures can't prove less of it than this
    tolerances:
{tolerances}
"""
_CANDIDATES = """\
{name}: {{product: {name}, checkpoint: {checkpoint}, steps: []}}
{name}-bf16: {{product: {name}, checkpoint: {checkpoint}, steps: [{{kind: precision, dtype: bfloat16}}]}}
"""
_AGAIN = """\
{name}: {{product: {name}, checkpoint: {checkpoint}, steps: []}}
# in place of {checkpoint} name the folder of the .onnx file that would ship
{name}-again: {{product: {name}, checkpoint: {checkpoint}, steps: []}}
"""
_TOLERANCES = {
    # of average precision 0.02 is 2 points; each size that is in the evalset needs one
    "detection": {"ap": 0.02, "ap_small": 0.03, "ap_medium": 0.03, "ap_large": 0.03, "finite_output_rate": 0.16},
    "upscaling": {"psnr_db": 0.1, "ssim": 0.005, "finite_output_rate": 0.16},
}
_SIDE, _SIDES = 320, range(256, 4097)  # pixels; a `size` in config.json beyond them may be of something else
_SCALE, _SCALES = 2, range(2, 9)  # of an upscaler whose settings don't say it; beyond them it is of something else
_BOXES = ((16, 16, 16, 16), (48, 48, 64, 64), (120, 120, 112, 112))  # small, medium and large, as COCO has it


def start_network(name: str, checkpoint: str, root: Path, *, task: str | None, adapter: str | None) -> Start:
    """Return what a network starts with.

    Args:
        name: of the product.
        checkpoint: its folder in the project.
        root: of the project.
        task: what it does, the kind of its eval.
        adapter: its Python file; None: the only one in the folder.

    Raises:
        QuantgateError: the folder can't be used, or what else must be known is not.
    """
    read_network_checkpoint(root / checkpoint, root=root, kind="network")
    if task not in _TOLERANCES:
        raise SettingsError(f"--task: expected {' or '.join(_TOLERANCES)}, {f'got {task!r}' if task else 'found none'}")
    folder = Path("evalsets") / f"{name}-pictures"
    path = find_onnx(root / checkpoint)
    fixed = None if path is None else _read_side(path)
    config = read_config(root / checkpoint)
    named = config.get("size") if path is None else fixed
    side = named if isinstance(named, int) and named in _SIDES else _SIDE
    section = _SECTION.format(
        name=name,
        candidate=f"{name}-bf16" if path is None else f"{name}-again",
        adapter=adapter or _find_adapter(checkpoint, root),
        eval_name="pictures",
        task=task,
        folder=folder,
        tolerances="\n".join(f"      pictures/{metric}: {{overall: {t}}}" for metric, t in _TOLERANCES[task].items()),
    )
    if task == "detection":
        files = _draw_objects(folder, side)
    else:
        scale = (read_growth(path) if path else None) or _read_scale(config) or _SCALE
        files = _draw_pairs(folder, fixed or side // 4, scale)
    if path is None:
        return Start(section, _CANDIDATES.format(name=name, checkpoint=checkpoint), files)
    warning = f"{name}-again: it is the reference once more; name the folder of the .onnx file that would ship"
    return Start(section, _AGAIN.format(name=name, checkpoint=checkpoint), files, (warning,))


def _read_side(path: Path) -> int | None:
    """Return the rows of the pictures that an .onnx file takes; None where they are free."""
    rows = inspect_onnx(path, batch_size=1).shape[2]
    return rows if isinstance(rows, int) else None


def _read_scale(config: Mapping[str, Any]) -> int | None:
    """Return by how much an upscaler enlarges, as its settings say it; None where they don't."""
    return next((int(config[key]) for key in ("scale", "upscale") if config.get(key) in _SCALES), None)


def _find_adapter(checkpoint: str, root: Path) -> str:
    files = sorted((root / checkpoint).glob("*.py"))
    if len(files) != 1:
        raise SettingsError(
            f"--adapter: expected a Python file with build, preprocess and postprocess (docs/vision.md), found "
            f"{len(files)} in {checkpoint}; name it"
        )
    return files[0].relative_to(root).as_posix()


def _draw_objects(folder: Path, side: int) -> dict[Path, bytes]:
    """Draw a small, a medium and a large box on each picture, and say where they are."""
    cases: list[dict[str, Any]] = []
    pictures: dict[str, bytes] = {}
    for i, picture in enumerate(_draw_all(side), 1):
        pictures[name := f"images/picture-{i}.png"] = data = _encode(picture)
        annotations = [{"bbox": box, "category_id": 1, "area": box[2] * box[3]} for box in _BOXES]
        cases.append(_name_case(i) | {"image": name, "sha256": digest_bytes(data), "annotations": annotations})
    more = {"categories": {"object": 1}}
    return build_evalset(folder, cases, kind="detection", cluster="a picture", pictures=pictures, **more)


def _draw_pairs(folder: Path, side: int, scale: int) -> dict[Path, bytes]:
    """Draw pictures of so many pixels, and the same larger by `scale`."""
    cases: list[dict[str, Any]] = []
    pictures: dict[str, bytes] = {}
    for i, target in enumerate(_draw_all(scale * side), 1):
        image, wanted = f"images/picture-{i}.png", f"targets/picture-{i}.png"
        pictures |= {image: _encode(target.reduce(scale)), wanted: _encode(target)}
        digests = {"sha256": digest_bytes(pictures[image]), "target_sha256": digest_bytes(pictures[wanted])}
        cases.append(_name_case(i) | {"image": image, "target": wanted} | digests)
    return build_evalset(folder, cases, kind="upscaling", cluster="a picture", pictures=pictures)


def _name_case(number: int) -> dict[str, Any]:
    return {"id": f"picture-{number}", "cluster": f"picture-{number}"}


def _draw_all(side: int) -> Iterator[Any]:
    """Draw the same boxes in one colour after another, on a ground that is darker each time."""
    from PIL import Image, ImageDraw

    for colour, n in product(COLOURS, NUMBERS):
        picture = Image.new("RGB", (side, side), (200, 220 - 20 * n, 180))
        draw = ImageDraw.Draw(picture)
        for left, top, width, height in _BOXES:
            draw.rectangle((left, top, left + width - 1, top + height - 1), fill=colour)
        yield picture


def _encode(picture: Any) -> bytes:
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()
