"""Evalsets that name pictures: what is wrong with a picture or a case is said in a line, and the shipped are whole."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from evalsets import from_coco
from evalsets.make import panoramas, scenes
from evalsets.make.pictures import CROP, make_scenes, name_buckets
from evalsets.make.shipped import PICTURE_SETS
from evalsets.seal import main as seal_main
from evalsets.seal import seal
from models.make.train_people import HELD_OUT, TRAIN
from pipeline.errors import EvalsetError, NumericsError
from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.evalsets.cases import DetectionCase, UpscalingCase, check_distinct
from pipeline.evalsets.pictures import check_pictures, measure_picture, read_picture
from pipeline.numerics.similarity import structural_similarity
from pipeline.records.digests import digest_file
from tests.evalsets.test_seal import SECTIONS
from tests.paths import ROOT

SIZES = {"detection": {"image": (40, 30)}, "upscaling": {"image": (40, 30), "target": (80, 60)}}
BOX = {"bbox": [1, 2, 3, 4.5], "category_id": 1, "area": 13.5}
CARD = {
    "name": "mine",
    "version": "1",
    "licence": "CC0-1.0",
    "description": "for tests",
    "made_by": "hand",
    "cluster": "an image",
}


def draw(path: Path, size: tuple[int, int] = (40, 30), mode: str = "RGB", seed: int = 0, **options: Any) -> Path:
    """Save a picture of noise, whose file no shorter one can replace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path, **options)
    return path


def write(folder: Path, kind: str, num: int = 2, **replaced: Any) -> Path:
    """Write an evalset with no digest yet, the last case with some keys replaced; return the folder."""
    cases: list[dict[str, Any]] = []
    for i in range(num):
        files = {name: f"{name}s/{i}.png" for name in SIZES[kind]}
        for seed, (name, file) in enumerate(files.items()):
            draw(folder / file, SIZES[kind][name], seed=10 * i + seed)
        case = {"id": f"c{i}", "cluster": f"c{i}", **files}
        cases.append(case | ({"annotations": [BOX]} if kind == "detection" else {}))
    cases[-1] |= replaced
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases), encoding="utf-8")
    (folder / "card.yaml").write_text(json.dumps(CARD | {"kind": kind}), encoding="utf-8")
    return folder


