"""Train `models/upscaler`, which doubles the sides of a picture.

    python -m models.make.train_upscaler --out models/upscaler

Everything is drawn from seeds: the pictures, the weights, the order. A picture is 160 pixels a side: a crop of a
panorama (`evalsets/make/panoramas.py`), a sheet of edges and writing (`textures.py`), a product shot drawn that large
(`shots.py`), or a street scene at half size, where its camera's noise is less (`scenes.py`). The input is its mean
over 2 x 2 pixels or a bicubic reduction, in turn, with a little noise, in eight bits. Mean absolute error, bfloat16 on
a GPU but for the last convolution. Minutes on a GPU, hours on a CPU. `python -m models.make.score_upscaler` says how
good it is.
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

from evalsets.make import panoramas, scenes, textures
from evalsets.make.shots import all_shots
from evalsets.make.shots import render as render_shot
from models.make.saving import save_network
from models.upscaler.upscaler import Upscaler, build_upscaler, preprocess

CONFIG = {"channels": 64, "growth": 16, "layers": 4, "blocks": 6, "squeezed": 16, "channels_upscaled": 32}
SIZE = 160  # pixels a side of a picture
NUMS = {"panoramas": 128, "sheets": 3000, "shots": 800, "scenes": 1200}  # drawn for training
TRAIN, HELD_OUT = 0, 1  # splits of the pictures
MAX_NOISE = 0.02  # standard deviation of the input's noise, at most, in [0, 1] of full scale
_CROP = 128  # pixels a side that a step sees of a picture
_CROPS_PER_PANORAMA = 32


def draw(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Draw pictures of a kind: one, or the crops of one panorama.

    Returns:
        uint8 (pictures, 160, 160, 3), RGB.
    """
    if kind == "panoramas":
        large = panoramas.render(rng)
        corners = rng.integers(0, np.array(large.shape[:2]) - SIZE, size=(_CROPS_PER_PANORAMA, 2))
        return np.stack([large[top : top + SIZE, left : left + SIZE] for top, left in corners])
    if kind == "sheets":
        return textures.draw_sheet(rng, SIZE)[None]
    if kind == "shots":
        listed = all_shots()
        return render_shot(listed[rng.integers(len(listed))], rng, size=SIZE)[None]
    return panoramas.shrink(scenes.render(rng).pixels, rng, noise=0)[None]


def draw_all(nums: dict[str, int], split: int, seed: int) -> torch.Tensor:
    """Draw so many of each kind on all cores; returns uint8 (pictures, 160, 160, 3)."""
    keys = [(kind, [seed, split, place, i]) for place, (kind, num) in enumerate(nums.items()) for i in range(num)]
    with multiprocessing.get_context("spawn").Pool() as pool:
        return torch.from_numpy(np.concatenate(pool.map(_draw_one, keys, chunksize=4)))


def _draw_one(key: tuple[str, list[int]]) -> np.ndarray:
    return draw(key[0], np.random.default_rng(key[1]))


def augment(pixels: torch.Tensor) -> torch.Tensor:
    """Crop, mirror and turn a batch, uint8 (pictures, 160, 160, 3), the same way for all of it."""
    top, left = torch.randint(SIZE - _CROP + 1, (2,)).tolist()
    pixels = pixels[:, top : top + _CROP, left : left + _CROP]
    flips = [dim for dim in (1, 2) if torch.rand(()) < 0.5]
    pixels = pixels.flip(flips) if flips else pixels
    return pixels.transpose(1, 2) if torch.rand(()) < 0.5 else pixels


def degrade(wanted: torch.Tensor) -> torch.Tensor:
    """Return what the upscaler is given, half as large, from what it shall return; both as of `preprocess`.

    Even pictures are averaged, odd ones reduced by an anti-aliased bicubic filter; each has its own level of noise.
    """
    mean = F.avg_pool2d(wanted, 2)
    cubic = F.interpolate(wanted, scale_factor=0.5, mode="bicubic", antialias=True)
    is_even = (torch.arange(len(wanted), device=wanted.device) % 2 == 0).view(-1, 1, 1, 1)
    level = MAX_NOISE * torch.rand(len(wanted), 1, 1, 1, device=wanted.device)
    small = torch.where(is_even, mean, cubic) + level * torch.randn_like(mean)
    return ((small + 0.5).clamp(0, 1) * 255).round() / 255 - 0.5


def train(pixels: torch.Tensor, *, config: dict[str, int], steps: int, batch: int, lr: float, device: str) -> Upscaler:
    """Train with Adam, warm-up and cosine decay; pixels are uint8 (pictures, 160, 160, 3)."""
    model = build_upscaler(config).to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.99))
    pixels, start = pixels.to(device), time.time()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 300, 0.5 * (1 + math.cos(math.pi * step / steps)))
        wanted = preprocess(augment(pixels[torch.randint(len(pixels), (batch,), device=device)]))
        x = degrade(wanted).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            features = model.find_features(x)
        loss = (model.to_pixels(features.float()) - wanted).abs().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step % 500 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.5f} seconds {time.time() - start:.0f}", flush=True)
    return model.to("cpu", memory_format=torch.contiguous_format).eval()


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--squeezed", type=int, default=CONFIG["squeezed"], help="channel attention; 0 leaves it out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    pixels = draw_all(NUMS, TRAIN, args.seed)
    print(f"{len(pixels)} pictures", flush=True)
    model = train(
        pixels,
        config=CONFIG | {"squeezed": args.squeezed},
        steps=args.steps,
        batch=args.batch,
        lr=args.lr,
        device=device,
    )
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    save_network(
        model,
        args.out,
        {k: v for k, v in vars(args).items() if k != "out"} | {"device": device, "torch": torch.__version__},
    )


if __name__ == "__main__":
    main()
