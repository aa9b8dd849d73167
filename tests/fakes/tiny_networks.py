"""A temporary project with two networks of a few weights, written out as a user would: adapters, folders, evalsets.

The detector blurs a picture's brightness and finds bright squares of 8 pixels; the upscaler blurs, doubles, and takes
off part of the mean, which makes seams of tiles. Both need no training, and what they give is known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from evalsets.seal import seal
from pipeline.products.vision.settings import VisionProduct

NUM_PICTURES = 40
SIDE, CELL = 32, 8  # pixels of a detector's picture, and of what is on it
NUM_VIEWS, VIEW = 4, (64, 96)  # pictures to be enlarged, and their rows and columns
BRIGHT, DIM = 250, 140  # levels of squares; only the former overflow float16 in `hot`
GAIN = 300.0  # of the first convolution of `hot`, which the last one takes back

DETECTOR = '''"""Finds bright squares."""
import torch
from torch import nn


class Squares(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.blur = nn.Conv2d(1, 1, 3, padding=1)
        self.scale = nn.Conv2d(1, 1, 1)
        self.pool = nn.AvgPool2d(config["cell"])

    def forward(self, x):
        return self.pool(self.scale(self.blur(x)))


def build(config):
    return Squares(config)


def preprocess(pixels):
    return pixels.permute(0, 3, 1, 2).float().mean(1, keepdim=True)


def postprocess(outputs, config):
    cell = config["cell"]
    return [[{"bbox": [column * cell, row * cell, cell, cell], "score": heat[row, column].item(), "category_id": 1}
             for row, column in (~(heat < config["least"])).nonzero().tolist()] for heat in outputs[:, 0]]
'''

UPSCALER = '''"""Blurs and doubles."""
import torch
from torch import nn


class Doubled(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.blur = nn.Conv2d(3, 3 * 4, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x):
        return self.shuffle(self.blur(x)) - 0.4 * x.mean((2, 3), keepdim=True)


def build(config):
    return Doubled(config)


def preprocess(pixels):
    return pixels.permute(0, 3, 1, 2).float() / 255


def postprocess(outputs, config):
    return (outputs.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
'''


def write_project(root: Path) -> Path:
    """Write adapters, networks and evalsets of both products; return the root."""
    for name, text in (("detector", DETECTOR), ("upscaler", UPSCALER)):
        (root / name).mkdir(parents=True)
        (root / name / "adapter.py").write_text(text)
    write_detector(root / "detector/squares")
    write_detector(root / "detector/hot", gain=GAIN)
    write_upscaler(root / "upscaler/doubled")
    write_squares(root / "evalsets/squares")
    write_views(root / "evalsets/views")
    return root


def write_detector(folder: Path, *, gain: float = 1.0) -> None:
    """Write a detector's folder; its float32 outputs hardly depend on the gain."""
    blur = torch.full((1, 1, 3, 3), 0.05)
    blur[..., 1, 1] = 0.6
    _write_network(
        folder,
        {"cell": CELL, "least": 0.3},
        {
            "blur.weight": blur * gain,
            "blur.bias": torch.zeros(1),
            "scale.weight": torch.full((1, 1, 1, 1), 1 / 255 / gain),
            "scale.bias": torch.zeros(1),
        },
    )


