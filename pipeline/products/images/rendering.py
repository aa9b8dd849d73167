"""Run a diffusers pipeline the way it would ship: load it as its serving config says, make latents, decode them.

The denoising loop is the pipeline's own; decoding is cut off from it, because diffusers' image
processor turns NaN into black without a word: here the decoder's raw output comes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import CheckpointError, EngineError, SettingsError
from pipeline.numerics.guidance import guide, rescale_guidance
from pipeline.numerics.saturation import guided_std_ratio
from pipeline.numerics.tile_grid import find_stitches
from pipeline.numerics.tiling import blend_tiles
from pipeline.products.images.denoisers import DENOISERS, Denoiser, find_denoiser, read_latent_size
from pipeline.products.images.folders import iterate_weights, list_absent, open_pipeline, read_index
from pipeline.records.digests import digest_bytes
from pipeline.records.serving import PipelineServing, Tiling
from pipeline.running.gpu_failures import describe_gpu_failure


@dataclass(frozen=True)
class Prompt:
    """What one image is made of."""

    text: str
    seed: int
    category: str | None = None  # that has a guidance of its own


@dataclass
class Latents:
    """What the denoising loop made of a batch."""

    values: torch.Tensor  # (n, channels, height, width), float32, as the loop left them
    # of the guided prediction to the conditional one, per step, each (n,); NaN where one is not finite
    std_ratios: list[torch.Tensor] = field(default_factory=list)

    def mean_std_ratios(self) -> torch.Tensor:
        """Return the ratio of each image over all steps, (n,); 1 without guidance, NaN where no step had one."""
        return torch.stack(self.std_ratios).nanmean(0) if self.std_ratios else torch.ones(len(self.values))


def load_pipeline(folder: Path, serving: PipelineServing) -> Any:
    """Load a pipeline as a user of diffusers would, in the number formats and memory formats of its serving config.

    Raises:
        CheckpointError: diffusers can't load it.
    """
    import diffusers
    import transformers

    for library in (diffusers, transformers):  # what they warn of is checked here or does not matter
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    torch.set_num_threads(serving.num_threads)
    dtypes = {"default": getattr(torch, serving.unet_dtype), "vae": getattr(torch, serving.vae_dtype)}
    try:
        pipe = diffusers.DiffusionPipeline.from_pretrained(
            folder, dtype=dtypes, use_safetensors=True, local_files_only=True, **dict.fromkeys(list_absent(folder))
        )
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{folder}: expected a pipeline that diffusers {diffusers.__version__} loads, got: "
            f"{reason}; save it again with that version"
        ) from None
    _check_complete(folder, pipe)
    denoiser, module = find_denoiser(pipe)
    _follow_pipeline(pipe.vae, denoiser)
    if serving.scheduler:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **serving.scheduler)
    pipe.set_progress_bar_config(disable=True)
    for part in serving.channels_last:
        getattr(pipe, part).to(memory_format=torch.channels_last)
    module.eval()
    pipe.vae.eval()
    return pipe.to("cuda" if torch.cuda.is_available() else "cpu")


def load_exact_vae(folder: Path) -> Any:
    """Load the VAE of a pipeline alone, in float32.

    Raises:
        CheckpointError: diffusers can't load it.
    """
    import diffusers

    index = read_index(folder)
    try:
        vae = getattr(diffusers, index["vae"][1]).from_pretrained(folder / "vae", torch_dtype=torch.float32)
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder / 'vae'}: expected a VAE that diffusers {diffusers.__version__} loads, got: "
            f"{' '.join(str(error).split())[:300]}; save it again with that version"
        ) from None
    _follow_pipeline(vae, DENOISERS[index["_class_name"]])
    return vae.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _follow_pipeline(vae: Any, denoiser: Denoiser) -> None:
    """Forget the mean, deviation and shift of latents where the pipeline does not use them."""
    if not denoiser.normalizes_latents and hasattr(vae.config, "latents_mean"):
        vae.register_to_config(latents_mean=None, latents_std=None)
    if not denoiser.shifts_latents and hasattr(vae.config, "shift_factor"):
        vae.register_to_config(shift_factor=None)


def _check_complete(folder: Path, pipe: Any) -> None:
    """Refuse a component that lacks a tensor: the libraries would fill it with random numbers, and only warn.

    Tied weights are stored once; what a library renamed has the numbers of a stored tensor whose name is unknown.
    """
    for part, tensors in open_pipeline(folder).items():
        state = getattr(pipe, part).state_dict()
        stored = {_name_weight(name) for name in tensors}
        held = {state[name].data_ptr() for name in stored if name in state and not state[name].is_meta}
        missing = {
            name: tensor
            for name, tensor in state.items()
            if name not in stored and (tensor.is_meta or tensor.data_ptr() not in held)
        }
        unknown = {f"{part}.{name}": info.file for name, info in tensors.items() if _name_weight(name) not in state}
        if missing and unknown:
            files = {f"{part}/{file}" for file in unknown.values()}
            spare = [tensor for name, tensor in iterate_weights(folder, files) if name in unknown]
            missing = _drop_renamed(missing, spare)
        if missing:
            raise CheckpointError(
                f"{folder / part}: expected the tensor {next(iter(missing))!r}, found none of "
                f"that name; {len(missing)} are missing: save the component again"
            )


def _drop_renamed(missing: dict[str, torch.Tensor], spare: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors whose numbers no spare one has; each spare one stands for one, and for those tied to it."""
    dtypes = {tensor.dtype for tensor in missing.values()}
    left = Counter((dtype, _digest(tensor.to(dtype))) for tensor in spare for dtype in dtypes)
    lost, held = {}, set()
    for name, tensor in missing.items():
        if tensor.is_meta:
            lost[name] = tensor
        elif tensor.data_ptr() not in held:
            key = tensor.dtype, _digest(tensor)
            if left[key]:
                left[key] -= 1
                held.add(tensor.data_ptr())
            else:
                lost[name] = tensor
    return lost


