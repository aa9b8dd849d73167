"""ResNet-50, Stable Diffusion 1.5's U-Net and a small MLP with random weights, and what a call of each takes.

Speed needs no trained weights; quality does, and is not covered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_timing import Run

NUM_CLASSES = 1000
UNET_CONFIG: dict[str, Any] = {  # of stable-diffusion-v1-5/stable-diffusion-v1-5; its block types are the defaults
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280, 1280),
    "attention_head_dim": 8,
    "cross_attention_dim": 768,
}
# the same code paths in a second
TINY_UNET = UNET_CONFIG | {"sample_size": 16, "block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}
TINY_RESNET: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 16, 16, 16], "depths": [1, 1, 1, 1]}
NUM_TOKENS = 77  # of a prompt
WIDTH = 256  # of the MLP


@dataclass(frozen=True)
class Network:
    """How a network is built and called, and how often it is timed."""

    title: str
    build: Callable[[bool], nn.Module]  # tiny or not
    make_arguments: Callable[[int, bool], dict[str, torch.Tensor]]  # batch; on the CPU, float32
    block_passes: int  # timed in one go, before another setting has its turn
    output: str | None = None  # name of the tensor in what a call returns


def build_resnet(tiny: bool) -> nn.Module:
    """Build ResNet-50 (He et al. 2015, arXiv:1512.03385) with its classifier."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=NUM_CLASSES, **(TINY_RESNET if tiny else {})))


def build_unet(tiny: bool) -> nn.Module:
    """Build the U-Net of Stable Diffusion 1.5."""
    from diffusers import UNet2DConditionModel
    from diffusers.utils import logging

    logging.set_verbosity_error()  # it warns of a cast that concerns no module here
    return UNet2DConditionModel(**(TINY_UNET if tiny else UNET_CONFIG))


def build_mlp(tiny: bool) -> nn.Module:
    """Build three linear layers with ReLU between them."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    )


def make_unet_arguments(batch: int, tiny: bool) -> dict[str, torch.Tensor]:
    """Return latents, a time step and the prompts' tokens."""
    config = TINY_UNET if tiny else UNET_CONFIG
    return {
        "sample": draw(batch, 4, config["sample_size"], config["sample_size"]),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": draw(batch, NUM_TOKENS, config["cross_attention_dim"]),
    }


def draw(*shape: int) -> torch.Tensor:
    """Draw normal values, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


NETWORKS = {
    "resnet": Network(
        "ResNet-50",
        build_resnet,
        lambda batch, tiny: {"pixel_values": draw(batch, 3, *(32 if tiny else 224,) * 2)},
        50,
        "logits",
    ),
    "unet": Network("SD 1.5 U-Net", build_unet, make_unet_arguments, 10, "sample"),
    "mlp": Network("MLP", build_mlp, lambda batch, tiny: {"input": draw(batch, WIDTH)}, 50),
}


class Bench:
    """One network at one batch size in one number format, on a GPU where there is one."""

    def __init__(self, network: str, batch: int, dtype: torch.dtype, *, tiny: bool) -> None:
        self.network, self.dtype = NETWORKS[network], dtype
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tiny = tiny
        arguments = self.network.make_arguments(batch, tiny)
        self.arguments = {
            name: value.to(self.device, dtype if value.is_floating_point() else None)
            for name, value in arguments.items()
        }

    def build(self, layout: str) -> nn.Module:
        """Build it with weights that are the same each time; NHWC is channels last."""
        torch.manual_seed(0)
        with torch.device(self.device):
            module = self.network.build(self.tiny)
        module = module.to(self.dtype).eval().requires_grad_(False)
        return module.to(memory_format=torch.channels_last) if layout == "NHWC" else module

    def bind(self, call: Callable[..., Any], layout: str) -> Run:
        """Return what calls a network once, on pixels or latents in the layout of its weights."""
        arguments = {
            name: value.contiguous(memory_format=torch.channels_last)
            if layout == "NHWC" and value.dim() == 4
            else value
            for name, value in self.arguments.items()
        }

        def run() -> torch.Tensor:
            found = call(**arguments)
            output: torch.Tensor = found if self.network.output is None else found[self.network.output]
            return output

        return run
