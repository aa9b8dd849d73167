"""Open, check and describe a diffusers pipeline folder, from JSON and safetensors headers alone.

What plain diffusers would pass over in silence is refused here: an option that the scheduler does not
have, weights beside which a pickle lies and no safetensors. Loading is `rendering.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.products.images.denoisers import DENOISERS, GUIDANCE_WIDTH, Denoiser
from pipeline.products.images.schedulers import SCHEDULER_CONFIG, check_scheduler
from pipeline.records.evaluations import Checkpoint
from pipeline.running.weight_files import TensorInfo, read_header, read_shards
from pipeline.running.weight_folders import build_checkpoint, read_config_file

INDEX_FILE = "model_index.json"
FORMAT = "diffusers"
_WITHOUT_WEIGHTS = ("scheduler", "tokenizer", "feature_extractor", "image_processor")
_WEIGHTS = ("diffusion_pytorch_model.safetensors", "model.safetensors")
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def read_index(folder: Path) -> dict[str, Any]:
    """Read model_index.json: the pipeline's class and its components, name -> [library, class], without absent ones.

    Raises:
        CheckpointError: no folder, no index, or another class, or a component that its class needs is absent.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a pipeline folder, found none; correct the path or make it")
    path = folder / INDEX_FILE
    index = _read_json(path, "a diffusers pipeline folder's index")
    if (kind := index.get("_class_name")) not in DENOISERS:
        raise CheckpointError(
            f"{path}: _class_name: expected a pipeline from text to an image, {', '.join(DENOISERS)}, got {kind!r}; "
            "others are not supported"
        )
    parts = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and entry[0]}
    for name in DENOISERS[kind].list_needed(parts):
        if name not in parts:
            raise CheckpointError(
                f"{path}: expected a component {name!r}, found {', '.join(parts) or 'none'}; save "
                "the pipeline again with all of its components"
            )
    return {"_class_name": kind, **parts}


def read_denoiser(folder: Path) -> Denoiser:
    """Return how diffusers runs what denoises in a pipeline folder; a U-Net may be distilled to take guidance."""
    denoiser = DENOISERS[read_index(folder)["_class_name"]]
    if denoiser.part == "unet" and read_part_config(folder, "unet").get(GUIDANCE_WIDTH) is not None:
        return replace(denoiser, guidance="input")
    return denoiser


def list_absent(folder: Path) -> list[str]:
    """Name the components that a pipeline's index holds a place for, and has not; of a T5 that it may lack, any."""
    index = _read_json(folder / INDEX_FILE, "a diffusers pipeline folder's index")
    absent = [name for name, entry in index.items() if isinstance(entry, list) and entry and entry[0] is None]
    return absent + [name for name in read_denoiser(folder).t5 or () if name not in index]


def open_pipeline(folder: Path) -> dict[str, dict[str, TensorInfo]]:
    """Check everything about a pipeline folder that can be checked without loading it.

    Returns:
        Component -> stored tensors by name, of the components that have weights.

    Raises:
        CheckpointError: names the file, what was expected and what to do.
    """
    tensors = {}
    for name in list_components(folder):
        part = folder / name
        if not part.is_dir():
            raise CheckpointError(
                f"{part}: expected the component that {folder / INDEX_FILE} names, found no folder; copy it again"
            )
        if not name.startswith(_WITHOUT_WEIGHTS):
            read_part_config(folder, name)
            tensors[name] = read_part(part)
    path = folder / SCHEDULER_CONFIG
    scheduler = _read_json(path, "the scheduler's config")
    check_scheduler(path, scheduler)
    _check_flow(folder, scheduler)
    return tensors


def _check_flow(folder: Path, scheduler: Mapping[str, Any]) -> None:
    """Refuse what a pipeline that denoises along a flow can't be run with, or not by its seeds alone."""
    index, denoiser = read_index(folder), read_denoiser(folder)
    if denoiser.scheduler is None:
        return
    kind = index["_class_name"]
    if (name := index["scheduler"][1]) != denoiser.scheduler:
        raise CheckpointError(
            f"{folder / INDEX_FILE}: scheduler: expected {denoiser.scheduler}, with which a {kind} is run, got "
            f"{name!r}; others are not supported"
        )
    if scheduler.get("stochastic_sampling"):
        raise CheckpointError(
            f"{folder / SCHEDULER_CONFIG}: stochastic_sampling: expected false, as each step would draw noise that no "
            "seed decides, got true; set it to false"
        )
    shift = read_part_config(folder, "vae").get("shift_factor")
    if not isinstance(shift, int | float):
        raise CheckpointError(
            f"{folder / 'vae/config.json'}: shift_factor: expected a number, as a {kind} decodes by it, got {shift!r}; "
            "save the pipeline again"
        )


