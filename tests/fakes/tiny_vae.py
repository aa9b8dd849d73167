"""Tiny AutoencoderKL models with random weights, and a way to inflate their decoder that leaves fp32 unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

LATENT_CHANNELS = 4


def build_vae(*, seed: int = 0, channels: tuple[int, ...] = (16, 32), layers: int = 1, **settings: Any) -> Any:
    """Build a VAE whose weights make every module matter; norms and biases are random too."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(seed)
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=layers,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=32,
        **settings,
    ).eval()
    with torch.no_grad():
        for parameter in vae.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return vae


def draw_latents(n: int = 2, size: int = 8, *, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, LATENT_CHANNELS, size, size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def inflate_decoder(vae: Any, factor: float, *, inner: float = 1.0) -> Any:
    """Multiply the whole residual stream, and the output of each conv1, with powers of two.

    Shortcuts and upsamplers keep their weights, because all of the stream grows alike; their biases grow.
    """
    for name, module in vae.decoder.named_modules():
        leaf = name.rpartition(".")[2]
        if name == "conv_in" or leaf == "conv2" or name.endswith("to_out.0"):
            module.weight.mul_(factor)
            module.bias.mul_(factor)
        elif leaf in ("conv_shortcut", "conv") and module.bias is not None:
            module.bias.mul_(factor)
        elif leaf == "conv1":
            module.weight.mul_(inner)
            module.bias.mul_(inner)
    return vae
