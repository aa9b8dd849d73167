"""What watching every module of a decoder costs, in CPU time of the decode.

    python -m benchmarks.activation_watch_cost [--rounds 16] [--every 1]
    python -m benchmarks.activation_watch_cost --sdxl        SDXL's decoder; 1024 px on a GPU, 128 px on a CPU

Decodes the same latents with and without `ActivationWatch`, in pairs whose order alternates, on decoders
with random weights: one as small as the images here are (64 px) and a wider one, or SDXL's own shape. Prints
the median ratio of CPU seconds (on a GPU of synchronised seconds), its quartiles, and the ratio of the sums
(with `--every` that one counts: most rounds are cheap). One thread; nothing of `build/` is read.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.sdxl_models import VAE_CONFIG
from pipeline.numerics.activation_watch import ActivationWatch

# channels of each stage, latent size, latents in a batch
SHAPES = (((16, 32, 48), 16, 4), ((16, 32, 48), 32, 1), ((64, 128, 128), 32, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main(argv: list[str]) -> int:
    """Time each decoder in each dtype and layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--every", type=int, default=1, help="read the inner modules on every n-th run")
    parser.add_argument("--sdxl", action="store_true", help="SDXL's decoder alone")
    settings = parser.parse_args(argv)
    torch.set_num_threads(1)
    device = "cuda" if settings.sdxl and torch.cuda.is_available() else "cpu"
    sdxl = (VAE_CONFIG["block_out_channels"], 128 if device == "cuda" else 16, 1)
    for channels, size, num_latents in (sdxl,) if settings.sdxl else SHAPES:
        for dtype in DTYPES[: 2 if settings.sdxl and device == "cpu" else 3]:
            for memory_format in (torch.contiguous_format, torch.channels_last):
                vae = build_vae(channels, is_sdxl=settings.sdxl).to(device, dtype, memory_format=memory_format)
                latents = torch.randn(num_latents, 4, size, size).to(device, dtype)
                pairs = time_pairs(vae, latents, settings.rounds, settings.every)
                low, middle, high = statistics.quantiles([watched / plain for watched, plain in pairs], n=4)
                mean = sum(watched for watched, _ in pairs) / sum(plain for _, plain in pairs)
                plain = statistics.median(plain for _, plain in pairs)
                name = f"{channels}, {num_latents} x {size * 2 ** (len(channels) - 1)} px, {dtype}, {memory_format}"
                print(
                    f"{name}: {plain * 1e3:.1f} ms, "
                    f"watched {middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%}), all rounds {mean - 1:+.1%}"
                )
    return 0


def build_vae(channels: tuple[int, ...], *, is_sdxl: bool) -> Any:
    """Build an AutoencoderKL with random weights."""
    from diffusers import AutoencoderKL

    if is_sdxl:
        return AutoencoderKL(**VAE_CONFIG).eval()
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        layers_per_block=1,
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        norm_num_groups=8,
    ).eval()


def time_pairs(vae: Any, latents: torch.Tensor, rounds: int, every: int) -> list[tuple[float, float]]:
    """Return (watched, plain) CPU seconds of one decode, first and second in turn."""
    watch = ActivationWatch(vae.decoder, every=every)
    time_decode(vae, latents)
    pairs = []
    for i in range(rounds):
        if i % 2:
            plain = time_decode(vae, latents)
        with watch:
            watched = time_decode(vae, latents)
        if not i % 2:
            plain = time_decode(vae, latents)
        pairs.append((watched, plain))
    return pairs


@torch.no_grad()
def time_decode(vae: Any, latents: torch.Tensor) -> float:
    """Return the CPU seconds of one decode; on a GPU its seconds between two synchronisations."""
    if not latents.is_cuda:
        start = time.process_time()
        vae.decode(latents)
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    vae.decode(latents)
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
