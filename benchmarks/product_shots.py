"""What `models/product-shots` is worth, and what classifier-free guidance does to it.

    python -m benchmarks.product_shots                                held-out quality, at guidance 5
    python -m benchmarks.product_shots --guidance 5 9 12 15 --rescale 0 0.7
    python -m benchmarks.product_shots --sheet sheet.png              a picture of each 5th prompt as well

Prompts and seeds are those of `evalsets/shots`; one line of JSON for each setting. A pixel is saturated
when some channel of it is above 0.97 after clamping. CLIP similarity is the cosine of a picture with its own prompt
in `models/product-shots-clip`, which was trained on the same captions: it says whether the picture shows what was asked
for, nothing about taste.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image
from transformers import CLIPModel, CLIPTokenizer

from evalsets.make.shots import all_shots, caption
from models.make.train_product_shots import HELD_OUT, render_all, to_signal, tokenize
from pipeline.evalsets.cards import load_evalset

SATURATED = 0.97  # level above which a channel counts, in [0, 1]
OVERSATURATED = 0.05  # share of saturated pixels above which a picture counts
_BATCH = 48


@torch.no_grad()
def measure_models(pipe: StableDiffusionXLPipeline, clip: CLIPModel, ids: torch.Tensor, seed: int) -> dict[str, float]:
    """Return the autoencoder's and the CLIP's quality on pictures that were not trained on, four of each caption."""
    pictures = render_all(4, HELD_OUT, seed).to(pipe.device)
    errors, right, similar = [], 0, []
    for k in range(pictures.shape[1]):
        x = to_signal(pictures[:, k])
        decoded = pipe.vae.decode(pipe.vae.encode(x).latent_dist.mode()).sample.clamp(-1, 1)
        errors.append(((decoded - x) / 2).square().mean(dim=(1, 2, 3)))
        cosine = similarity(clip, ids, x)
        right += int((cosine.argmax(dim=1) == torch.arange(len(x), device=x.device)).sum())
        similar.append(cosine.diagonal())
    signal = pictures.float() / 255
    return {
        "vae_psnr_db": float(-10 * torch.cat(errors).log10().mean()),
        "clip_top1": right / (len(pictures) * pictures.shape[1]),
        "clip_similarity": float(torch.cat(similar).mean()),
        "saturated_pixel_fraction": float((signal > SATURATED).any(dim=2).float().mean()),
    }


def similarity(clip: CLIPModel, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each picture, float in [-1, 1], with each caption; (pictures, captions)."""
    found = clip(input_ids=ids, pixel_values=x)
    return found.image_embeds @ found.text_embeds.T


@torch.no_grad()
def draw(
    pipe: StableDiffusionXLPipeline, cases: list[Any], guidance: float, rescale: float, steps: int
) -> torch.Tensor:
    """Return the pictures of all cases, float32 (cases, 3, 64, 64) in [0, 1], each from its own seed."""
    parts = []
    for start in range(0, len(cases), _BATCH):
        part = cases[start : start + _BATCH]
        parts.append(
            pipe(
                prompt=[case.prompt for case in part],
                num_inference_steps=steps,
                guidance_scale=guidance,
                guidance_rescale=rescale,
                output_type="pt",
                generator=[torch.Generator().manual_seed(case.seed) for case in part],
            ).images
        )
    return torch.cat(parts).float()


@torch.no_grad()
def measure(pictures: torch.Tensor, clip: CLIPModel, own: torch.Tensor, finite: torch.Tensor) -> dict[str, float]:
    """Return saturation and similarity of drawn pictures."""
    saturated = (pictures > SATURATED).any(dim=1).float().mean(dim=(1, 2))
    found = clip(input_ids=own, pixel_values=pictures * 2 - 1)
    return {
        "saturated_pixel_fraction": float(saturated.mean()),
        "oversaturated_share": float((saturated > OVERSATURATED).float().mean()),
        "clip_similarity": float((found.image_embeds * found.text_embeds).sum(dim=1).mean()),
        "nonfinite_share": float((~finite).float().mean()),
    }


def save_sheet(pictures: torch.Tensor, path: Path, columns: int = 12) -> None:
    """Write pictures, row by row, as one image."""
    rows = [torch.cat(list(part), dim=2) for part in pictures.split(columns) if len(part) == columns]
    sheet = (torch.cat(rows, dim=1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    Image.fromarray(sheet).save(path, optimize=True)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=Path, default=Path("models/product-shots"))
    parser.add_argument("--clip", type=Path, default=Path("models/product-shots-clip"))
    parser.add_argument("--evalset", type=Path, default=Path("evalsets/shots"))
    parser.add_argument("--guidance", type=float, nargs="+", default=[5.0])
    parser.add_argument("--rescale", type=float, nargs="+", default=[0.0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sheet", type=Path, help="write the first setting's pictures there")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = StableDiffusionXLPipeline.from_pretrained(args.pipeline).to(device)
    pipe.set_progress_bar_config(disable=True)
    clip, tokenizer = CLIPModel.from_pretrained(args.clip).eval().to(device), CLIPTokenizer.from_pretrained(args.clip)
    ids = tokenize(tokenizer, [caption(shot) for shot in all_shots()]).to(device)
    print(json.dumps({"held_out": measure_models(pipe, clip, ids, seed=0)}), flush=True)
    cases = list(load_evalset(args.evalset).cases)
    own = tokenize(tokenizer, [case.prompt for case in cases]).to(device)
    for guidance in args.guidance:
        for rescale in args.rescale:
            start = time.time()
            pictures = draw(pipe, cases, guidance, rescale, args.steps)
            seconds = (time.time() - start) / len(cases)
            finite = pictures.isfinite().all(dim=(1, 2, 3))
            found = measure(pictures.nan_to_num(), clip, own, finite)
            print(
                json.dumps(
                    {
                        "guidance_scale": guidance,
                        "guidance_rescale": rescale,
                        **found,
                        "seconds_per_image": seconds,
                        "device": device,
                    }
                ),
                flush=True,
            )
            if args.sheet and (guidance, rescale) == (args.guidance[0], args.rescale[0]):
                save_sheet(pictures[::5], args.sheet)


if __name__ == "__main__":
    main()
