"""The people detector as its owner's code has it: architecture, loading, and boxes from pixels.

    model = open_detector("models/people")
    found = detect(model, pixels)  # uint8 (images, 320, 320, 3)

`build`, `preprocess` and `postprocess` make it an adapter of kind vision (`pipeline/products/vision/adapters.py`).

A backbone of 3x3 convolutions, a feature pyramid (Lin et al. 2017, arXiv:1612.03144), and one branch for each size
of person with weights of its own: `branches.small` at stride 4, `.medium` at 8, `.large` at 16. Each cell says how
sure it is to hold a person's centre (Zhou et al. 2019, arXiv:1904.07850) and how far the box's sides are
(Tian et al. 2019, arXiv:1904.01355). There is no norm and no activation but ReLU between the convolutions, so a channel
can be scaled by a positive factor and scaled back by the next convolution. Training: `models/make/train_people.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

LEVELS = ("small", "medium", "large")
STRIDES = (4, 8, 16)
_NUM_OUTPUTS = 5  # confidence, and the distances to left, top, right, bottom


@dataclass(frozen=True)
class Found:
    """The boxes found in one image, the surest first."""

    boxes: np.ndarray  # float32 (boxes, 4): left, top, width, height in pixels
    scores: np.ndarray  # float32 (boxes,) in [0, 1]


class Detector(nn.Module):
    """Pixels to raw outputs, one tensor per level."""

    def __init__(self, config: dict[str, Any], *, has_norm: bool = False) -> None:
        """Build it untrained.

        Args:
            config: what config.json holds.
            has_norm: put a BatchNorm behind each convolution, for training.
        """
        super().__init__()
        self.config = config
        stem, widths, depth, width = config["stem"], config["widths"], config["depth"], config["pyramid"]
        self.stem = nn.Sequential(block(3, stem, stride=2, has_norm=has_norm), block(stem, stem, has_norm=has_norm))
        self.stages = nn.ModuleList(
            nn.Sequential(block(before, after, stride=2, has_norm=has_norm),
                          *(block(after, after, has_norm=has_norm) for _ in range(depth)))
            for before, after in zip([stem, *widths], widths, strict=False))  # fmt: skip
        self.laterals = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in widths)
        self.branches = nn.ModuleDict({
            level: nn.Sequential(*(block(width, width, has_norm=has_norm) for _ in range(config["branch_depth"])),
                                 nn.Conv2d(width, _NUM_OUTPUTS, 1)) for level in LEVELS})  # fmt: skip

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return one (images, 5, rows, columns) per level; x is (images, 3, rows, columns), from `preprocess`."""
        x, found = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        found = [lateral(f) for lateral, f in zip(self.laterals, found, strict=True)]
        for low in (1, 0):
            found[low] = found[low] + F.interpolate(found[low + 1], scale_factor=2, mode="nearest")
        return [self.branches[level](f) for level, f in zip(LEVELS, found, strict=True)]


def block(channels_in: int, channels_out: int, *, stride: int = 1, has_norm: bool = False) -> nn.Sequential:
    """Return a 3x3 convolution and a ReLU, with a BatchNorm between them or not."""
    conv = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=not has_norm)
    norm = [nn.BatchNorm2d(channels_out)] if has_norm else []
    return nn.Sequential(conv, *norm, nn.ReLU())


def open_detector(folder: Path | str) -> Detector:
    """Load config.json and model.safetensors, float32, ready to run."""
    model = Detector(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval()


def build(config: dict[str, Any]) -> Detector:
    """Return it untrained."""
    return Detector(config)


def preprocess(pixels: torch.Tensor) -> torch.Tensor:
    """Return uint8 (images, rows, columns, 3) as float32 (images, 3, rows, columns) in [-2, 2]."""
    return pixels.permute(0, 3, 1, 2).float() / 63.75 - 2


@torch.no_grad()
def detect(model: Detector, pixels: np.ndarray) -> list[Found]:
    """Find the people in images of one size, whose sides are multiples of 16 pixels."""
    return find(model(preprocess(torch.from_numpy(pixels))), model.config)


def find(outputs: list[torch.Tensor], config: dict[str, Any]) -> list[Found]:
    """Return the boxes of each image from the raw outputs of all levels."""
    candidates = [decode(out.float(), stride) for out, stride in zip(outputs, STRIDES, strict=True)]
    return [_pick(torch.cat([boxes[i] for boxes, _ in candidates]), torch.cat([scores[i] for _, scores in candidates]),
                  config) for i in range(len(outputs[0]))]  # fmt: skip


def postprocess(outputs: list[torch.Tensor], config: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return COCO results of each image."""
    return [[{"bbox": box, "score": score, "category_id": 1}
             for box, score in zip(found.boxes.tolist(), found.scores.tolist(), strict=True)]
            for found in find(outputs, config)]  # fmt: skip


def decode(output: torch.Tensor, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every cell's box as corners in pixels, (images, cells, 4), and its score, (images, cells).

    A cell that is not the surest of its 3x3 neighbours scores zero.
    """
    confidence = output[:, :1].sigmoid()
    confidence = confidence * (F.max_pool2d(confidence, 3, stride=1, padding=1) == confidence)
    return to_corners(output[:, 1:], stride).flatten(2).transpose(1, 2), confidence.flatten(1)


def to_corners(sides: torch.Tensor, stride: int) -> torch.Tensor:
    """Return left, top, right, bottom in pixels, (images, 4, rows, columns), from the logarithms of the distances."""
    rows, columns = ((torch.arange(n, device=sides.device) + 0.5) * stride for n in sides.shape[2:])
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    distance = sides.clamp(-6, 6).exp() * stride
    return torch.stack([x, y, x, y]) + distance * distance.new_tensor([-1, -1, 1, 1]).view(4, 1, 1)


def _pick(corners: torch.Tensor, scores: torch.Tensor, config: dict[str, Any]) -> Found:
    """Keep the surest boxes of one image, and of boxes that overlap much the surest only; NaN scores nothing."""
    sure = torch.nonzero(scores > config["min_score"])[:, 0]
    order = sure[scores[sure].argsort(descending=True, stable=True)][: config["max_candidates"]]
    corners, scores = corners[order].clamp(0, config["size"]), scores[order]
    overlaps, kept = overlap(corners[:, None], corners[None]) > config["max_overlap"], []
    is_free = torch.ones(len(order), dtype=torch.bool)
    for index in range(len(order)):
        if is_free[index]:
            kept.append(index)
            is_free &= ~overlaps[index]
    boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1)[kept]
    return Found(boxes.numpy(), scores[kept].numpy())


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return intersection over union of boxes given as corners in the last dimension, after broadcasting."""
    sides = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    common = sides.prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - common
    return common / union.clamp(min=1e-9)
