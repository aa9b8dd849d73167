"""The upscaler as its owner's code has it: architecture, loading, and twice as many pixels a side.

    model = open_upscaler("models/upscaler")
    large = upscale(model, pixels)  # uint8 (images, rows, columns, 3), twice the rows and columns

`build`, `preprocess` and `postprocess` make it an adapter of kind vision (`pipeline/products/vision/adapters.py`).

Residual dense blocks with local and global fusion (Zhang et al. 2018, arXiv:1802.08797) and no norm; after each,
channel attention (RCAN: Zhang et al. 2018, arXiv:1807.02758): the mean of every channel over the whole input decides
how much the block adds. So a pixel depends on everything that was upscaled together with it, however far away. The
rest are 3x3 convolutions with zero padding, which see 28 pixels far. Training: `models/make/train_upscaler.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

FACTOR = 2  # output pixels per input pixel, along each side
_SLOPE = 0.2  # of the leaky ReLU where it is negative


class ChannelAttention(nn.Module):
    """Scale each channel by a factor in (0, 1) that the means of all channels decide."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, (images, channels, rows, columns), scaled."""
        mean = x.mean(dim=(2, 3), keepdim=True)
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(mean))))


class DenseBlock(nn.Module):
    """Convolutions that each see all before them, fused, attended to, and added to the input."""

    def __init__(self, channels: int, growth: int, *, num_layers: int, squeezed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(channels + i * growth, growth, 3, padding=1) for i in range(num_layers))  # fmt: skip
        self.fuse = nn.Conv2d(channels + num_layers * growth, channels, 1)
        self.attention = ChannelAttention(channels, squeezed) if squeezed else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of x, (images, channels, rows, columns)."""
        seen = x
        for layer in self.layers:
            seen = torch.cat([seen, F.leaky_relu(layer(seen), _SLOPE)], dim=1)
        return x + self.attention(self.fuse(seen))


class Upscaler(nn.Module):
    """Prepared pixels to twice as many a side."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Build it untrained; config is what config.json holds, and `squeezed` 0 leaves channel attention out."""
        super().__init__()
        self.config = config
        channels, blocks, wide = config["channels"], config["blocks"], config["channels_upscaled"]
        self.head = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            DenseBlock(channels, config["growth"], num_layers=config["layers"], squeezed=config["squeezed"])
            for _ in range(blocks))  # fmt: skip
        self.fuse = nn.Sequential(
            nn.Conv2d(blocks * channels, channels, 1), nn.Conv2d(channels, channels, 3, padding=1))  # fmt: skip
        self.widen = nn.Conv2d(channels, wide * FACTOR**2, 3, padding=1)
        self.to_pixels = nn.Conv2d(wide, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (images, 3, 2 * rows, 2 * columns); x is (images, 3, rows, columns), from `preprocess`."""
        return self.to_pixels(self.find_features(x))

    def find_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last convolution makes pixels of, (images, channels, 2 * rows, 2 * columns)."""
        x, found = self.head(x), []
        first = x
        for block in self.blocks:
            x = block(x)
            found.append(x)
        x = first + self.fuse(torch.cat(found, dim=1))
        return F.leaky_relu(F.pixel_shuffle(self.widen(x), FACTOR), _SLOPE)


def build_upscaler(config: dict[str, Any]) -> Upscaler:
    """Return an untrained one whose blocks add little at first, so that its depth does no harm."""
    model = Upscaler(config)
    for block in model.blocks:
        nn.init.normal_(block.fuse.weight, std=0.01)
    return model


def build(config: dict[str, Any]) -> Upscaler:
    """Return it untrained."""
    return Upscaler(config)


def open_upscaler(folder: Path | str) -> Upscaler:
    """Load config.json and model.safetensors, float32, ready to run."""
    model = Upscaler(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval()


def preprocess(pixels: torch.Tensor) -> torch.Tensor:
    """Return uint8 (images, rows, columns, 3) as float32 (images, 3, rows, columns) in [-0.5, 0.5]."""
    return pixels.permute(0, 3, 1, 2).float() / 255 - 0.5


def postprocess(outputs: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Return the network's output, (images, 3, rows, columns), as uint8 (images, rows, columns, 3)."""
    return ((outputs.float() + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


@torch.no_grad()
def upscale(model: Upscaler, pixels: np.ndarray) -> np.ndarray:
    """Return images of one size, uint8 (images, rows, columns, 3), with twice the rows and columns."""
    return postprocess(model(preprocess(torch.from_numpy(pixels))), model.config).numpy()
