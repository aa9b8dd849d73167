"""Street scenes are repeatable and their boxes exact; the shipped detectors are what their cards say."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from evalsets.make import scenes as scenes_module
from evalsets.make.figures import Figure
from evalsets.make.scenes import MEDIUM_AREA, SIZE, SMALL_AREA, Scene, name_bucket, render
from models.make.imbalance_people import BRANCH, imbalance
from models.make.score_people import find_all, held_out, score
from models.make.train_people import CONFIG, MAX_PEOPLE, fold, loss_of
from models.people.detector import (
    LEVELS,
    STRIDES,
    Detector,
    Found,
    detect,
    open_detector,
    overlap,
    preprocess,
    to_corners,
)
from tests.paths import ROOT

FOLDERS = ["people", "people-hard"]
MODELS = ROOT / "models"
MAX_MB = 12


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return held_out(24)


@pytest.fixture(scope="module")
def people() -> Detector:
    return open_detector(MODELS / "people")


def build(seed: int = 0, *, has_norm: bool = False) -> Detector:
    torch.manual_seed(seed)
    return Detector(CONFIG | {"stem": 4, "widths": [8, 8, 8], "pyramid": 8}, has_norm=has_norm).eval()


def find_truth(scenes: list[Scene], *, but: str = "") -> list[Found]:
    kept = [s.boxes[[name_bucket(area) != but for area in s.areas]] for s in scenes]
    return [Found(boxes.astype(np.float32), np.ones(len(boxes), dtype=np.float32)) for boxes in kept]


def test_a_scene_is_drawn_alike_from_the_same_generator() -> None:
    first, again, other = (render(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.pixels.shape == (SIZE, SIZE, 3) and first.pixels.dtype == np.uint8
    assert np.array_equal(first.pixels, again.pixels) and np.array_equal(first.boxes, again.boxes)
    assert not np.array_equal(first.pixels, other.pixels)


def test_boxes_lie_in_the_picture_and_every_size_is_there(scenes: list[Scene]) -> None:
    boxes = np.concatenate([s.boxes for s in scenes])
    assert (boxes[:, :2] >= 0).all() and (boxes[:, :2] + boxes[:, 2:] <= SIZE).all() and (boxes[:, 2:] >= 4).all()
    assert max(len(s.boxes) for s in scenes) <= MAX_PEOPLE
    counts = Counter(name_bucket(area) for s in scenes for area in s.areas)
    assert set(counts) == set(LEVELS) and min(counts.values()) >= 15


@pytest.mark.parametrize("seed", range(4))
def test_a_box_bounds_the_pixels_that_people_change(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scene with and without their paint differs on all sides of a box, and outside of boxes at the rim only."""
    monkeypatch.setattr(scenes_module, "_develop", lambda picture, _rng: picture)
    monkeypatch.setattr(scenes_module, "draw_thing", lambda *_: Figure(np.zeros((1, 1, 3)), np.zeros((1, 1)), 0, 0))
    scene = render(np.random.default_rng(seed))
    monkeypatch.setattr(scenes_module, "_paint", lambda *_: None)
    changed = (scene.pixels != render(np.random.default_rng(seed)).pixels).any(axis=2)
    outside = changed.copy()
    for left, top, width, height in scene.boxes:
        inside = changed[top : top + height, left : left + width]
        assert inside[0].any() and inside[-1].any() and inside[:, 0].any() and inside[:, -1].any()
        outside[max(0, top - 2) : top + height + 2, max(0, left - 2) : left + width + 2] = False
    assert len(scene.boxes) and not outside.any()


@pytest.mark.parametrize(
    ("area", "name"),
    [(SMALL_AREA, "small"), (SMALL_AREA + 1, "medium"), (MEDIUM_AREA, "medium"), (MEDIUM_AREA + 1, "large")],
)
def test_bounds_belong_to_the_smaller_size(area: int, name: str) -> None:
    assert name_bucket(area) == name


def test_folded_norms_change_nothing() -> None:
    trained = build(has_norm=True)
    for module in trained.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.running_var, module.weight.data):
                values.uniform_(0.5, 2)
            for values in (module.running_mean, module.bias.data):
                values.normal_()
    folded, x = fold(trained), torch.randn(2, 3, 64, 64)
    assert not [m for m in folded.modules() if isinstance(m, nn.BatchNorm2d)]
    with torch.no_grad():
        for before, after in zip(trained(x), folded(x), strict=True):
            assert torch.allclose(before, after, atol=1e-4)


