"""Scores of one image: is it sound, how saturated, how near the float32 decode, how much like its prompt.

A raw decode with NaN or infinity can't be compared: it scores worst everywhere, and a flag names it. Latents that
are out of range before the decoder are not counted as a decoder that overflows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.errors import CheckpointError
from pipeline.numerics.activation_watch import ModuleRange
from pipeline.numerics.saturation import clipped_pixel_fraction, is_black, saturated_pixel_fraction, to_unit_range
from pipeline.numerics.seams import seam_excess
from pipeline.numerics.similarity import peak_signal_to_noise_db, structural_similarity

LATENT_LIMIT = 20.0  # standard deviations: what a decoder was trained on lies within about 5
MAX_PSNR_DB = 100.0  # of equal images, whose ratio is infinite
# of an image that holds NaN or infinity: nothing can be measured, and no loss may hide behind that
_WORST = {"seam_levels": 255.0, "saturated": 1.0, "clipped": 1.0, "ssim": 0.0, "psnr_db": 0.0, "clip": -1.0}
_WORST_STD_RATIO = 100.0  # where no step had a finite one


class ClipScorer:
    """Cosine similarity of images and their prompts under one CLIP checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Load the checkpoint with plain transformers, in float32 however it is stored.

        Raises:
            CheckpointError: it is missing, no CLIP, or lacks numbers.
        """
        from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

        try:
            model, info = CLIPModel.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._processor = CLIPImageProcessor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder}: expected a CLIP checkpoint with tokenizer and image processor, got: "
                f"{' '.join(str(error).split())[:300]}"
            ) from None
        if missing := sorted(info["missing_keys"]):  # transformers draws them anew in each process, and only warns
            raise CheckpointError(
                f"{folder}: expected a whole CLIP, {len(missing)} tensors are missing, such as {missing[0]!r}; save it "
                "again"
            )
        if broken := next((name for name, values in model.named_parameters() if not values.isfinite().all()), None):
            raise CheckpointError(
                f"{folder}: expected finite weights, got NaN or infinity in {broken!r}; save it again"
            )
        self._max_tokens = model.config.text_config.max_position_embeddings  # a tokenizer may know no limit
        self._model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    @torch.inference_mode()
    def score(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """Return the similarity of each image with its own prompt.

        Args:
            images: uint8, (n, 3, height, width), on any device.
            prompts: n texts.

        Returns:
            (n,), each within [-1, 1].
        """
        if self._processor.backend != "torchvision":  # Pillow's works on a CPU
            images = images.cpu()
        pixels = self._processor(images=list(images), return_tensors="pt", input_data_format="channels_first")
        tokens = self._tokenizer(
            prompts, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        )
        named = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask, **pixels}
        output = self._model(**{name: values.to(self._model.device) for name, values in named.items()})
        return (output.image_embeds * output.text_embeds).sum(-1)


def score_images(
    raw: torch.Tensor,
    exact: torch.Tensor,
    latents: torch.Tensor,
    clip: torch.Tensor,
    std_ratios: torch.Tensor,
    stitches: tuple[list[int], list[int]],
    *,
    oversaturated_above: float,
) -> list[dict[str, float]]:
    """Return the scores of a batch, computed on the device that holds it.

    Args:
        raw: what the candidate's decoder wrote, (n, 3, height, width), meant to lie in [-1, 1].
        exact: the same latents decoded by the reference's VAE in float32.
        latents: (n, channels, height, width), as the denoising loop left them: about one deviation wide.
        clip: (n,), similarity with the prompt.
        std_ratios: (n,), of the guided prediction to the conditional one, mean over the steps; NaN where none is.
        stitches: x of columns and y of rows where tiles meet.
        oversaturated_above: fraction of an image's pixels that are saturated.
    """
    finite = raw.isfinite().flatten(1).all(1)
    is_comparable = finite & exact.isfinite().flatten(1).all(1)
    unclamped, wanted = (to_unit_range(blank(side, ~is_comparable)) for side in (raw, exact))
    image, wanted = unclamped.clamp(0, 1), wanted.clamp(0, 1)
    numbers = {
        "saturated": saturated_pixel_fraction(image),
        "clipped": clipped_pixel_fraction(unclamped),
        "ssim": structural_similarity(image, wanted),
        "psnr_db": peak_signal_to_noise_db(image, wanted).clamp(max=MAX_PSNR_DB),
        "clip": clip,
        "seam_levels": 255 * seam_excess(image, wanted, *stitches, period=raw.shape[2] // latents.shape[2]),
    }
    worst = _WORST | ({} if any(stitches) else {"seam_levels": 0.0})
    is_wild = (~latents.isfinite()).flatten(1).any(1) | (latents.abs().flatten(1).amax(1) > LATENT_LIMIT)
    # one by one, each number would wait for the GPU
    values = {name: numbers[name].tolist() for name in numbers}
    is_number, has_scores, black, is_odd = (
        flags.tolist() for flags in (finite, is_comparable, is_black(image), is_wild)
    )
    scores = []
    for i in range(len(raw)):
        flags = {
            "nonfinite": not is_number[i],
            "black": black[i] and is_number[i],
            "latents_out_of_range": is_odd[i],
        }
        judged = {name: of_images[i] for name, of_images in values.items()} if has_scores[i] else worst
        ratio = float(std_ratios[i])
        flags |= {
            "sound": not flags["nonfinite"] and not flags["black"],
            "oversaturated": judged["saturated"] > oversaturated_above,
        }
        scores.append(
            {
                "std_ratio": ratio if math.isfinite(ratio) else _WORST_STD_RATIO,
                **judged,
                **{name: float(flag) for name, flag in flags.items()},
            }
        )
    return scores


def blank(batch: torch.Tensor, unusable: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """Return a batch (n, channels, height, width) with another value all over its samples that are unusable, (n,)."""
    return batch.masked_fill(unusable[:, None, None, None], value)


def compare_pictures(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> float:
    """Return how alike two pictures are that were drawn apart: their SSIM, and 0 where it is less than that.

    Args:
        ours: (height, width, 3).
        theirs: of the same size.

    Returns:
        A number in [0, 1], 1 for equal pixels.

    Raises:
        NumericsError: sizes differ, or are smaller than the window of the SSIM.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.tensor(side, device=device).permute(2, 0, 1)[None] / 255 for side in (ours, theirs))
    return float(structural_similarity(a, b).clamp(0, 1))


