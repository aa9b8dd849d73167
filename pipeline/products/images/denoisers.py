"""What differs between pipelines by the model that denoises: a U-Net, or the transformer of Flux or Stable Diffusion 3.

Everything else says `denoiser` and asks here. Free of torch and diffusers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Part = Literal["unet", "transformer"]
GUIDANCE_WIDTH = "time_cond_proj_dim"  # of the config of a U-Net that was distilled to take guidance as an input
_CLIPS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


@dataclass(frozen=True)
class Denoiser:
    """How diffusers runs the pipelines of one class."""

    part: Part  # the component that denoises
    needed: tuple[str, ...]  # components without which it draws nothing
    size: int | None = None  # of the latents it draws, a side; None: its config says it
    packed: int = 1  # latent pixels a side that make one token
    normalizes_latents: bool = False  # by the VAE's latents_mean and latents_std
    shifts_latents: bool = False  # by the VAE's shift_factor
    scheduler: str | None = None  # the only one; None: any that fits a U-Net
    # a second pass without the prompt guides, and is rescaled to the first; or guides alone; or guidance is an input
    guidance: Literal["rescaled", "plain", "input"] = "rescaled"
    scale: float = 5.0  # of guidance that a new product starts with, where there is any
    t5: tuple[str, str] | None = None  # its text encoder and tokenizer that read longer prompts than CLIP does
    max_tokens: int | None = None  # of a prompt, that these read

    def list_needed(self, parts: Collection[str]) -> tuple[str, ...]:
        """Name the components that must be there, beside those that are: beside a T5 its tokenizer."""
        return self.needed + (self.t5 if self.t5 and self.t5[0] in parts else ())

    def count_channels(self, in_channels: int) -> int:
        """Return the channels of latents that the denoiser takes."""
        return in_channels // self.packed**2

    def takes_guidance(self, config: Mapping[str, Any]) -> bool:
        """Say whether a guidance scale changes anything, by the denoiser's config."""
        return self.guidance != "input" or bool(config.get("guidance_embeds") or config.get(GUIDANCE_WIDTH))

    def build_options(self, guidance: Mapping[str, float]) -> dict[str, Any]:
        """Return the arguments of a call that not every class of pipeline knows.

        Args:
            guidance: its scale and rescale.
        """
        rescale = {"guidance_rescale": guidance["rescale"]} if self.guidance == "rescaled" else {}
        return rescale | ({"max_sequence_length": self.max_tokens} if self.max_tokens else {})


_FLOW = "FlowMatchEulerDiscreteScheduler"
DENOISERS = {
    "StableDiffusionPipeline": Denoiser("unet", ("unet", "vae", "scheduler")),
    "StableDiffusionXLPipeline": Denoiser("unet", ("unet", "vae", "scheduler"), normalizes_latents=True),
    "FluxPipeline": Denoiser(
        "transformer",
        ("transformer", "vae", "scheduler", *_CLIPS),
        size=128,
        packed=2,
        shifts_latents=True,
        scheduler=_FLOW,
        guidance="input",
        scale=3.5,
        t5=("text_encoder_2", "tokenizer_2"),
        max_tokens=512,
    ),
    "StableDiffusion3Pipeline": Denoiser(
        "transformer",
        ("transformer", "vae", "scheduler", *_CLIPS),
        shifts_latents=True,
        scheduler=_FLOW,
        guidance="plain",
        t5=("text_encoder_3", "tokenizer_3"),
        max_tokens=256,
    ),
}


def read_latent_size(pipe: Any) -> int:
    """Return the size of the latents that a loaded pipeline draws, a side."""
    denoiser, module = find_denoiser(pipe)
    return int(denoiser.size or module.config.sample_size)


def find_denoiser(pipe: Any) -> tuple[Denoiser, Any]:
    """Return what a loaded pipeline denoises by: how it is run, and the module."""
    denoiser = DENOISERS[type(pipe).__name__]
    return denoiser, getattr(pipe, denoiser.part)
