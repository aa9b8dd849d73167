"""Render and judge batches in worker processes, one per core or GPU: each loads the candidate once.

On a GPU everything but the last of it happens there: pixels leave it once, and the process that asked makes files of
them while the next batch is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import EngineError
from pipeline.evalsets.cases import PromptCase
from pipeline.products.images.denoisers import find_denoiser, read_latent_size
from pipeline.products.images.results import Rendered
from pipeline.products.images.settings import ImagesEval
from pipeline.records.digests import digest_checkpoint, digest_files, digest_json, name_changed_file
from pipeline.records.evaluations import ImageCandidate
from pipeline.records.fingerprints import fingerprint
from pipeline.running.environment import read_machine_facts
from pipeline.running.gpu_failures import explain_gpu_failure
from pipeline.running.tracing import record_trace
from pipeline.running.worker_pool import choose_gpu, get_loaded, start_workers

if TYPE_CHECKING:
    from pipeline.products.images.batches import Loaded


@dataclass(frozen=True)
class RenderSetup:
    """What a worker loads, and the digests of the files that it must have."""

    candidate: ImageCandidate
    source: Path  # pipeline folder of the reference, whose VAE in float32 is compared with
    settings: ImagesEval
    root: Path
    judges: dict[Path, str]  # folder of the reference and of the CLIP -> digest
    key: str  # of the eval's records, without what renders
    latents: Path  # folder of the reference's, of this eval
    is_reference: bool


def start_renderers(setup: RenderSetup, num_workers: int) -> AbstractContextManager[Executor]:
    """Start processes that render; see `worker_pool.start_workers`."""
    return start_workers(
        _load,
        setup,
        num_workers,
        owner=setup.candidate.name,
        died="a rendering process ended by itself, perhaps for lack of memory",
        remedy="lower serving.batch_size or resources.num_workers of its product; finished batches are kept, run "
        "`dvc repro` to go on",
    )


def measure_decode_mib(num_images: int) -> float:
    """Return the MiB that a decode of so many images takes at most: the VAE's weights, and what the decode makes.

    Raises:
        EngineError: the GPU's memory does not hold them.
    """
    import torch

    from pipeline.products.images.rendering import decode_latents
    from pipeline.running.timing import measure_peak_bytes

    loaded: Loaded = get_loaded()
    vae, size = loaded.pipe.vae, read_latent_size(loaded.pipe)
    latents = torch.zeros(num_images, vae.config.latent_channels, size, size, device=vae.device)
    with _explain_batch(loaded, num_images):
        made = measure_peak_bytes(lambda: decode_latents(vae, latents, loaded.candidate.serving.tiling), vae.device)
    return (made + sum(p.numel() * p.element_size() for p in vae.parameters())) / 2**20


def trace_batch(batch: Sequence[PromptCase], category: str | None, path: Path) -> None:
    """Trace a denoising step of a batch and its decode, which are judged and timed elsewhere.

    Args:
        batch: cases that share a guidance.
        category: the bucket that has this guidance, None for the candidate's own.
        path: file for the trace.
    """
    from pipeline.products.images.rendering import Prompt, decode_latents, make_latents

    loaded: Loaded = get_loaded()
    one_step = loaded.candidate.serving.model_copy(update={"num_inference_steps": 1})
    with record_trace(path):
        latents = make_latents(loaded.pipe, [Prompt(case.prompt, case.seed, category) for case in batch], one_step)
        decode_latents(loaded.pipe.vae, latents.values, one_step.tiling)


def count_products(batch: Sequence[PromptCase], category: str | None) -> dict[str, Any] | None:
    """Return what multiplied the quantised layers in a denoising step of a batch; None where there are none.

    Args:
        batch: cases that share a guidance.
        category: the bucket that has this guidance, None for the candidate's own.
    """
    from pipeline.products.images import kernels
    from pipeline.products.images.rendering import Prompt, make_latents

    loaded: Loaded = get_loaded()
    one_step = loaded.candidate.serving.model_copy(update={"num_inference_steps": 1})
    prompts = [Prompt(case.prompt, case.seed, category) for case in batch]
    with _explain_batch(loaded, len(batch)):
        return kernels.count_products(
            find_denoiser(loaded.pipe)[1], lambda: make_latents(loaded.pipe, prompts, one_step)
        )


def read_facts() -> dict[str, Any]:
    """Return what a worker has loaded, by section of a fingerprint; raise what kept it from loading."""
    facts: dict[str, Any] = get_loaded().facts
    return facts


def _load(setup: RenderSetup) -> Loaded:
    # the denoiser and a decode ask for pieces of other sizes: else a quarter of what is taken lies idle
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    torch.backends.cudnn.allow_tf32 = False  # the decode in float32 is what others are compared with
    gpu = choose_gpu(range(torch.cuda.device_count() if torch.cuda.is_available() else 0))
    if gpu is not None:
        torch.cuda.set_device(gpu)
    with explain_gpu_failure(
        f"{setup.candidate.name}: its pipeline beside a float32 decoder and CLIP",
        remedy="set its unet_precision or transformer_precision to 16 bits (the reference is float32 alone), or lower "
        "resources.num_workers of its product",
    ):
        loaded = _load_all(setup)
    _check_files(setup)  # after they were read: what is digested is what runs
    return loaded


def _load_all(setup: RenderSetup) -> Loaded:
    from pipeline.products.images.batches import Loaded
    from pipeline.products.images.rendering import load_exact_vae, load_pipeline
    from pipeline.products.images.scoring import ClipScorer
    from pipeline.products.images.shared_latents import SharedLatents, describe_denoising

    candidate, serving = setup.candidate, setup.candidate.serving
    pipe = load_pipeline(setup.root / candidate.checkpoint.path, serving)
    for key, part in (("unet_dtype", find_denoiser(pipe)[1]), ("vae_dtype", pipe.vae)):
        if (dtype := str(part.dtype).removeprefix("torch.")) != getattr(serving, key):
            raise EngineError(
                f"serving.{key}: the candidate says {getattr(serving, key)!r}, the pipeline loaded "
                f"{dtype!r}; diffusers keeps some parts in another format: correct the step"
            )
    facts = candidate.facts | read_machine_facts()
    folder = setup.latents / describe_denoising(facts | {"key": setup.key}, pipe.vae_scale_factor)[:16]
    shared = SharedLatents(folder, fingerprint(facts), is_kept_here=setup.is_reference)
    if setup.is_reference:
        shared.remove_others()
    return Loaded(
        candidate,
        pipe,
        load_exact_vae(setup.source),
        ClipScorer(setup.root / setup.settings.clip),
        setup.settings.oversaturated_above,
        facts,
        shared,
    )


def _check_files(setup: RenderSetup) -> None:
    """Refuse files that are not those that the candidate was built of, or that the eval's key names."""
    checkpoint = setup.candidate.checkpoint
    digests = digest_files(setup.root / checkpoint.path)
    if digest_json(digests) != checkpoint.digest:
        changed = name_changed_file(checkpoint.files, digests)
        raise EngineError(
            f"{checkpoint.path}: expected the files that candidate {setup.candidate.name!r} was built "
            f"of, {changed}; run `dvc repro` to build it again"
        )
    for folder, digest in setup.judges.items():
        is_own = folder == setup.root / checkpoint.path
        if (checkpoint.digest if is_own else digest_checkpoint(folder)) != digest:
            raise EngineError(f"{folder}: its files changed while this ran; run `dvc repro` again")


def render_batch(batch: Sequence[PromptCase], category: str | None) -> Rendered:
    """Render prompts together and judge each image.

    Args:
        batch: cases that share a guidance.
        category: the bucket that has this guidance, None for the candidate's own.

    Raises:
        EngineError: the pipeline refused the prompts, or the GPU's memory does not hold the batch.
    """
    from pipeline.products.images.batches import render

    loaded: Loaded = get_loaded()
    with _explain_batch(loaded, len(batch)):
        return render(loaded, batch, category)


def _explain_batch(loaded: Loaded, num_images: int) -> AbstractContextManager[None]:
    return explain_gpu_failure(
        f"{loaded.candidate.name}: a batch of {num_images} images",
        remedy="lower serving.batch_size or resources.num_workers of its product, or give it a step vae_tiling or a "
        "vae_precision of 16 bits; finished batches are kept, run `dvc repro` to go on",
    )
