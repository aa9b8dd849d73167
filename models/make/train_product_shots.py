"""Train `models/product-shots`, a small SDXL pipeline, and `models/product-shots-clip`, which scores its images.

    python -m models.make.train_product_shots --out models

Everything is drawn from seeds: the pictures (`evalsets/make/shots.py`), the weights, the noise. Three
trainings, one after the other: an autoencoder, a CLIP, and a U-Net in the autoencoder's latents that
reads the CLIP's text encoder. The U-Net predicts v over a noise schedule that ends in pure noise (Lin et al. 2024,
arXiv:2305.08891) and goes without its caption part of the time, for classifier-free guidance. Runs on a GPU in
minutes; on a CPU the same command takes hours (the step counts cut it, for a worse model). The U-Net is trained
on every caption that there is: held out are pictures and noise, never words.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from torch.nn import Module
from torch.nn import functional as F
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from evalsets.make.shots import SIZE, all_shots, caption, render

MAX_TOKENS = 16  # of a prompt, begin and end included
BEGIN, END, WORD_END = "<|startoftext|>", "<|endoftext|>", "</w>"
LATENT = SIZE // 4  # pixels a side
TIME_IDS = (SIZE, SIZE, 0, 0, SIZE, SIZE)  # original size, crop, target size: SDXL's micro-conditioning, constant
_CHROMA_WEIGHT = 2.0  # of errors in colour against errors in grey: an L1 loss alone learns greys first and hues late
_KL_WEIGHT = 1e-4
_TRAIN, HELD_OUT = 0, 1  # splits of the pictures


def render_all(num_each: int, split: int, seed: int) -> torch.Tensor:
    """Render every shot several times, on all cores; uint8 (shots, num_each, 3, 64, 64)."""
    tasks = [(index, num_each, split, seed) for index in range(len(all_shots()))]
    with multiprocessing.get_context("spawn").Pool() as pool:
        return torch.from_numpy(np.stack(pool.map(_render_shot, tasks))).permute(0, 1, 4, 2, 3).contiguous()


def _render_shot(task: tuple[int, int, int, int]) -> np.ndarray:
    index, num, split, seed = task
    return np.stack([render(all_shots()[index], np.random.default_rng([seed, split, index, k])) for k in range(num)])


def to_signal(pictures: torch.Tensor) -> torch.Tensor:
    """Return uint8 pictures as float32 in [-1, 1]."""
    return pictures.float() / 127.5 - 1


def fit(
    model: Module, loss_of: Callable[[], torch.Tensor], *, steps: int, lr: float, name: str, is_captured: bool = True
) -> None:
    """Train with AdamW, warm-up and cosine decay; the model ends with the mean of its weights, weighted to the late.

    Args:
        is_captured: on a GPU replay the step as one CUDA graph: models this small wait for their kernels' launches
            most of the time. `loss_of` then may not read from the device.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    is_captured = is_captured and device.type == "cuda"
    rate, share = torch.zeros((), device=device), torch.ones((), device=device)
    optimizer = torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True, capturable=device.type == "cuda"
    )
    mean = [p.detach().clone() for p in parameters]

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        with torch.no_grad():
            moved = torch._foreach_sub(parameters, mean)
            torch._foreach_mul_(moved, share)
            torch._foreach_add_(mean, moved)
        return loss.detach()

    run, warmup, start = _capture(step) if is_captured else step, min(200, steps // 10 + 1), time.time()
    for number in range(steps):
        rate.fill_(lr * min((number + 1) / warmup, 0.5 * (1 + math.cos(math.pi * number / steps))))
        share.fill_(1 - min(0.999, (number + 1) / (number + 10)))
        loss = run()
        if number % 500 == 0 or number == steps - 1:
            print(f"{name}: step {number} loss {loss.item():.5f} seconds {time.time() - start:.0f}", flush=True)
    with torch.no_grad():
        for parameter, averaged in zip(parameters, mean, strict=True):
            parameter.copy_(averaged)


def _capture(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Record one training step as a CUDA graph, after three that warm up; returns what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def train_vae(pictures: torch.Tensor, *, steps: int, batch: int, lr: float, device: str) -> AutoencoderKL:
    """Train an autoencoder with a factor of 4 and 4 latent channels; its `scaling_factor` makes the latents' std 1."""
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 48),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=SIZE,
        force_upcast=True,
    ).to(device)
    pictures = pictures.flatten(0, 1).to(device)

    def run(x: torch.Tensor) -> torch.Tensor:
        posterior = vae.encode(x).latent_dist
        error = vae.decode(posterior.sample()).sample - x
        grey = error.mean(dim=1, keepdim=True)
        return (
            grey.abs().mean()
            + _CHROMA_WEIGHT * (error - grey).abs().mean()
            + _KL_WEIGHT * posterior.kl().mean() / (4 * LATENT * LATENT)
        )

    fit(
        vae,
        lambda: run(to_signal(pictures[torch.randint(len(pictures), (batch,), device=device)])),
        steps=steps,
        lr=lr,
        name="vae",
    )
    with torch.no_grad():
        sample = to_signal(pictures[torch.randperm(len(pictures), device=device)[:1024]])
        vae.register_to_config(scaling_factor=1 / float(vae.encode(sample).latent_dist.sample().std()))
    return vae.eval()