def perfect_outputs(corners: torch.Tensor) -> list[torch.Tensor]:
    """Return raw outputs that say exactly where people are, each on the level of his size."""
    outputs = []
    for stride, (low, high) in zip(STRIDES, [(0, 1024), (1024, 9216), (9216, 1 << 20)], strict=True):
        output = torch.zeros(1, 5, SIZE // stride, SIZE // stride)
        output[:, 0] = -20
        for left, top, right, bottom in corners[0].tolist():
            if low < (right - left) * (bottom - top) <= high:
                row, column = int((top + bottom) / 2 / stride), int((left + right) / 2 / stride)
                y, x = (row + 0.5) * stride, (column + 0.5) * stride
                output[0, 0, row, column] = 20
                away = torch.tensor([x - left, y - top, right - x, bottom - y]) / stride
                output[0, 1:, row, column] = away.log()
        outputs.append(output)
    return outputs


def test_outputs_that_say_the_truth_give_its_boxes_and_lose_little() -> None:
    corners = torch.tensor([[[20.0, 30, 30, 55], [100, 40, 130, 120], [150, 60, 260, 300]]])
    outputs = perfect_outputs(corners)

    class Oracle(nn.Module):
        config = CONFIG

        def forward(self, _x: torch.Tensor) -> list[torch.Tensor]:
            return outputs

    found = detect(Oracle(), np.zeros((1, SIZE, SIZE, 3), dtype=np.uint8))[0]
    wanted = torch.cat([corners[0, :, :2], corners[0, :, 2:] - corners[0, :, :2]], dim=1)
    assert torch.allclose(torch.from_numpy(found.boxes), wanted, atol=1e-3)
    nobody = [torch.zeros_like(o) - torch.eye(5)[0].view(5, 1, 1) * 20 for o in outputs]
    assert loss_of(outputs, corners) < loss_of(nobody, corners) / 5


def test_of_two_boxes_in_one_place_the_surer_stays() -> None:
    a, b = torch.tensor([0.0, 0, 10, 10]), torch.tensor([0.0, 0, 10, 5])
    assert overlap(a, b) == 0.5 and overlap(a, a) == 1 and overlap(a, a + 10) == 0
    assert to_corners(torch.zeros(1, 4, 2, 3), 4)[0, :, 1, 2].tolist() == [6, 2, 14, 10]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_small_and_has_its_cards(name: str) -> None:
    folder = MODELS / name
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6 < MAX_MB
    assert "seed" in json.loads((folder / "card.json").read_text())
    assert (folder / "README.md").read_text().startswith(f"# models/{name}\n")
    model = open_detector(folder)
    assert sum(p.numel() for p in model.parameters()) < 1_500_000
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {type(m) for m in model.modules() if not list(m.children())} == {nn.Conv2d, nn.ReLU}


def test_the_detector_finds_people_of_every_size(people: Detector, scenes: list[Scene]) -> None:
    found = score(scenes, find_all(lambda pixels: detect(people, pixels), scenes))
    assert found["ap"] > 0.65
    assert min(found["ap_small"], found["ap_medium"], found["ap_large"]) > 0.5


def test_scores_are_told_apart_by_size(scenes: list[Scene]) -> None:
    assert set(score(scenes, find_truth(scenes)).values()) == {1.0}
    without = score(scenes, find_truth(scenes, but="small"))
    assert (without["ap_small"], without["ap_medium"], without["ap_large"]) == (0, 1, 1)
    nobody_large = [Scene(s.pixels, s.boxes[s.areas <= MEDIUM_AREA]) for s in scenes]
    assert score(nobody_large, find_truth(nobody_large))["ap_large"] == -1
    assert set(score(scenes, [Found(np.zeros((0, 4)), np.zeros(0))] * len(scenes)).values()) == {0.0}


@torch.no_grad()
def test_the_hard_detector_is_the_same_one_in_float32(people: Detector, scenes: list[Scene]) -> None:
    hard, x = open_detector(MODELS / "people-hard"), preprocess(torch.from_numpy(scenes[0].pixels)[None])
    assert all(torch.equal(a, b) for a, b in zip(people(x), hard(x), strict=True))
    other = hard.state_dict()
    differ = {key for key, value in people.state_dict().items() if not torch.equal(value, other[key])}
    assert differ and all(key.startswith(f"branches.{BRANCH}.") for key in differ)


@torch.no_grad()
def test_the_hard_detector_is_made_by_its_script(people: Detector) -> None:
    made, card = open_detector(MODELS / "people"), json.loads((MODELS / "people-hard/card.json").read_text())
    generator = torch.Generator().manual_seed(card["imbalance_seed"])
    imbalance(made.branches[BRANCH], card["largest_power_of_two"], generator)
    shipped = open_detector(MODELS / "people-hard").state_dict()
    assert all(torch.equal(value, shipped[key]) for key, value in made.state_dict().items())
