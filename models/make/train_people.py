"""Train `models/people`, a small detector of people in street scenes.

    python -m models.make.train_people --out models/people

Everything is drawn from seeds: the scenes (`evalsets/make/scenes.py`), the weights, the order. A person belongs to the
level of his size; one within a factor of 1.5 of a bound may be found by the next level too, and neither is
taught otherwise. Focal loss for centres (Zhou et al. 2019, arXiv:1904.07850, eq. 1) and GIoU for boxes (Rezatofighi
et al. 2019, arXiv:1902.09630), in bfloat16 on a GPU. At the end the norms are folded into the convolutions, so the
shipped model has none. Minutes on a GPU, hours on a CPU. `python -m models.make.score_people` says how good it is.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from evalsets.make.scenes import MEDIUM_AREA, SIZE, SMALL_AREA, render
from models.make.saving import save_network
from models.people.detector import LEVELS, STRIDES, Detector, preprocess, to_corners

CONFIG = {
    "size": SIZE,
    "stem": 16,
    "widths": [48, 80, 128],
    "depth": 2,
    "pyramid": 48,
    "branch_depth": 3,
    "min_score": 0.02,
    "max_overlap": 0.6,
    "max_candidates": 300,
}
MAX_PEOPLE = 13  # in a scene
TRAIN, HELD_OUT = 0, 1  # splits of the scenes
_BOUNDS = ((0, SMALL_AREA), (SMALL_AREA, MEDIUM_AREA), (MEDIUM_AREA, SIZE * SIZE))  # areas of each level
_LENIENT = 1.5  # how far outside of its bounds a level may find someone
_SPREAD = 0.15  # standard deviation of a centre's bump, in sides of the box


def render_all(num: int, split: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Render scenes on all cores.

    Returns:
        uint8 (scenes, 320, 320, 3), and corners in pixels, float32 (scenes, 13, 4), NaN where there is nobody.
    """
    with multiprocessing.get_context("spawn").Pool() as pool:
        scenes = pool.map(_render_one, [(seed, split, index) for index in range(num)], chunksize=16)
    return torch.from_numpy(np.stack([p for p, _ in scenes])), torch.from_numpy(np.stack([c for _, c in scenes]))


