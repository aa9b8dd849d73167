"""SDXL's U-Net and VAE at full shape with random weights, built from numbers, and what a call of each takes.

Speed, memory and number ranges by construction need no trained weights; quality does, and is not covered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_timing import Run

VAE_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "block_out_channels": (128, 256, 512, 512),
    "act_fn": "silu",
    "sample_size": 1024,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
UNET_CONFIG: dict[str, Any] = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
# the same code paths in a second
TINY_VAE = VAE_CONFIG | {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4, "layers_per_block": 1}
TINY_UNET = UNET_CONFIG | {
    "sample_size": 8,
    "block_out_channels": (32, 32, 32),
    "transformer_layers_per_block": (1, 1, 1),
    "attention_head_dim": (2, 2, 2),
    "layers_per_block": 1,
}

NUM_TOKENS = 77  # of a prompt
POOLED = 1280  # width of the pooled prompt


class Inputs:
    """Where to run, and what a call of each part takes; the values are the same in every number format."""

    def __init__(self, *, tiny: bool) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.configs = {"unet": TINY_UNET if tiny else UNET_CONFIG, "vae": TINY_VAE if tiny else VAE_CONFIG}
        generator = torch.Generator().manual_seed(0)
        size = self.configs["unet"]["sample_size"]
        self.latents = torch.randn(2, 4, size, size, generator=generator).to(self.device)
        self.text = torch.randn(2, NUM_TOKENS, 2048, generator=generator).to(self.device)
        self.pooled = torch.randn(2, POOLED, generator=generator).to(self.device)
        self.time_ids = torch.tensor([[1024.0, 1024, 0, 0, 1024, 1024]] * 2).to(self.device)

    def build(self, part: str, dtype: torch.dtype) -> Any:
        """Build a part with random weights, the same in every number format but for rounding."""
        from diffusers import AutoencoderKL, UNet2DConditionModel

        torch.manual_seed(0)
        with torch.device(self.device):  # billions of weights are drawn in a second there
            made = (UNet2DConditionModel if part == "unet" else AutoencoderKL)(**self.configs[part])
        return made.to(dtype).eval().requires_grad_(False)

    def bind(self, part: str, model: Any, *, call: Callable[..., Any] | None = None, tf32: bool = True) -> Run:
        """Return what runs a part once: `call`, or the U-Net, or the VAE's decode; latents come with channels first."""
        dtype = model.dtype
        latents, text, pooled, time_ids = (x.to(dtype) for x in (self.latents, self.text, self.pooled, self.time_ids))
        step = torch.tensor(500, device=self.device)
        more = {"encoder_hidden_states": text, "added_cond_kwargs": {"text_embeds": pooled, "time_ids": time_ids}}
        arguments = (latents, step) if part == "unet" else (latents[:1],)
        named = {"return_dict": False} | (more if part == "unet" else {})
        if call is None:
            call = model if part == "unet" else model.decode

        def run() -> torch.Tensor:
            torch.backends.cudnn.allow_tf32 = tf32
            return call(*arguments, **named)[0]

        return run