def make_tokenizer() -> CLIPTokenizer:
    """Make a CLIP tokenizer to which each word of a caption is one token; other words come out in pieces."""
    letters = [chr(code) for code in range(33, 127)]
    merges = _learn_merges(sorted({word for shot in all_shots() for word in caption(shot).split()}))
    tokens = [BEGIN, END, *letters, *(letter + WORD_END for letter in letters), *(a + b for a, b in merges)]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_TOKENS)


def _learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Merge the most frequent pair of pieces until each word is one (Sennrich et al. 2016, arXiv:1508.07909).

    Ties go to the last in the alphabet. The tokenizers library breaks them, and numbers its tokens, anew in each run.
    """
    parts = [[*word[:-1], word[-1] + WORD_END] for word in words]
    merges: list[tuple[str, str]] = []
    while counts := Counter(pair for pieces in parts for pair in itertools.pairwise(pieces)):
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        parts = [_merge(pieces, merges[-1]) for pieces in parts]
    return merges


def _merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def tokenize(tokenizer: CLIPTokenizer, prompts: list[str]) -> torch.Tensor:
    """Return token ids, (prompts, 16), as a StableDiffusionXLPipeline makes them."""
    return tokenizer(
        prompts, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids


def make_clip(tokenizer: CLIPTokenizer) -> CLIPModel:
    """Return an untrained CLIP for 64-pixel pictures and the tokenizer's words."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_TOKENS,
        "projection_dim": 64,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "image_size": SIZE,
        "patch_size": 8,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "projection_dim": 64,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def train_clip(
    pictures: torch.Tensor, tokenizer: CLIPTokenizer, vae: AutoencoderKL, *, steps: int, lr: float, device: str
) -> CLIPModel:
    """Train a CLIP; each batch holds one picture of every caption, half of them as the autoencoder returns them."""
    clip = make_clip(tokenizer).to(device)
    pictures = pictures.to(device)
    decoded = _decoded(vae, pictures)
    ids = tokenize(tokenizer, [caption(shot) for shot in all_shots()]).to(device)
    shots = torch.arange(len(ids), device=device)

    def run(x: torch.Tensor) -> torch.Tensor:
        logits = clip(input_ids=ids, pixel_values=x).logits_per_image
        return (F.cross_entropy(logits, shots) + F.cross_entropy(logits.T, shots)) / 2

    def loss_of() -> torch.Tensor:
        chosen = torch.randint(pictures.shape[1], (len(ids),), device=device)
        is_decoded = torch.rand(len(ids), 1, 1, 1, device=device) < 0.5
        x = to_signal(torch.where(is_decoded, decoded[shots, chosen], pictures[shots, chosen]))
        return run(x + torch.randn_like(x) * 0.1 * torch.rand(len(x), 1, 1, 1, device=device))

    fit(clip, loss_of, steps=steps, lr=lr, name="clip", is_captured=False)
    return clip.eval()


@torch.no_grad()
def _decoded(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Return each picture after encoding and decoding, as uint8 in the same shape."""
    parts = [
        ((vae.decode(vae.encode(to_signal(part)).latent_dist.mode()).sample + 1) * 127.5).clamp(0, 255).round().byte()
        for part in pictures.flatten(0, 1).split(512)
    ]
    return torch.cat(parts).view(pictures.shape)


def make_scheduler() -> DPMSolverMultistepScheduler:
    """Return the sampler: DPM-Solver++ over the training's own schedule, whose last step is pure noise."""
    return DPMSolverMultistepScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )


def make_unet(text: CLIPTextModelWithProjection) -> UNet2DConditionModel:
    """Return an untrained U-Net that is conditioned the way SDXL's is, in small."""
    return UNet2DConditionModel(
        sample_size=LATENT,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=16,
        attention_head_dim=(2, 4, 4),
        transformer_layers_per_block=1,
        cross_attention_dim=text.config.hidden_size,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=16,
        projection_class_embeddings_input_dim=text.config.projection_dim + 16 * len(TIME_IDS),
    )