def list_components(folder: Path) -> list[str]:
    """Name the components that a pipeline has, in the order of its index."""
    return [name for name in read_index(folder) if not name.startswith("_")]


def read_part(part: Path) -> dict[str, TensorInfo]:
    """Return the stored tensors of a component by name, from the header of its file or those of its shards.

    Raises:
        CheckpointError: no weights that can be read, or they contradict their header or index.
    """
    weights = find_weights(part)
    return read_shards(weights) if weights.suffix == ".json" else read_header(weights)


def find_weights(part: Path) -> Path:
    """Return the safetensors file of a component, or the index of its shards.

    Raises:
        CheckpointError: pickle weights only, or none.
    """
    names = (*_WEIGHTS, *(f"{name}.index.json" for name in _WEIGHTS))
    weights = next((part / name for name in names if (part / name).is_file()), None)
    if weights is not None:
        return weights
    pickles = sorted(p.name for p in part.glob("*") if p.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{part}: expected safetensors weights, found pickle weights {pickles[0]!r}, which run "
            "code when opened; convert them to safetensors"
        )
    others = sorted(p.name for p in part.glob("*.safetensors*"))
    do = (
        "save the component again in one file: save_pretrained(..., max_shard_size='100GB', variant=None)"
        if others
        else "copy the component again"
    )
    raise CheckpointError(f"{part}: expected {' or '.join(_WEIGHTS)}, found {', '.join(others) or 'neither'}; {do}")


@dataclass(frozen=True)
class ImageShape:
    """What a pipeline draws, from its configs."""

    pixels: int  # a side
    latent_channels: int
    factor: int  # pixels a latent pixel, a side


def read_shape(folder: Path) -> ImageShape:
    """Read the size of a pipeline's images.

    Raises:
        CheckpointError: the configs don't say it, or the images are not square.
    """
    denoiser = read_denoiser(folder)
    config, vae = (read_part_config(folder, part) for part in (denoiser.part, "vae"))
    size = denoiser.size or config.get("sample_size")
    blocks = vae.get("block_out_channels") or vae.get("decoder_block_out_channels")
    if not isinstance(size, int) or not isinstance(blocks, list):
        raise CheckpointError(
            f"{folder}: expected a number as {denoiser.part}/config.json's sample_size and a list as "
            f"vae/config.json's block_out_channels, got {size!r} and {blocks!r}; images that are not "
            "square are not supported"
        )
    factor = 2 ** (len(blocks) - 1)
    return ImageShape(size * factor, int(vae.get("latent_channels", 4)), factor)


def read_part_config(folder: Path, part: str) -> dict[str, Any]:
    """Read config.json of a component of a pipeline folder."""
    return _read_json(folder / part / "config.json", f"the config of component {part!r}")


def iterate_weights(folder: Path, files: Collection[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the name, "component.tensor", and the torch tensor of every weight, one at a time.

    They are on the GPU if there is one, which checks them in no time.

    Args:
        folder: of the pipeline.
        files: paths relative to it that are read; None reads all.
    """
    import torch
    from safetensors import safe_open

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for part, tensors in open_pipeline(folder).items():
        for file in sorted({info.file for info in tensors.values()}):
            if files is not None and f"{part}/{file}" not in files:
                continue
            with safe_open(folder / part / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - the opened file is not a mapping
                    yield f"{part}.{name}", opened.get_tensor(name).to(device)


def read_pipeline_checkpoint(folder: Path, *, root: Path, parent_digest: str | None = None) -> Checkpoint:
    """Check a pipeline folder and return its record; `kind` is the pipeline's class.

    Args:
        folder: the pipeline.
        root: the project root, which `path` is relative to when the folder is inside it.
        parent_digest: digest of the folder that this one was made from.
    """
    stored = [info for tensors in open_pipeline(folder).values() for info in tensors.values()]
    kind = str(read_index(folder)["_class_name"])
    return build_checkpoint(folder, stored, root=root, kind=kind, format=FORMAT, parent_digest=parent_digest)


def _read_json(path: Path, what: str) -> dict[str, Any]:
    return read_config_file(path, what, if_missing="copy the pipeline again")