def write_upscaler(folder: Path) -> None:
    """Write an upscaler's folder."""
    blur = torch.zeros(12, 3, 3, 3)
    for output in range(12):
        blur[output, output // 4] = 0.05
        blur[output, output // 4, 1, 1] = 0.6
    _write_network(folder, {}, {"blur.weight": blur, "blur.bias": torch.zeros(12)})


def _write_network(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


def write_squares(folder: Path, num: int = NUM_PICTURES) -> None:
    """Write a detection evalset: one to three squares on noise, of every second picture bright ones."""
    rng, cases = np.random.default_rng(0), []
    for i in range(num):
        pixels, annotations = rng.integers(0, 40, (SIDE, SIDE, 3), dtype=np.uint8), []
        for place in rng.choice((SIDE // CELL) ** 2, 1 + i % 3, replace=False).tolist():
            top, left = (CELL * side for side in divmod(place, SIDE // CELL))
            pixels[top : top + CELL, left : left + CELL] = (BRIGHT if i % 2 else DIM) - rng.integers(0, 20)
            annotations.append({"bbox": [left, top, CELL, CELL], "category_id": 1, "area": CELL**2})
        cases.append(
            {
                "id": f"c{i:02d}",
                "cluster": f"c{i:02d}",
                "buckets": ["bright" if i % 2 else "dim"],
                "image": _draw(folder, f"images/{i:02d}.png", pixels),
                "annotations": annotations,
            }
        )
    write_evalset(folder, "detection", cases)


def write_views(folder: Path, num: int = NUM_VIEWS, size: tuple[int, int] = VIEW) -> None:
    """Write an upscaling evalset of clouds with a little noise, each pixel of which is four in its target."""
    rng, cases = np.random.default_rng(1), []
    for i in range(num):
        coarse = Image.fromarray(rng.integers(60, 200, (4, 6, 3), dtype=np.uint8))
        clouds = np.asarray(coarse.resize(size[::-1], Image.Resampling.BICUBIC)).astype(int)
        pixels = (clouds + rng.integers(-3, 4, clouds.shape)).clip(0, 255).astype(np.uint8)
        cases.append(
            {
                "id": f"v{i}",
                "cluster": f"v{i}",
                "image": _draw(folder, f"images/{i}.png", pixels),
                "target": _draw(folder, f"targets/{i}.png", pixels.repeat(2, 0).repeat(2, 1)),
            }
        )
    write_evalset(folder, "upscaling", cases)


def write_evalset(folder: Path, kind: str, cases: list[dict[str, Any]]) -> None:
    """Write cases whose pictures are there, and seal them."""
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    card = {
        "name": folder.name,
        "version": "1",
        "licence": "CC0-1.0",
        "kind": kind,
        "description": "for tests",
        "made_by": "hand",
        "cluster": "a picture",
    }
    (folder / "card.yaml").write_text(json.dumps(card))
    seal(folder)


def _draw(folder: Path, name: str, pixels: np.ndarray) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return name


def make_detector(steps: dict[str, list[dict[str, Any]]] | None = None, **changes: Any) -> VisionProduct:
    """Return a product whose candidates beside the reference have these steps; all but the reference are released."""
    return VisionProduct.model_validate(describe_detector(steps, **changes))


def describe_detector(steps: dict[str, list[dict[str, Any]]] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the settings of the product `detector` with its name and candidates; see `describe_project`."""
    candidates: dict[str, list[dict[str, Any]]] = {"squares": []} | (
        {"half": [{"kind": "precision", "dtype": "bfloat16"}]} if steps is None else steps
    )
    return {
        "name": "detector",
        "kind": "vision",
        "adapter": "detector/adapter.py",
        "reference": "squares",
        "release": list(candidates)[1:],
        "candidates": {
            name: {"checkpoint": f"detector/{'hot' if name.startswith('hot') else 'squares'}", "steps": given}
            for name, given in candidates.items()
        },
        "serving": {"batch_size": 4, "num_threads": 1},
        "resources": {"num_workers": 1},
        "evals": {"squares": {"kind": "detection", "evalset": "evalsets/squares", "areas": {"tiny": [0.0, 100.0]}}},
        "gate": {
            "alpha": 0.05,
            "on_inconclusive": "block",
            "tolerances": {
                "squares/ap": {"overall": 0.05},
                "squares/ap_small": {"overall": 0.05},
                "squares/finite_output_rate": {"overall": 0.1},
            },
        },
    } | changes


def make_upscaler(steps: dict[str, list[dict[str, Any]]] | None = None, **changes: Any) -> VisionProduct:
    """Return a product whose candidates beside the reference have these steps; all but the reference are released."""
    return VisionProduct.model_validate(describe_upscaler(steps, **changes))


def describe_upscaler(steps: dict[str, list[dict[str, Any]]] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the settings of the product `upscaler` with its name and candidates; see `describe_project`."""
    tiled = {"kind": "tiling", "tile": 32, "overlap": 0.0, "window": "none"}
    candidates: dict[str, list[dict[str, Any]]] = {"doubled": []} | ({"tiled": [tiled]} if steps is None else steps)
    return {
        "name": "upscaler",
        "kind": "vision",
        "adapter": "upscaler/adapter.py",
        "reference": "doubled",
        "release": list(candidates)[1:],
        "candidates": {name: {"checkpoint": "upscaler/doubled", "steps": given} for name, given in candidates.items()},
        "serving": {"batch_size": 2, "num_threads": 1},
        "resources": {"num_workers": 1},
        "evals": {"views": {"kind": "upscaling", "evalset": "evalsets/views"}},
        "gate": {
            "alpha": 0.05,
            "on_inconclusive": "block",
            "tolerances": {
                "views/psnr_db": {"overall": 0.1},
                "views/seam_step_levels": {"overall": 0.5},
                "views/finite_output_rate": {"overall": 0.1},
            },
        },
    } | changes