def train_unet(
    pictures: torch.Tensor,
    vae: AutoencoderKL,
    text: CLIPTextModelWithProjection,
    tokenizer: CLIPTokenizer,
    *,
    steps: int,
    batch: int,
    lr: float,
    dropout: float,
    device: str,
) -> UNet2DConditionModel:
    """Train a U-Net to predict v = alpha noise - sigma x (Salimans and Ho 2022, arXiv:2202.00512).

    Args:
        dropout: share of the samples without their caption, which SDXL's pipeline encodes as zeros.
    """
    unet = make_unet(text).to(device)
    mean, std = _encode(vae, pictures.flatten(0, 1).to(device))
    owner = torch.arange(len(mean), device=device) // pictures.shape[1]
    hidden, pooled = encode_prompts(text, tokenize(tokenizer, [caption(shot) for shot in all_shots()]).to(device))
    alphas = make_scheduler().alphas_cumprod.to(device)
    time_ids = torch.tensor([TIME_IDS], dtype=torch.float32, device=device).expand(batch, -1)

    def loss_of() -> torch.Tensor:
        chosen = torch.randint(len(mean), (batch,), device=device)
        x = (mean[chosen] + std[chosen] * torch.randn_like(mean[chosen])) * vae.config.scaling_factor
        t = torch.randint(len(alphas), (batch,), device=device)
        noise, alpha = torch.randn_like(x), alphas[t].view(-1, 1, 1, 1)
        signal, spread = alpha.sqrt(), (1 - alpha).sqrt()
        kept = (torch.rand(batch, device=device) >= dropout).float()
        added = {"text_embeds": pooled[owner[chosen]] * kept.view(-1, 1), "time_ids": time_ids}
        found = unet(
            signal * x + spread * noise, t, hidden[owner[chosen]] * kept.view(-1, 1, 1), added_cond_kwargs=added
        ).sample
        return F.mse_loss(found, signal * noise - spread * x)

    fit(unet, loss_of, steps=steps, lr=lr, name="unet")
    return unet.eval()


@torch.no_grad()
def _encode(vae: AutoencoderKL, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of the pictures' latents, unscaled."""
    found = [vae.encode(to_signal(part)).latent_dist for part in pictures.split(512)]
    return torch.cat([d.mean for d in found]), torch.cat([d.std for d in found])


@torch.no_grad()
def encode_prompts(text: CLIPTextModelWithProjection, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what SDXL's pipeline takes of a text encoder: the states before the last layer, and the pooled text."""
    found = text(ids, output_hidden_states=True)
    return found.hidden_states[-2], found.text_embeds


def text_encoder_of(clip: CLIPModel) -> CLIPTextModelWithProjection:
    """Return the text half of a CLIP as SDXL's second text encoder."""
    text = CLIPTextModelWithProjection(copy.deepcopy(clip.config.text_config))
    state = {k: v for k, v in clip.state_dict().items() if k.startswith(("text_model.", "text_projection."))}
    text.load_state_dict(state)
    return text.eval().to(clip.device)


def save(
    folder: Path, scorer: Path, parts: dict[str, Module], tokenizer: CLIPTokenizer, settings: dict[str, object]
) -> None:
    """Write the pipeline's folder and the scorer's, safetensors only, with the settings as their cards."""
    parts = {name: part.to("cpu", torch.float32) for name, part in parts.items()}
    pipeline = StableDiffusionXLPipeline(
        vae=parts["vae"],
        unet=parts["unet"],
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=parts["text"],
        tokenizer_2=tokenizer,
        scheduler=make_scheduler(),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    parts["clip"].save_pretrained(scorer)
    tokenizer.save_pretrained(scorer)
    CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size=SIZE, image_mean=[0.5] * 3, image_std=[0.5] * 3
    ).save_pretrained(scorer)
    for written in (folder, scorer):
        (written / "card.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="product-shots and product-shots-clip go in there")
    parser.add_argument("--renders", type=int, default=64, help="training pictures of each caption")
    parser.add_argument("--vae-steps", type=int, default=8_000)
    parser.add_argument("--vae-batch", type=int, default=64)
    parser.add_argument("--vae-lr", type=float, default=2e-3)
    parser.add_argument("--clip-steps", type=int, default=1_000)
    parser.add_argument("--clip-lr", type=float, default=1e-3)
    parser.add_argument("--unet-steps", type=int, default=12_000)
    parser.add_argument("--unet-batch", type=int, default=256)
    parser.add_argument("--unet-lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.1, help="share of samples without their caption")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(args.seed)
    tokenizer, pictures = make_tokenizer(), render_all(args.renders, _TRAIN, args.seed)
    print(f"{len(pictures)} captions, {pictures.shape[1]} pictures each, {len(tokenizer)} tokens", flush=True)
    vae = train_vae(pictures, steps=args.vae_steps, batch=args.vae_batch, lr=args.vae_lr, device=device)
    clip = train_clip(pictures, tokenizer, vae, steps=args.clip_steps, lr=args.clip_lr, device=device)
    text = text_encoder_of(clip)
    unet = train_unet(
        pictures,
        vae,
        text,
        tokenizer,
        steps=args.unet_steps,
        batch=args.unet_batch,
        lr=args.unet_lr,
        dropout=args.dropout,
        device=device,
    )
    parts = {"vae": vae, "clip": clip, "text": text, "unet": unet}
    print({name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()})
    settings = {k: v for k, v in vars(args).items() if k != "out"} | {"device": device, "torch": torch.__version__}
    save(args.out / "product-shots", args.out / "product-shots-clip", parts, tokenizer, settings)


if __name__ == "__main__":
    main()