def to_bytes(raw: torch.Tensor) -> torch.Tensor:
    """Return what a user sees, uint8 of the same shape; NaN becomes black, as diffusers makes it."""
    return (to_unit_range(raw.nan_to_num(-1.0, -1.0, -1.0)).clamp(0, 1) * 255).round().to(torch.uint8)


def build_range_notes(
    batches: Sequence[Mapping[str, ModuleRange]], dtype: str
) -> dict[str, dict[str, float | int | None]]:
    """Return the range of each module of a decoder over all batches as JSON: what it wrote, how often that can double.

    Headroom is that of the format it ran in, and of float16, which another candidate may ask for. Infinite numbers
    become None: of a module that overflowed, or wrote nothing but zeros.
    """
    ranges = {
        name: reduce(_widen, (batch[name] for batch in batches if name in batch))
        for name in dict.fromkeys(name for batch in batches for name in batch)
    }
    return {
        name: {
            "absmax": _finite(r.absmax),
            "headroom_bits": _finite(r.headroom_bits(getattr(torch, dtype))),
            "headroom_bits_float16": _finite(r.headroom_bits(torch.float16)),
            "nonfinite_count": r.nonfinite_count,
        }
        for name, r in ranges.items()
    }


def _widen(first: ModuleRange, second: ModuleRange) -> ModuleRange:
    return ModuleRange(
        max(first.absmax, second.absmax),
        first.nonfinite_count + second.nonfinite_count,
        first.nonfinite_calls + second.nonfinite_calls,
        first.calls + second.calls,
    )


def _finite(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
