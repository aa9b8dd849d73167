"""What a diffusion pipeline starts with as a product: settings, and prompts in their format."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from pipeline.errors import SettingsError
from pipeline.evalsets.examples import COLOURS, build_evalset
from pipeline.product import Start
from pipeline.products.images.folders import open_pipeline, read_denoiser, read_part_config

_SECTION = """\
{name}:
  kind: images
  # all others are compared with it, picture by picture
  reference: {name}
  # what would ship: `dvc repro` fails unless the gate passes it
  release: [{name}-fp16]
  # these settings can change a pixel
  serving:
    num_inference_steps: 20
    guidance: {{scale: {scale:g}}}
    batch_size: 1  # prompts together; rounding depends on who shares a batch
    num_threads: 1  # torch threads of each process
  # replace the prompts by your own
  evals:
    prompts: {{kind: images, evalset: {folder}, clip: {clip}}}
  gate:
    alpha: 0.05  # one-sided, per release
    on_inconclusive: block  # or warn
    # the loss that you tolerate: of a rate 0.02 is 2 points. 32 pictures can't prove less of it than this
    tolerances:
      prompts/sound_image_rate: {{overall: 0.16}}
      prompts/decode_ssim: {{overall: 0.01}}
      prompts/clip_similarity: {{overall: 0.01}}
      prompts/saturated_pixel_fraction: {{overall: 0.01}}
      prompts/reference_ssim: {{overall: 0.03}}
      prompts/seam_step_levels: {{overall: 0.5}}  # grey levels of 255, where a decoder works in tiles
"""
_CANDIDATES = """\
{name}: {{product: {name}, checkpoint: {checkpoint}, steps: []}}
# the decoder in float16
{name}-fp16: {{product: {name}, checkpoint: {checkpoint}, steps: [{{kind: vae_precision, dtype: float16}}]}}
"""
_THINGS = ("lamp", "cup", "chair", "bottle")


def start_images(name: str, checkpoint: str, root: Path, *, clip: str | None) -> Start:
    """Return what a diffusion pipeline starts with.

    Args:
        name: of the product.
        checkpoint: its folder in the project.
        root: of the project.
        clip: folder of the CLIP that judges pictures.

    Raises:
        QuantgateError: the folder can't be used, or no CLIP was named.
    """
    open_pipeline(root / checkpoint)
    denoiser = read_denoiser(root / checkpoint)
    takes_guidance = denoiser.takes_guidance(read_part_config(root / checkpoint, denoiser.part))
    if clip is None:
        raise SettingsError("--clip: expected the folder of the CLIP that judges the pictures, found none; name one")
    folder = Path("evalsets") / f"{name}-prompts"
    cases = [
        {
            "id": f"prompt-{i}",
            "cluster": f"prompt-{i}",
            "prompt": f"a {colour} {thing} on a white background",
            "seed": i,
        }
        for i, (colour, thing) in enumerate(product(COLOURS, _THINGS), 1)
    ]
    return Start(
        _SECTION.format(name=name, folder=folder, clip=clip, scale=denoiser.scale if takes_guidance else 1),
        _CANDIDATES.format(name=name, checkpoint=checkpoint),
        build_evalset(folder, cases, kind="prompts", cluster="a prompt"),
    )