def _render_one(key: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    scene, corners = render(np.random.default_rng(key)), np.full((MAX_PEOPLE, 4), np.nan, dtype=np.float32)
    corners[: len(scene.boxes)] = np.concatenate([scene.boxes[:, :2], scene.boxes[:, :2] + scene.boxes[:, 2:]], axis=1)
    return scene.pixels, corners


def augment(x: torch.Tensor, corners: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mirror half of the images, and change light and tint a little."""
    is_mirrored = torch.rand(len(x), 1, 1, device=x.device) < 0.5
    mirrored = corners[..., [2, 1, 0, 3]] * corners.new_tensor([-1, 1, -1, 1]) + corners.new_tensor([SIZE, 0, SIZE, 0])
    x = torch.where(is_mirrored[..., None], x.flip(3), x)
    gain = 1 + 0.15 * torch.randn(len(x), 3, 1, 1, device=x.device) * torch.rand(len(x), 1, 1, 1, device=x.device)
    return (x + 2) * gain - 2, torch.where(is_mirrored, mirrored, corners)


def loss_of(outputs: list[torch.Tensor], corners: torch.Tensor) -> torch.Tensor:
    """Return the sum of all levels' losses, per person."""
    sides = corners[..., 2:] - corners[..., :2]
    areas = sides.prod(-1)
    losses = [
        _level_loss(out.float(), stride, corners, areas, bounds)
        for out, stride, bounds in zip(outputs, STRIDES, _BOUNDS, strict=True)
    ]
    return torch.stack(losses).sum() / (~areas.isnan()).sum().clamp(min=1)


def _level_loss(
    output: torch.Tensor, stride: int, corners: torch.Tensor, areas: torch.Tensor, bounds: tuple[int, int]
) -> torch.Tensor:
    low, high = bounds
    bumps = _bumps(output.shape[2:], stride, corners)
    is_own = (areas > low) & (areas <= high)
    is_near = (areas > low / _LENIENT) & (areas <= high * _LENIENT) & ~is_own
    heat, owner = (bumps * is_own[..., None, None]).max(dim=1)
    is_open = (bumps * is_near[..., None, None]).amax(dim=1) > 0.1
    confidence = output[:, 0]
    is_centre = heat == 1
    missed = F.softplus(-confidence) * torch.sigmoid(-confidence) ** 2
    false = F.softplus(confidence) * torch.sigmoid(confidence) ** 2 * (1 - heat) ** 4
    centres = torch.where(is_centre, missed, torch.where(is_open, 0, false)).sum()
    wanted = torch.gather(corners.nan_to_num(), 1, owner.flatten(1)[..., None].expand(-1, -1, 4))
    weight = heat.flatten(1) * (heat.flatten(1) > 0.3)
    found = to_corners(output[:, 1:], stride).flatten(2).transpose(1, 2)
    norm = bumps.new_ones(()) * weight.sum() / is_centre.sum().clamp(min=1)  # cells per person
    return centres + 2 * (weight * (1 - _giou(found, wanted))).sum() / norm.clamp(min=1)


def _bumps(shape: torch.Size, stride: int, corners: torch.Tensor) -> torch.Tensor:
    """Return each person's bump over the cells, 1 in the cell of his centre, (images, people, rows, columns)."""
    filled = corners.nan_to_num(-1e6)
    centre, side = (filled[..., :2] + filled[..., 2:]) / 2 / stride, (filled[..., 2:] - filled[..., :2]) / stride
    x, y = (torch.arange(n, device=corners.device) for n in (shape[1], shape[0]))
    away_x = (x - centre[..., :1].floor()) / (_SPREAD * side[..., :1]).clamp(min=0.4)
    away_y = (y - centre[..., 1:].floor()) / (_SPREAD * side[..., 1:]).clamp(min=0.4)
    return torch.exp(-(away_y[..., :, None] ** 2 + away_x[..., None, :] ** 2) / 2)


def _giou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    common = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1).clamp(min=1e-6)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - common
    return common / union.clamp(min=1e-6) - (hull - union) / hull


def train(pixels: torch.Tensor, corners: torch.Tensor, *, steps: int, batch: int, lr: float, device: str) -> Detector:
    """Train with AdamW, warm-up and cosine decay; returns the detector in training form."""
    model = Detector(CONFIG, has_norm=True).to(device, memory_format=torch.channels_last).train()
    for branch in model.branches.values():
        nn.init.constant_(branch[-1].bias[:1], -4)  # hardly a cell holds a centre
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.02)
    pixels, corners, start = pixels.to(device), corners.to(device), time.time()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 300, 0.5 * (1 + math.cos(math.pi * step / steps)))
        chosen = torch.randint(len(pixels), (batch,), device=device)
        x, wanted = augment(preprocess(pixels[chosen]), corners[chosen])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            outputs = model(x.contiguous(memory_format=torch.channels_last))
        loss = loss_of(outputs, wanted)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if step % 500 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} seconds {time.time() - start:.0f}", flush=True)
    return model.eval()


def fold(trained: Detector) -> Detector:
    """Return the same detector with each BatchNorm folded into the convolution before it, on the CPU."""
    trained, folded = trained.to("cpu", memory_format=torch.contiguous_format).eval(), Detector(trained.config).eval()
    state: dict[str, torch.Tensor] = {}
    for name, module in trained.named_modules():
        if isinstance(module, nn.Sequential) and len(module) == 3 and isinstance(module[1], nn.BatchNorm2d):
            fused = fuse_conv_bn_eval(module[0], module[1])
            state |= {f"{name}.0.{key}": value for key, value in fused.state_dict().items()}
        elif isinstance(module, nn.Conv2d) and module.bias is not None:
            state |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
    folded.load_state_dict(state)
    return folded


def main() -> None:
    """Parse the command line, train, fold, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenes", type=int, default=8192, help="training scenes")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    pixels, corners = render_all(args.scenes, TRAIN, args.seed)
    print(f"{len(pixels)} scenes, {int((~corners[..., 0].isnan()).sum())} people", flush=True)
    model = fold(train(pixels, corners, steps=args.steps, batch=args.batch, lr=args.lr, device=device))
    print(f"{sum(p.numel() for p in model.parameters())} parameters in {len(LEVELS)} levels", flush=True)
    save_network(
        model,
        args.out,
        {k: v for k, v in vars(args).items() if k != "out"} | {"device": device, "torch": torch.__version__},
    )


if __name__ == "__main__":
    main()
