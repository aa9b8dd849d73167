"""What tiles do to decoded images: seams and likeness to the decode in one piece, by overlap and window.

Mosaics of rendered product shots, 736 pixels wide, encoded by the reference's VAE (params.yaml, product `shots`),
then decoded in float32 in one piece and in tiles of 64. At this size every overlap is met exactly by evenly spaced
tiles, and tile boundaries lie inside the shots. Prints the excess of the mean step at tile boundaries over the decode
in one piece in grey levels, the seam score of the set (robust z of the boundaries against other columns of the same
phase; pipeline/numerics/seams.py), SSIM, PSNR, and how often a pixel is decoded.

    python -m benchmarks.tiling [--images 4]

Not covered: memory; tiles of the denoising loop.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from evalsets.make.shots import SIZE, all_shots, render
from pipeline.numerics.saturation import to_unit_range
from pipeline.numerics.seams import measure_seams, seam_excess, signed_steps
from pipeline.numerics.similarity import peak_signal_to_noise_db, structural_similarity
from pipeline.products.images.rendering import decode_latents, list_stitches, load_pipeline
from pipeline.products.images.serving import sample_plainly
from pipeline.products.images.settings import ImagesProduct
from pipeline.products.params import get_product, load_params
from pipeline.records.serving import Tiling

WIDTH, TILE = 736, 64  # pixels; (WIDTH - TILE) is a multiple of what each overlap leaves of a tile
FACTOR = 4  # pixels a latent pixel
OVERLAPS = (0.125, 0.25, 0.5)


def make_mosaic(seed: int) -> torch.Tensor:
    """Return shots side by side, cut off tile boundaries: (3, 736, 736) in [-1, 1]."""
    rng = np.random.default_rng(seed)
    shots, num = all_shots(), -(-WIDTH // SIZE) + 1
    chosen = rng.integers(len(shots), size=(num, num))
    rows = [np.concatenate([render(shots[i], rng) for i in row], axis=1) for row in chosen]
    cut = np.concatenate(rows)[SIZE // 2 :][:WIDTH, SIZE // 2 :][:, :WIDTH]
    return torch.from_numpy(cut.copy()).permute(2, 0, 1).float() / 127.5 - 1


@torch.inference_mode()
def main() -> None:
    """Print one row per overlap and window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--product", default="shots")
    options = parser.parse_args()
    count = options.images
    product = get_product(load_params(), options.product, kind=ImagesProduct)
    vae = load_pipeline(Path(product.candidates[product.reference].checkpoint), sample_plainly(product)).vae
    mosaics = torch.stack([make_mosaic(seed) for seed in range(count)])
    latents = vae.encode(mosaics).latent_dist.mode() * vae.config.scaling_factor
    whole = to_unit_range(decode_latents(vae, latents)).clamp(0, 1)
    print(f"{count} images of {WIDTH} pixels, tiles of {TILE}\n")
    print("| overlap | window | excess step, levels | seam z | seam ratio | SSIM | PSNR, dB | decodes per pixel |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    settings = [(0.0, "none")] + [(overlap, window) for overlap in OVERLAPS for window in ("linear", "hann")]
    for overlap, window in settings:
        tiling = Tiling(tile=TILE, overlap=overlap, window=window)  # type: ignore[arg-type]
        image = to_unit_range(decode_latents(vae, latents, tiling)).clamp(0, 1)
        columns, rows = list_stitches(vae, latents, tiling)
        guard = min(8, max(1, int(overlap * TILE / 2)))  # more would leave too few columns to compare with
        seams = measure_seams(signed_steps(image), columns, period=FACTOR, guard=guard)
        decodes = (len(columns) + 1) * (len(rows) + 1) * TILE**2 / WIDTH**2
        print(
            f"| {overlap:.1%} | {window} | {255 * seam_excess(image, whole, columns, rows, period=FACTOR).mean():+.2f} "
            f"| {seams.z:.1f} | {seams.seam_ratio:.2f} | {structural_similarity(image, whole).mean():.4f} "
            f"| {peak_signal_to_noise_db(image, whole).clamp(max=100).mean():.1f} | {decodes:.2f} |"
        )


if __name__ == "__main__":
    main()
