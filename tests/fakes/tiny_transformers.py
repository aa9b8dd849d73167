"""Tiny Flux and Stable Diffusion 3 pipelines with random weights, for tests that need their folders on disk.

What they draw is noise; what is real is what diffusers loads and how it runs it. CLIP's tokenizer is the shipped
pipeline's, that of T5 knows single letters.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
CHANNELS = 16  # of latents
WIDTH = 16  # of T5 and of the transformers' heads
CLIP = {
    "vocab_size": 255,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
    "projection_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
TRANSFORMER = {
    "attention_head_dim": WIDTH,
    "num_attention_heads": 2,
    "joint_attention_dim": 2 * WIDTH,
}


def write_tiny_flux(folder: Path, *, seed: int = 0, guidance_embeds: bool = True) -> Path:
    """Write a Flux pipeline to a folder, and return the folder; without `guidance_embeds` it is as Flux-schnell."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(seed)
    transformer = diffusers.FluxTransformer2DModel(
        **TRANSFORMER,
        num_layers=1,
        in_channels=4 * CHANNELS,
        num_single_layers=1,
        pooled_projection_dim=16,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
    )
    t5, tokenizer = _build_t5()
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=guidance_embeds),
        vae=_build_vae(),
        text_encoder=CLIPTextModel(CLIPTextConfig(**CLIP)),
        tokenizer=_load_clip_tokenizer(),
        text_encoder_2=t5,
        tokenizer_2=tokenizer,
        transformer=transformer,
    )
    return _save(pipe, folder)


def write_tiny_sd3(folder: Path, *, seed: int = 0, has_t5: bool = True, size: int = 16) -> Path:
    """Write a Stable Diffusion 3 pipeline to a folder, and return the folder.

    Args:
        folder: to make.
        seed: of the weights.
        has_t5: it has the third text encoder.
        size: of the latents, a side.
    """
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    transformer = diffusers.SD3Transformer2DModel(
        **TRANSFORMER,
        num_layers=2,
        sample_size=size,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
        caption_projection_dim=2 * WIDTH,
        pooled_projection_dim=32,
        pos_embed_max_size=size,
    )
    t5, tokenizer = _build_t5() if has_t5 else (None, None)
    clips = [CLIPTextModelWithProjection(CLIPTextConfig(**CLIP)) for _ in range(2)]
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_build_vae(),
        text_encoder=clips[0],
        tokenizer=_load_clip_tokenizer(),
        text_encoder_2=clips[1],
        tokenizer_2=_load_clip_tokenizer(),
        text_encoder_3=t5,
        tokenizer_3=tokenizer,
    )
    return _save(pipe, folder)


def _build_vae() -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        latent_channels=CHANNELS,
        norm_num_groups=4,
        scaling_factor=0.4,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _build_t5() -> tuple[Any, Any]:
    from transformers import T5Config, T5EncoderModel, T5TokenizerFast

    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in string.ascii_lowercase)]
    tokenizer = T5TokenizerFast(vocab=scores, extra_ids=0, model_max_length=512)
    width = {"d_model": 2 * WIDTH, "d_kv": WIDTH, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5EncoderModel(T5Config(vocab_size=len(tokenizer), **width)), tokenizer


def _load_clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer.from_pretrained(ROOT / "models/product-shots/tokenizer_2")


def _save(pipe: Any, folder: Path) -> Path:
    """Save with weights that make every module matter: some begin as zeros."""
    with torch.no_grad():
        for parameter in pipe.transformer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    pipe.save_pretrained(folder, safe_serialization=True)
    return folder