def refusal(folder: Path) -> str:
    """Return what sealing says, less the folder."""
    with pytest.raises(EvalsetError) as caught:
        seal(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize("kind", SIZES)
def test_sealing_writes_the_digests_of_pictures_and_brings_them_up_to_date(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "e", kind)
    seal(folder)
    first = load_evalset(folder)
    assert first.cases[1].sha256 == digest_file(folder / "images/1.png")
    check_pictures(folder, first.cases)
    before = (folder / "cases.jsonl").read_bytes()
    seal(folder)
    assert (folder / "cases.jsonl").read_bytes() == before
    draw(folder / "images/1.png", seed=99)
    with pytest.raises(EvalsetError, match=r"/cases.jsonl:2: case 'c1': \S+1.png: expected sha256 \w{12}, got \w{12}"):
        check_pictures(folder, first.cases)
    seal(folder)
    second = load_evalset(folder)
    assert [a.digest == b.digest for a, b in zip(first.cases, second.cases, strict=True)] == [True, False]


def test_sealing_leaves_the_spelling_of_other_lines_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "e", "detection", cluster="Café")
    seal(folder)
    first, last = (folder / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    rewritten = json.dumps(json.loads(first))
    (folder / "cases.jsonl").write_text(f"{rewritten.replace(' ', '  ')}\n{last}\n", encoding="utf-8")
    draw(folder / "images/1.png", seed=99)
    seal(folder)
    lines = (folder / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[0] == rewritten.replace(" ", "  ") and lines[1] != last


@pytest.mark.parametrize("kind", SIZES)
def test_a_picture_under_another_name_is_no_second_case(tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {"target": "targets/0.png"} if "target" in SIZES[kind] else {}
    folder = write(tmp_path / "e", kind, image="images/copy.png", **changes)
    (folder / "images/copy.png").write_bytes((folder / "images/0.png").read_bytes())
    seal(folder)
    with pytest.raises(EvalsetError, match="case 'c1' asks and expects the same as the case on line 1"):
        check_distinct(folder / "cases.jsonl", load_evalset(folder).cases)


PATH = "expected a path inside the evalset's folder, with '/' between its parts, no '..' and no ':'"


@pytest.mark.parametrize(
    ("kind", "replaced", "said"),
    [
        ("detection", {"id": "a/b"}, "id: expected letters, digits, "),
        (
            "detection",
            {"annotations": [BOX | {"bbox": [1, 2, 0, 4]}]},
            "annotations.0.bbox.2: expected more than 0, got 0",
        ),
        ("detection", {"annotations": [BOX | {"bbox": [1, 2, 3, -4]}]}, "annotations.0.bbox.3: expected more than 0"),
        (
            "detection",
            {"annotations": [BOX | {"bbox": [1, 2, 3]}]},
            "annotations.0.bbox.3: expected this key, found none",
        ),
        ("detection", {"annotations": [BOX | {"bbox": [float("nan"), 2, 3, 4]}]}, "annotations.0.bbox.0: expected a "),
        (
            "detection",
            {"annotations": [BOX, BOX | {"category_id": -1}]},
            "annotations.1.category_id: expected 0 or more",
        ),
        (
            "detection",
            {"annotations": [BOX | {"category_id": 1.5}]},
            "annotations.0.category_id: expected a whole number",
        ),
        ("detection", {"annotations": [BOX | {"area": 0}]}, "annotations.0.area: expected more than 0, got 0"),
        (
            "detection",
            {"annotations": [BOX | {"segmentation": []}]},
            "annotations.0.segmentation: unknown key; remove it",
        ),
        ("detection", {"annotations": None}, "annotations: expected a list, got None"),
        ("detection", {"target": "images/0.png"}, "target: unknown key; remove it"),
        ("upscaling", {"target": None}, "target: expected text, got None"),
    ],
)
def test_a_malformed_case_is_named_by_its_line(tmp_path: Path, kind: str, replaced: dict[str, Any], said: str) -> None:
    assert refusal(write(tmp_path / "e", kind, **replaced)).startswith(f"cases.jsonl:2: {said}")


@pytest.mark.parametrize(
    "name",
    [
        "../x.png",
        "images/../../x.png",
        "/x.png",
        "images\\0.png",
        "C:/x.png",
        "images//0.png",
        "./images/0.png",
        "images/0\n.png",
        "",
    ],
)
def test_a_case_names_pictures_in_its_own_folder_only(name: str) -> None:
    """Else a set that somebody else wrote has files read that are none of its business."""
    case = {"id": "a", "cluster": "a", "sha256": "0" * 64, "annotations": []}
    with pytest.raises(ValueError, match="expected a path inside|expected no control characters"):
        DetectionCase.model_validate(case | {"image": name})
    assert DetectionCase.model_validate(case | {"image": "images/..a/b c.png"}).image == "images/..a/b c.png"


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        (
            "detection",
            {"dog": 18},
            "card.yaml: categories: 2 annotations have a category_id that is not there, first 1 of case 'c0'; add it, "
            "or correct the case",
        ),
        ("detection", {"dog": 1, "hound": 1}, "card.yaml: categories.hound: category 1 is 'dog' already; remove one"),
        (
            "upscaling",
            {"dog": 1},
            "card.yaml: categories: expected none in a card of kind 'upscaling', whose cases have no objects; remove "
            "them or correct the kind, got {'dog': 1}",
        ),
    ],
)
def test_sealing_holds_the_cases_against_the_categories_of_the_card(
    tmp_path: Path, kind: str, names: dict[str, int], said: str
) -> None:
    """It said "sealed", and `make plan` refused the set."""
    folder = write(tmp_path / "e", kind)
    (folder / "card.yaml").write_text(json.dumps(CARD | {"kind": kind, "categories": names}), encoding="utf-8")
    assert refusal(folder) == said


def test_boxes_that_reach_out_of_their_picture_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As left, top, right and bottom all of them are in the picture: AP is near 0, whatever was found."""
    boxes = [BOX | {"bbox": bbox} for bbox in ([20, 10, 35, 28], [0, 0, 40.9, 30.9], [-2, 3, 9, 9])]
    folder = write(tmp_path / "e", "detection", annotations=boxes)
    assert seal_main([str(folder)]) == 0
    assert capsys.readouterr().err == (
        f"warning: {folder}/cases.jsonl:2: bbox [20.0, 10.0, 35.0, 28.0] reaches out of its picture of 40 x 30 pixels, "
        "as do 2 of 4 in all; expected left, top, width and height: where the last two are right and bottom, convert "
        "them, or cut what is outside\n"
    )
    coco_boxes = [box | {"image_id": 7, "id": i} for i, box in enumerate(boxes)]
    annotations, images, out = coco(tmp_path, annotations=coco_boxes, categories=[{"id": 1, "name": "dog"}])
    from_coco.convert(annotations, images, out)
    assert f"warning: {out}/cases.jsonl:1: bbox [20.0, 10.0, 35.0, 28.0] reaches out of" in capsys.readouterr().err


@pytest.mark.parametrize("digest", ["0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n"])
def test_a_digest_is_a_sha256(digest: str) -> None:
    case = {"id": "a", "cluster": "a", "image": "a.png", "sha256": "0" * 64, "target": "b.png", "target_sha256": digest}
    with pytest.raises(ValueError, match="expected 64 hexadecimal digits in lower case"):
        UpscalingCase.model_validate(case)


@pytest.mark.parametrize(
    ("kind", "replaced", "said"),
    [
        (
            "detection",
            {"annotations": [BOX, BOX | {"bbox": [40, 0, 5, 5]}]},
            "case 'c1': annotations.1.bbox: expected left, top, width and height of a box in the image of 40 x 30 "
            "pixels, "
            "got [40.0, 0.0, 5.0, 5.0]",
        ),
        (
            "detection",
            {"annotations": [BOX | {"bbox": [3, -8, 5, 8]}]},
            "case 'c1': annotations.0.bbox: expected left, ",
        ),
        (
            "detection",
            {"image": "images/gone.png"},
            "image: expected a picture in FOLDER, found no file 'images/gone.png'",
        ),
        ("upscaling", {"target": "targets"}, "target: expected a picture in FOLDER, found no file 'targets'"),
        (
            "upscaling",
            {"target": "images/0.png"},
            "case 'c1': expected a target of 2 times the image's sides, as of the cases before, got 1 times",
        ),
        (
            "upscaling",
            {"image": "targets/0.png", "target": "images/0.png"},
            "case 'c1': expected a target whose sides are a whole multiple of the image's 80 x 60 pixels, got 40 x 30",
        ),
        ("detection", {"image": "card.yaml"}, "case 'c1': card.yaml: expected a picture, got a file in no format that"),
    ],
)
def test_what_does_not_fit_the_pictures_is_named_by_its_line(
    tmp_path: Path, kind: str, replaced: dict[str, Any], said: str
) -> None:
    folder = write(tmp_path / "e", kind, **replaced)
    assert refusal(folder).startswith(f"cases.jsonl:2: {said.replace('FOLDER', str(folder))}")


def test_a_target_that_is_stretched_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "e", "upscaling", num=1)
    draw(folder / "targets/0.png", (80, 90))
    assert refusal(folder).startswith("cases.jsonl:1: case 'c0': expected a target whose sides are a whole multiple")


def test_a_picture_that_vanished_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "e", "upscaling")
    seal(folder)
    (folder / "targets/1.png").unlink()
    with pytest.raises(EvalsetError, match=r"cases.jsonl:2: case 'c1': \S+/targets/1.png: expected a picture, found"):
        check_pictures(folder, load_evalset(folder).cases)


def test_reading_checks_the_digest_and_returns_rgb(tmp_path: Path) -> None:
    path = draw(tmp_path / "a.png")
    pixels = read_picture(path, digest_file(path))
    assert pixels.shape == (30, 40, 3) and pixels.dtype == np.uint8 and pixels.flags.writeable
    assert np.array_equal(pixels, np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    for wrong, said in (
        (path, f"{path}: expected sha256 000000000000, got "),
        (tmp_path, f"{tmp_path}: expected a "),
        (tmp_path / "b.png", f"{tmp_path}/b.png: expected a picture, found no file"),
    ):
        with pytest.raises(EvalsetError) as caught:
            read_picture(wrong, "0" * 64)
        assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("a.png", "L"),
        ("a.png", "1"),
        ("a.gif", "P"),
        ("a.png", "RGBA"),
        ("a.jpg", "CMYK"),
        ("a.webp", "RGB"),
        ("a.bmp", "RGB"),
    ],
)
def test_other_colours_and_formats_become_rgb(tmp_path: Path, name: str, mode: str) -> None:
    path = draw(tmp_path / name, mode=mode)
    assert read_picture(path, digest_file(path)).shape == (30, 40, 3)


def test_sixteen_bits_a_channel_are_refused(tmp_path: Path) -> None:
    """Pillow would clip them at 255, which is a white picture."""
    path = tmp_path / "a.png"
    Image.fromarray(np.full((30, 40), 300, dtype=np.uint16)).save(path)
    with pytest.raises(EvalsetError, match="a.png: expected 8 bits a channel, got Pillow's mode 'I;16'; convert"):
        read_picture(path, digest_file(path))


@pytest.mark.parametrize("colour", [0, 2, 4, 6], ids=["grey", "rgb", "grey-alpha", "rgba"])
def test_sixteen_bits_of_any_colour_of_a_png_are_refused(tmp_path: Path, colour: int) -> None:
    """Pillow cuts those of colours to 8 without a word."""
    path, channels = tmp_path / "a.png", {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    for depth in (8, 16):
        header = struct.pack(">IIBBBBB", 40, 30, depth, colour, 0, 0, 0)
        rows = zlib.compress(bytes(1 + 40 * channels * depth // 8) * 30)
        chunks = [
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
        ]
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
        if depth == 8:
            assert read_picture(path, digest_file(path)).shape == (30, 40, 3)
    with pytest.raises(EvalsetError, match="a.png: expected 8 bits a channel, got .*16.*; convert the picture$"):
        read_picture(path, digest_file(path))


def test_sixteen_bits_a_pixel_are_fewer_than_eight_a_channel(tmp_path: Path) -> None:
    """A BMP of 5 bits a channel names them much as a PNG of 16 does."""
    path, pixels = tmp_path / "a.bmp", bytes(2 * 40 * 30)
    header = struct.pack("<IiiHHIIiiII", 40, 40, 30, 1, 16, 0, len(pixels), 0, 0, 0, 0)
    path.write_bytes(b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, 54) + header + pixels)
    assert read_picture(path, digest_file(path)).shape == (30, 40, 3)


def turned(orientation: int) -> Image.Exif:
    """Return EXIF that says how a picture is to be turned before it is shown; 1 is not at all."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


@pytest.mark.parametrize("name", ["1.jpg", "1.png", "1.webp"])
def test_a_picture_that_is_stored_turned_is_refused(tmp_path: Path, name: str) -> None:
    """OpenCV and labelling tools turn it as its EXIF says, and what is served would see another picture."""
    folder = write(tmp_path / "e", "detection", image=f"images/{name}")
    path = draw(folder / "images" / name, exif=turned(6))
    said = f"images/{name}: expected a picture that is stored upright, got EXIF orientation 6; save it rotated "
    assert refusal(folder).startswith(f"cases.jsonl:2: case 'c1': {said}(ImageOps.exif_transpose)")
    with pytest.raises(EvalsetError, match="expected a picture that is stored upright, got EXIF orientation 6"):
        read_picture(path, digest_file(path))


def test_exif_of_an_upright_picture_is_let_through(tmp_path: Path) -> None:
    folder = write(tmp_path / "e", "detection", image="images/1.jpg")
    draw(folder / "images/1.jpg", exif=turned(1))
    assert seal(folder).kind == "detection"


def test_a_png_that_says_after_its_pixels_that_it_is_turned_is_refused(tmp_path: Path) -> None:
    """The note may stand there, where reading the header does not come."""
    path = draw(tmp_path / "a.png", exif=turned(6))
    data = path.read_bytes()
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    path.write_bytes(data[:start] + data[end:-12] + data[start:end] + data[-12:])  # the last chunk has 12 bytes
    with pytest.raises(EvalsetError, match="a.png: expected a picture that is stored upright, got EXIF orientation 6"):
        read_picture(path, digest_file(path))


def test_a_tiff_is_turned_by_pillow_as_by_others(tmp_path: Path) -> None:
    path = draw(tmp_path / "a.tif", exif=turned(6))
    assert measure_picture(path) == (30, 40)
    assert read_picture(path, digest_file(path)).shape == (40, 30, 3)


def test_a_target_that_is_smaller_than_what_ssim_looks_at_is_refused(tmp_path: Path) -> None:
    """It was told after all of the timing, without its case."""
    folder = write(tmp_path / "e", "upscaling", num=1)
    draw(folder / "images/0.png", (80, 10))
    draw(folder / "targets/0.png", (80, 10))
    assert refusal(folder) == (
        "cases.jsonl:1: case 'c0': expected a target of at least 11 pixels a side, which SSIM looks at together, got "
        "80 x 10; take a larger picture"
    )
    too_small, enough = torch.zeros(1, 3, 10, 80), torch.zeros(1, 3, 11, 80)
    with pytest.raises(NumericsError, match="SSIM: expected images of at least 11 pixels a side"):
        structural_similarity(too_small, too_small)
    assert structural_similarity(enough, enough) == 1
    draw(folder / "images/0.png", (80, 11))
    draw(folder / "targets/0.png", (80, 11))
    assert seal(folder).kind == "upscaling"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of TIFF, before it gives up
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.gif", "a.tif", "a.bmp"])
def test_a_damaged_picture_is_one_clear_line(tmp_path: Path, name: str) -> None:
    """Each of Pillow's formats fails in its own way."""
    whole, rng = draw(tmp_path / name).read_bytes(), np.random.default_rng(1)
    damaged = [whole[:size] for size in (0, 7, 30, 100, len(whole) // 2)]
    for at in rng.integers(0, len(whole), 30):
        damaged.append(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    refused = 0
    for data in damaged:
        (path := tmp_path / f"damaged-{name}").write_bytes(data)
        try:
            read_picture(path, digest_file(path))
        except EvalsetError as error:
            refused += 1
            assert "\n" not in str(error) and str(error).startswith(f"{path}: expected a picture, got ")
    assert refused >= 4  # a byte of an image without checksums is just another colour


def test_a_picture_too_large_to_be_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = draw(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(EvalsetError, match=r"a.png: expected a picture, got one that Pillow can't read: Image size "):
        read_picture(path, digest_file(path))


# COCO's annotations become an evalset.


def coco(folder: Path, **replaced: Any) -> tuple[Path, Path, Path]:
    """Write a small file of COCO's and its images; return it, the images' folder, and the folder to be."""
    for name in ("one.png", "two/three.png"):
        draw(folder / "photos" / name, seed=len(name))
    data = {
        "info": {},
        "categories": [{"id": 18, "name": "dog"}],
        "images": [
            {"id": 7, "file_name": "one.png", "width": 40, "height": 30, "coco_url": "x"},
            {"id": 9, "file_name": "two/three.png", "width": 40, "height": 30},
        ],
        "annotations": [
            {
                "id": 1,
                "image_id": 7,
                "category_id": 18,
                "bbox": [1, 2, 3, 4],
                "area": 7.5,
                "iscrowd": 1,
                "segmentation": [],
            },
            {"id": 2, "image_id": 7, "category_id": 18, "bbox": [1, 2, 0, 4], "area": 0},
            {"id": 3, "image_id": 7, "category_id": 18, "bbox": [5, 6, 7, 8]},
        ],
    } | replaced
    (folder / "instances.json").write_text(json.dumps(data), encoding="utf-8")
    return folder / "instances.json", folder / "photos", folder / "mine"


def test_cocos_annotations_become_an_evalset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    annotations, images, out = coco(tmp_path)
    assert from_coco.main([str(annotations), str(images), str(out)]) == 0
    assert capsys.readouterr().out == (
        "mine: 2 cases, 2 clusters, no buckets; card sealed; boxes left out: 1; write licence and description into "
        f"{out}/card.yaml\n"
    )
    with pytest.raises(EvalsetError, match=r"mine/card.yaml: licence: expected under which terms .*, got 'TODO'; "):
        load_evalset(out)
    card = out / "card.yaml"
    card.write_text(card.read_text().replace("licence: TODO", "licence: CC-BY-4.0").replace("TODO", "Dogs."))
    one, three = load_evalset(out).cases
    check_pictures(out, (one, three))
    assert (one.id, three.image, three.annotations) == ("7", "images/two/three.png", ())
    assert [(a.bbox, a.category_id, a.area, a.iscrowd) for a in one.annotations] == [
        ((1, 2, 3, 4), 18, 7.5, True),
        ((5, 6, 7, 8), 18, 56, False),
    ]
    assert (out / three.image).read_bytes() == (images / "two/three.png").read_bytes()


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ({"images": [{"id": 7, "file_name": "gone.png"}]}, "image with id 7: expected PHOTOS/gone.png, found no file"),
        (
            {"images": [{"id": 7, "file_name": "../photos/one.png"}]},
            f"image with id 7: image: {PATH}, got 'images/../pho",
        ),
        ({"images": [{"id": "a/b", "file_name": "one.png"}]}, "image with id a/b: id: expected letters, "),
        ({"images": [{"file_name": "one.png"}]}, "FILE: expected COCO's annotations, got KeyError: 'id'"),
        ({"images": 3}, "FILE: expected COCO's annotations, got TypeError: "),
        (
            {"categories": [{"id": 18, "name": "dog"}, {"id": 19, "name": "dog"}]},
            "FILE: categories: expected a name of its own for each, got 'dog' for 18 and 19; rename one",
        ),
        (
            {"categories": [{"id": 17, "name": "cat"}]},
            "FILE: categories: expected those of all annotations, found none with id 18 (1 are missing); add them",
        ),
        ({"annotations": [{"image_id": 7, "bbox": []}]}, "FILE: expected COCO's annotations, got IndexError: "),
        ({"annotations": [{"image_id": 7, "bbox": [1, 2, 3, 4]}]}, "image with id 7: annotations.0.category_id: "),
    ],
)
def test_what_is_not_cocos_is_refused_before_anything_is_written(
    tmp_path: Path, replaced: dict[str, Any], said: str
) -> None:
    annotations, images, out = coco(tmp_path, **replaced)
    with pytest.raises(EvalsetError) as caught:
        from_coco.convert(annotations, images, out)
    assert str(caught.value).startswith(said.replace("FILE", str(annotations)).replace("PHOTOS", str(images)))
    assert "\n" not in str(caught.value) and not out.exists()


def test_a_conversion_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    """What it had written was in the way: "expected the name of a new folder"."""
    outside = {"image_id": 7, "category_id": 18, "bbox": [1000, 2000, 3, 4]}
    annotations, images, out = coco(tmp_path, annotations=[outside])
    with pytest.raises(EvalsetError, match="cases.jsonl:1: .*box"):
        from_coco.convert(annotations, images, out)
    assert not out.exists()
    annotations.write_text(annotations.read_text().replace("[1000, 2000, 3, 4]", "[1, 2, 3, 4]"))
    assert "2 cases" in from_coco.convert(annotations, images, out)


def test_an_evalset_is_never_written_over(tmp_path: Path) -> None:
    annotations, images, out = coco(tmp_path)
    out.mkdir()
    with pytest.raises(EvalsetError, match="mine: expected the name of a new folder, found one that exists"):
        from_coco.convert(annotations, images, out)


# The examples of evalsets/README.md, and what is shipped.


@pytest.mark.parametrize("kind", SIZES)
def test_the_example_of_the_readme_seals_and_loads(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = SECTIONS[kind]
    folder = Path(next(name for name in files if name.endswith("card.yaml"))).parent
    for name in ("card.yaml", "cases.jsonl"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(files[f"{folder}/{name}"], encoding="utf-8")
    (case,) = map(json.loads, files[f"{folder}/cases.jsonl"].splitlines())
    for name, size in SIZES[kind].items():
        draw(folder / case[name], (size[0] * 2, size[1] * 2))
    assert seal(folder).kind == kind
    assert load_evalset(folder).cases[0].sha256 == digest_file(folder / case["image"])


@pytest.fixture(scope="module")
def shipped() -> dict[str, Evalset]:
    return {name: load_evalset(ROOT / "evalsets" / name) for name in PICTURE_SETS}


@pytest.mark.parametrize("name", PICTURE_SETS)
def test_a_shipped_set_is_whole_and_counts_no_case_twice(shipped: dict[str, Evalset], name: str) -> None:
    folder, evalset = ROOT / "evalsets" / name, shipped[name]
    assert evalset.card.made_by == f"python -m evalsets.make {name}"
    assert evalset.card.num_clusters == len(evalset.cases)
    check_pictures(folder, evalset.cases)
    check_distinct(folder / "cases.jsonl", evalset.cases)
    named = {folder / getattr(case, key) for case in evalset.cases for key in ("image", "target") if hasattr(case, key)}
    assert named == {path for path in folder.glob("*/*") if path.is_file()}


def test_sizes_and_buckets(shipped: dict[str, Evalset]) -> None:
    assert {name: len(evalset.cases) for name, evalset in shipped.items()} == {
        "scenes": 300,
        "scenes-calibration": 16,
        "panoramas": 36,
    }
    assert shipped["scenes"].card.buckets == {"few_small": 80, "mostly_small": 33, "some_small": 186}
    assert shipped["panoramas"].card.buckets == {}


@pytest.mark.parametrize(
    ("areas", "bucket"),
    [
        ([], []),
        ([1025] * 3 + [1024], ["few_small"]),
        ([1025] * 2 + [1024], ["some_small"]),
        ([1025] + [1024] * 2, ["some_small"]),
        ([1025] + [1024] * 3, ["mostly_small"]),
        ([9], ["mostly_small"]),
    ],
)
def test_a_bucket_is_the_share_of_small_people(areas: list[int], bucket: list[str]) -> None:
    assert name_buckets(np.array(areas, dtype=np.int64)) == bucket


def test_buckets_are_those_of_the_annotations(shipped: dict[str, Evalset]) -> None:
    for case in shipped["scenes"].cases:
        assert list(case.buckets) == name_buckets(np.array([a.area for a in case.annotations]))
        assert all(a.area == a.bbox[2] * a.bbox[3] for a in case.annotations)


def test_targets_are_twice_their_images(shipped: dict[str, Evalset]) -> None:
    folder = ROOT / "evalsets/panoramas"
    for case in shipped["panoramas"].cases:
        with Image.open(folder / case.image) as image, Image.open(folder / case.target) as target:
            assert target.size == CROP
            assert target.size == (panoramas.FACTOR * image.width, panoramas.FACTOR * image.height)
            assert (target.format, image.format) == ("JPEG", "PNG")


def test_an_upscalers_input_shows_its_target(shipped: dict[str, Evalset]) -> None:
    """Made from what was drawn instead, it would show what the target's JPEG lost: the truth would be the worse one."""
    folder = ROOT / "evalsets/panoramas"
    case = shipped["panoramas"].cases[0]
    target = read_picture(folder / case.target, case.target_sha256)
    shrunk = panoramas.shrink(target, np.random.default_rng(0), noise=0).astype(float)
    noise = read_picture(folder / case.image, case.sha256) - shrunk
    rounding = 1 / 12  # of either picture, squared levels
    assert abs(noise.mean()) < 0.05 and noise.var() == pytest.approx((0.005 * 255) ** 2 + 2 * rounding, rel=0.02)


def test_scenes_are_what_the_command_draws_and_no_training_did(shipped: dict[str, Evalset], tmp_path: Path) -> None:
    drawn = list(make_scenes(Random("evalset/scenes"), tmp_path, num=4))
    for i, (case, again) in enumerate(zip(shipped["scenes"].cases, drawn, strict=False)):
        pixels = read_picture(ROOT / "evalsets/scenes" / case.image, case.sha256)
        away = pixels.astype(float) - read_picture(tmp_path / again["image"], again["sha256"])
        assert np.abs(away).mean() < 2, "another JPEG of the same scene"
        assert [list(a.bbox) for a in case.annotations] == [a["bbox"] for a in again["annotations"]]
        for split in (TRAIN, HELD_OUT):
            assert np.abs(pixels.astype(float) - scenes.render(np.random.default_rng([0, split, i])).pixels).mean() > 10
