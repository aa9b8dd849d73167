"""What an evaluation of SDXL's shape takes: wall and GPU seconds an image, GPU memory, disk a candidate.

    python -m benchmarks.sdxl_pipeline                       1024 px, 20 steps, 4 prompts together; 3 minutes on an H100
    python -m benchmarks.sdxl_pipeline --candidate half      one candidate alone
    python -m benchmarks.sdxl_pipeline --tiny                the same code paths on a CPU in a minute

Makes a pipeline (stored in bfloat16, the U-Net in shards) and a CLIP of ViT-L's shape with random weights, then builds
and evaluates the reference, which runs in float32, and a candidate in bfloat16, as the stages do. Images are noise, so
nothing here says anything about quality.

*GPU* seconds are those of denoising and decoding once, synchronised: what an image costs where it ships. *Wall* seconds
are those between the first batch and the last: judging is in them, starting is not. *Busy* is the mean of nvidia-smi's
utilisation in that time.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.gpu_use import parse_use, start_nvidia_smi
from benchmarks.sdxl_models import TINY_UNET, TINY_VAE, UNET_CONFIG, VAE_CONFIG
from evalsets.seal import seal
from pipeline.products.images import evaluate
from pipeline.products.images.candidate import build_image_candidate
from pipeline.products.images.settings import ImagesProduct

SHOTS = Path("models/product-shots")
PROMPTS = Path("evalsets/shots")
SAMPLE_MS = 200
STEPS = {
    "reference": [],
    "half": [{"kind": "unet_precision", "dtype": "bfloat16"}, {"kind": "vae_precision", "dtype": "bfloat16"}],
}
# of SDXL's two text encoders, and of ViT-L/14
TEXT = {
    "text_encoder": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "text_encoder_2": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "projection_dim": 1280,
    },
}
VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
_SMALL = {"num_hidden_layers": 1, "intermediate_size": 64}  # of each text encoder and of CLIP


@dataclass
class Watched:
    """What was seen of an evaluation from outside its processes."""

    batches: list[tuple[float, Any]] = field(default_factory=list)  # when each was there, and what it is
    samples: list[tuple[float, float, float]] = field(default_factory=list)  # when, per cent busy, MiB in use

    def measure_wall_s(self) -> float | None:
        """Return the wall seconds an image, between the first batch and the last."""
        (start, _), *_, (end, _) = self.batches
        num = sum(len(rendered.records) for _, rendered in self.batches[1:])
        return (end - start) / num if num else None

    def measure_gpu_s(self) -> float:
        """Return the seconds an image to denoise and decode once, without the first batch where there are more."""
        records = [record for _, rendered in self.batches[1:] or self.batches for record in rendered.records]
        return sum(record.latency_s for record in records) / len(records)

    def find_busy(self) -> float | None:
        """Return the mean utilisation between the first batch and the last, in per cent."""
        start, end = self.batches[0][0], self.batches[-1][0]
        busy = [percent for when, percent, _ in self.samples if start <= when <= end]
        return sum(busy) / len(busy) if busy else None


def make_models(root: Path, *, tiny: bool) -> None:
    """Write a pipeline and a CLIP under `models/`; weights are drawn on the GPU where there is one."""
    import diffusers
    import torch
    import transformers

    tokenizer = transformers.CLIPTokenizer.from_pretrained(SHOTS / "tokenizer_2", model_max_length=77)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "vocab_size": 255 if tiny else 49_408}
    small = _SMALL if tiny else {}
    text = {name: transformers.CLIPTextConfig(**shape | special | small) for name, shape in TEXT.items()}
    vision = VISION | small | ({"image_size": 56, "hidden_size": 64} if tiny else {})
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        pipe = diffusers.StableDiffusionXLPipeline(
            vae=diffusers.AutoencoderKL(**TINY_VAE if tiny else VAE_CONFIG),
            text_encoder=transformers.CLIPTextModel(text["text_encoder"]),
            text_encoder_2=transformers.CLIPTextModelWithProjection(text["text_encoder_2"]),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            unet=diffusers.UNet2DConditionModel(**TINY_UNET if tiny else UNET_CONFIG),
            scheduler=diffusers.DPMSolverMultistepScheduler.from_pretrained(SHOTS / "scheduler"),
        )
        clip = transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config=text["text_encoder"].to_dict(), vision_config=vision, projection_dim=768
            )
        )
    pipe.to(dtype=torch.bfloat16).save_pretrained(root / "models/sdxl", max_shard_size="20MB" if tiny else "2GB")
    size = {"height": vision["image_size"], "width": vision["image_size"]}
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": size["height"]}, crop_size=size)
    for part in (clip, processor, tokenizer):
        part.save_pretrained(root / "models/clip")
    del pipe, clip
    torch.cuda.empty_cache()  # the processes that render share the GPU with this one


def make_product(root: Path, num_prompts: int, *, steps: int) -> ImagesProduct:
    """Write prompts of the shipped ones under `evalsets/`, and return the settings of a product that draws them."""
    shutil.copytree(PROMPTS, root / "evalsets/prompts")
    cases = root / "evalsets/prompts/cases.jsonl"
    lines = cases.read_text(encoding="utf-8").splitlines(keepends=True)
    cases.write_text("".join(lines[:: len(lines) // num_prompts][:num_prompts]), encoding="utf-8")
    seal(root / "evalsets/prompts")
    return ImagesProduct.model_validate(
        {
            "name": "sdxl",
            "kind": "images",
            "reference": "reference",
            "release": ["half"],
            "candidates": {name: {"checkpoint": "models/sdxl", "steps": applied} for name, applied in STEPS.items()},
            "serving": {"num_inference_steps": steps, "guidance": {"scale": 5}, "batch_size": 4, "num_threads": 2},
            "resources": {"num_workers": 1},
            "evals": {"prompts": {"kind": "images", "evalset": "evalsets/prompts", "clip": "models/clip"}},
            "gate": {
                "alpha": 0.05,
                "on_inconclusive": "block",
                "tolerances": {"prompts/sound_image_rate": {"overall": 0.02}},
            },
        }
    )


@contextlib.contextmanager
def watch() -> Iterator[Watched]:
    """Note when each batch is there, and what nvidia-smi says meanwhile."""
    watched, run_tasks = Watched(), evaluate.run_tasks

    def note(*arguments: Any, **named: Any) -> Iterator[tuple[int, Any]]:
        for place, rendered in run_tasks(*arguments, **named):
            watched.batches.append((time.monotonic(), rendered))
            yield place, rendered

    process = start_nvidia_smi(SAMPLE_MS)
    if process is not None:
        threading.Thread(target=_read_samples, args=(process, watched), daemon=True).start()
    try:
        with mock.patch.object(evaluate, "run_tasks", note):
            yield watched
    finally:
        if process is not None:
            process.terminate()


def _read_samples(process: subprocess.Popen[str], watched: Watched) -> None:
    for line in process.stdout or ():
        if use := parse_use(line):
            watched.samples.append((time.monotonic(), *use))


def measure(name: str, product: ImagesProduct, root: Path) -> str:
    """Build and evaluate a candidate; return its row."""
    build, start = root / "build", time.monotonic()
    candidate = build_image_candidate(name, product, root=root, build=build)
    built_s = time.monotonic() - start
    with watch() as watched:
        evaluate.evaluate_images(candidate, product, root=root, build=build)
    evaluated_s = time.monotonic() - start - built_s
    wall_s, gpu_s, busy = watched.measure_wall_s(), watched.measure_gpu_s(), watched.find_busy()
    peaks = [rendered.peak_gpu_memory_mib for _, rendered in watched.batches if rendered.peak_gpu_memory_mib]
    disk = sum(path.stat().st_size for path in (build / "candidates" / name).rglob("*") if path.is_file())
    cells = [
        f"`{name}`",
        "-" if wall_s is None else f"{wall_s:.3f}",
        f"{gpu_s:.3f}",
        "-" if wall_s is None else f"{wall_s / gpu_s:.2f}",
        "-" if busy is None else f"{busy:.0f} %",
        f"{max(peaks) / 1024:.1f}" if peaks else "-",
        f"{max(used for *_, used in watched.samples) / 1024:.1f}" if watched.samples else "-",
        f"{disk / 1e6:,.3f}",
        f"{built_s:.1f}",
        f"{evaluated_s:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Make the models, measure the candidates, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="networks of a second")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--candidate", choices=STEPS, help="measure this one alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, start = Path(folder), time.monotonic()
        make_models(root, tiny=args.tiny)
        print(f"models made in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        product = make_product(root, args.prompts, steps=args.steps)
        print(
            "| candidate | wall s an image | GPU s an image | ratio | busy | peak GiB of tensors | GiB in use | "
            "disk, MB | build s | evaluate s |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
            flush=True,
        )
        for name in [args.candidate] if args.candidate else STEPS:
            print(measure(name, product, root), flush=True)


if __name__ == "__main__":
    main()
