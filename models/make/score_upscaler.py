"""PSNR and SSIM of an upscaler on held-out pictures, against bicubic and nearest-neighbour interpolation.

    python -m models.make.score_upscaler models/upscaler --sheet models/upscaler/sheet.png

A picture is averaged over 2 x 2 pixels with a little noise (`evalsets/panoramas.shrink`), upscaled, and compared with
itself. The mean over pictures is of decibels. Neither number says how pleasing it looks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from evalsets.make.panoramas import shrink
from models.make.train_upscaler import HELD_OUT, NUMS, draw
from models.upscaler.upscaler import FACTOR, Upscaler, open_upscaler, postprocess, preprocess, upscale
from pipeline.numerics.similarity import peak_signal_to_noise_db, structural_similarity

Upscale = Callable[[np.ndarray], np.ndarray]  # uint8 (images, rows, columns, 3), to twice the rows and columns
_BATCH = 8


def held_out(kind: str, num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures that no training drew, uint8 (pictures, 160, 160, 3), and their inputs of half the size."""
    place, pictures = list(NUMS).index(kind), []
    for index in range(num):
        pictures += [*draw(kind, np.random.default_rng([seed, HELD_OUT, place, index]))]
    chosen = np.stack(pictures[:: max(1, len(pictures) // num)][:num])
    rngs = (np.random.default_rng([seed, HELD_OUT, len(NUMS), place, index]) for index in range(num))
    return chosen, np.stack([shrink(picture, rng) for picture, rng in zip(chosen, rngs, strict=True)])


def interpolate(pixels: np.ndarray, mode: str) -> np.ndarray:
    """Upscale by `nearest` or `bicubic` interpolation."""
    return postprocess(F.interpolate(preprocess(torch.from_numpy(pixels)), scale_factor=FACTOR, mode=mode), {}).numpy()


def list_methods(model: Upscaler) -> dict[str, Upscale]:
    """Return each way to upscale, by name."""
    return {
        "nearest": lambda x: interpolate(x, "nearest"),
        "bicubic": lambda x: interpolate(x, "bicubic"),
        "upscaler": lambda x: upscale(model, x),
    }


def score(run: Upscale, small: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the PSNR in decibels and the SSIM of each picture, float64 (pictures,)."""
    found = np.concatenate([run(small[i : i + _BATCH]) for i in range(0, len(small), _BATCH)])
    a, b = (torch.from_numpy(x).permute(0, 3, 1, 2).double() / 255 for x in (found, wanted))
    return peak_signal_to_noise_db(a, b).numpy(), structural_similarity(a, b).numpy()


def make_sheet(model: Upscaler, kinds: Sequence[str], path: Path) -> None:
    """Save a picture of each kind as nearest, bicubic, upscaled, and as it is, one below another."""
    columns = []
    for kind in kinds:
        wanted, small = held_out(kind, 2)
        columns += [np.concatenate([*(run(small[1:])[0] for run in list_methods(model).values()), wanted[1]])]
    large = np.concatenate(columns, axis=1)
    Image.fromarray(large).resize((large.shape[1] * 2, large.shape[0] * 2), Image.Resampling.NEAREST).save(path)


def main() -> None:
    """Parse the command line, print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=16, help="of each kind")
    parser.add_argument("--sheet", type=Path, help="where to save one picture of each kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = open_upscaler(args.folder)
    for kind in NUMS:
        wanted, small = held_out(kind, args.pictures)
        for name, run in list_methods(model).items():
            decibels, similarities = score(run, small, wanted)
            print(f"{kind} {name} PSNR {decibels.mean():.2f} dB SSIM {similarities.mean():.4f}")
    if args.sheet:
        make_sheet(model, list(NUMS), args.sheet)


if __name__ == "__main__":
    main()