def _digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's numbers, in whatever shape."""
    return digest_bytes(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _name_weight(stored: str) -> str:
    """Return the name of the weight that a stored tensor is a part of, as torchao writes quantised ones."""
    layer, _, key = stored.rpartition(".")
    return f"{layer}.weight" if key.startswith("_weight_") else stored


@torch.inference_mode()
def make_latents(pipe: Any, prompts: Sequence[Prompt], serving: PipelineServing) -> Latents:
    """Run the denoising loop on a batch of prompts that share a category.

    Each image has its own generator, so that a seed gives the same noise in any batch. It is drawn in float32 for any
    number format: drawn in another one it is not the reference's, and then no picture is like the reference's.
    """
    guidance = _find_guidance(serving, prompts[0].category)
    ratios: list[torch.Tensor] = []

    def watch(_module: Any, _args: Any, output: Any) -> None:
        predicted = (output[0] if isinstance(output, tuple) else output.sample).float()
        if len(predicted) != 2 * len(prompts):
            return
        unconditional, conditional = predicted.chunk(2)
        finite = (unconditional.isfinite() & conditional.isfinite()).flatten(1).all(1)
        unconditional, conditional = unconditional[finite], conditional[finite]
        guided = guide(unconditional, conditional, scale=guidance["scale"])
        if guidance["rescale"]:
            guided = rescale_guidance(guided, conditional, rescale=guidance["rescale"])
        by_image = torch.full((len(prompts),), torch.nan, dtype=torch.float64)
        if finite.any():
            by_image[finite.cpu()] = guided_std_ratio(guided, conditional).cpu()
        ratios.append(by_image)

    denoiser, module = find_denoiser(pipe)
    latent_size = read_latent_size(pipe)
    handle = module.register_forward_hook(watch)
    try:
        size = latent_size * pipe.vae_scale_factor
        generators = [torch.Generator("cpu").manual_seed(p.seed) for p in prompts]
        values = pipe(
            prompt=[p.text for p in prompts],
            height=size,
            width=size,
            num_inference_steps=serving.num_inference_steps,
            guidance_scale=guidance["scale"],
            **denoiser.build_options(guidance),
            generator=generators,
            latents=_pack(_draw_noise(pipe, generators), denoiser.packed),
            output_type="latent",
        ).images
    except (ValueError, TypeError, RuntimeError, AttributeError, AssertionError) as error:
        if describe_gpu_failure(error, remedy=""):  # not of these prompts
            raise
        raise EngineError(
            f"rendering: {type(pipe).__name__} refused {len(prompts)} prompts, first "
            f"{prompts[0].text[:60]!r}: {' '.join(str(error).split())[:300]}"
        ) from None
    finally:
        handle.remove()
    values = _unpack(values, denoiser.packed, latent_size)
    return Latents(values.float().contiguous(), ratios)  # a U-Net in channels-last may leave them so


def _draw_noise(pipe: Any, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Return the noise that diffusers would draw of these generators in float32, in the denoiser's number format."""
    denoiser, module = find_denoiser(pipe)
    size = read_latent_size(pipe)
    shape = (1, denoiser.count_channels(module.config.in_channels), size, size)
    return torch.cat([torch.randn(shape, generator=generator) for generator in generators]).to(module.dtype)


def _pack(latents: torch.Tensor, side: int) -> torch.Tensor:
    """Make a token of each square of latents, (n, tokens, channels times its pixels); 1 leaves them as they are."""
    if side == 1:
        return latents
    return torch.pixel_unshuffle(latents, side).flatten(2).transpose(1, 2).contiguous()


def _unpack(tokens: torch.Tensor, side: int, size: int) -> torch.Tensor:
    """Make latents of tokens again, (n, channels, size, size)."""
    if side == 1:
        return tokens
    return torch.pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (size // side, -1)), side)


@torch.inference_mode()
def decode_latents(vae: Any, latents: torch.Tensor, tiling: Tiling | None = None) -> torch.Tensor:
    """Decode as diffusers' pipelines do, up to the image processor.

    Args:
        vae: an AutoencoderKL in any number format.
        latents: (n, channels, height, width), as the denoising loop left them.
        tiling: None decodes in one piece.

    Returns:
        (n, 3, height, width), float32, meant to lie in [-1, 1]; unclamped, and with NaN where the decoder made NaN.
    """

    def decode(part: torch.Tensor) -> torch.Tensor:
        return vae.decode(part.to(vae.dtype), return_dict=False)[0].float()

    unscaled = unscale_latents(vae, latents)
    if tiling is None:
        return decode(unscaled)
    tile, overlap, _ = _place(vae, tiling)
    return blend_tiles(decode, unscaled, tile=tile, overlap=overlap, window=tiling.window)


def list_stitches(vae: Any, latents: torch.Tensor, tiling: Tiling | None) -> tuple[list[int], list[int]]:
    """Return where tiles meet in the decoded image: x of columns, y of rows; none without tiling.

    Raises:
        SettingsError: the images are no larger than a tile, so tiling would go untested.
    """
    if tiling is None:
        return [], []
    tile, overlap, factor = _place(vae, tiling)
    rows, columns = (find_stitches(size, tile, overlap, factor=factor) for size in latents.shape[-2:])
    if not rows and not columns:
        raise SettingsError(
            f"vae_tiling.tile: expected less than the images' {latents.shape[-1] * factor} pixels, got "
            f"{tiling.tile}: no image of the evalset would be tiled; lower it"
        )
    return columns, rows


def _place(vae: Any, tiling: Tiling) -> tuple[int, int, int]:
    """Return tile and overlap in latent pixels, and how many pixels a latent pixel becomes."""
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    tile = tiling.tile // factor
    return tile, int(tiling.overlap * tile), factor


def unscale_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return latents on the scale that the decoder takes."""
    mean, std = (getattr(vae.config, f"latents_{name}", None) for name in ("mean", "std"))
    if (shift := getattr(vae.config, "shift_factor", None)) is not None:
        return latents / vae.config.scaling_factor + shift
    if mean is None or std is None:
        return latents / vae.config.scaling_factor
    mean, std = (torch.tensor(values, device=latents.device).view(1, -1, 1, 1) for values in (mean, std))
    return latents * std / vae.config.scaling_factor + mean


def count_cut_tokens(pipe: Any, prompt: str) -> int:
    """Return how many of a prompt's tokens the pipeline cuts off: its T5, or its CLIP with the least room.

    Beside a T5, which reads all that it can hold, what a CLIP cuts is not lost.
    """
    denoiser, _ = find_denoiser(pipe)
    if denoiser.t5 and denoiser.max_tokens and getattr(pipe, denoiser.t5[0]) is not None:
        return max(0, len(getattr(pipe, denoiser.t5[1])(prompt).input_ids) - denoiser.max_tokens)
    tokenizers = [t for t in (getattr(pipe, "tokenizer", None), getattr(pipe, "tokenizer_2", None)) if t is not None]
    return max([0, *(len(t(prompt).input_ids) - int(t.model_max_length) for t in tokenizers)])


def _find_guidance(serving: PipelineServing, category: str | None) -> dict[str, float]:
    shared = {"scale": serving.guidance_scale, "rescale": serving.guidance_rescale}
    return shared | serving.guidance_by_category.get(category or "", {})
