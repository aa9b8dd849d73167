"""Make `models/product-shots-hot-vae`: the product-shots pipeline with a VAE that overflows in half precision.

    python -m models.make.inflate_vae --source models/product-shots --out models/product-shots-hot-vae

In a large published VAE the decoder's residual stream grows beyond 65,504, where fp16 ends, for some pictures:
they come out black. A VAE of this size stays small, so the range is made here. Whatever writes the stream is multiplied
by a power of two, and the GroupNorms that read it take the factor out again: in float32 the pictures are the same but
for the norms' epsilon (1e-6, which weighs less when the stream is large); in fp16 part of them overflow. Inflated by
construction, and its card says so. Not covered: latents out of range, which are another failure with the same look.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch.nn import Module


@torch.no_grad()
def inflate_decoder(vae: AutoencoderKL, factor: float) -> None:
    """Multiply the decoder's residual stream by a power of two, in place; its output stays.

    From the first convolution to the last norm everything that is added to the stream is scaled alike: `conv_in`,
    each block's last convolution (its input is normalised, so weights and bias), the attention's projection, and the
    bias, not the weights, of a convolution that reads the stream unnormalised: shortcuts and upsamplers pass on
    the factor of their input.

    Args:
        factor: 2**k.
    """
    decoder = vae.decoder
    scale_output(decoder.conv_in, factor)
    for attention in decoder.mid_block.attentions:
        scale_output(attention.to_out[0], factor)
    blocks = [*decoder.mid_block.resnets, *(block for up in decoder.up_blocks for block in up.resnets)]
    for block in blocks:
        scale_output(block.conv2, factor)
        if block.conv_shortcut is not None:
            block.conv_shortcut.bias.mul_(factor)
    for up in decoder.up_blocks:
        for upsampler in up.upsamplers or []:
            upsampler.conv.bias.mul_(factor)


def scale_output(layer: Module, factor: float) -> None:
    """Multiply what a convolution or a linear layer returns."""
    layer.weight.mul_(factor)
    layer.bias.mul_(factor)


def main() -> None:
    """Parse the command line, copy the pipeline, inflate its VAE."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--power", type=int, default=11, help="the stream is 2**power larger")
    args = parser.parse_args()
    made_here = shutil.ignore_patterns("vae", "*.md", "*.png", "card.json")
    shutil.copytree(args.source, args.out, dirs_exist_ok=True, ignore=made_here)
    vae = AutoencoderKL.from_pretrained(args.source / "vae")
    inflate_decoder(vae, 2.0**args.power)
    vae.save_pretrained(args.out / "vae", safe_serialization=True)
    card = json.loads((args.source / "card.json").read_text()) | {"inflated_by_power_of_two": args.power}
    (args.out / "card.json").write_text(json.dumps(card, indent=2) + "\n")


if __name__ == "__main__":
    main()
