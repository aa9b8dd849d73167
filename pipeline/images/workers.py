"""Render and judge batches in worker processes, one per core: each loads the candidate once.

A worker that dies, for lack of memory say, ends the run with one line; what other batches made is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cases import PromptCase
from pipeline.errors import EngineError, QuantgateError
from pipeline.fingerprints import fingerprint, read_environment
from pipeline.image_params import ImagesEval
from pipeline.records import CaseRecord, ImageCandidate


@dataclass(frozen=True)
class Order:
    """What a worker loads."""

    candidate: ImageCandidate
    source: Path  # pipeline folder of the reference, whose VAE in float32 is compared with
    settings: ImagesEval
    root: Path


@dataclass(frozen=True)
class Rendered:
    """What came of one batch."""

    records: tuple[CaseRecord, ...]
    pictures: tuple[bytes, ...]  # PNG
    ranges: dict[str, Any]  # of the decoder's modules, see pipeline/numerics/activation_watch.py
    denoise_s: float
    decode_s: float
    peak_memory_mib: float


@dataclass
class _Loaded:
    """What the process of a worker holds."""

    candidate: ImageCandidate
    pipe: Any
    exact_vae: Any
    clip: Any
    facts: dict[str, Any]


_worker: list[_Loaded] = []  # at most one
_problems: list[QuantgateError] = []  # why there is none


@contextlib.contextmanager
def start_workers(order: Order, num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """Start workers; they load when the first batch comes.

    Raises:
        EngineError: a worker died.
    """
    context = multiprocessing.get_context("spawn")  # a forked torch hangs on its own threads
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_load, initargs=(order,))
    try:
        yield pool
    except BrokenProcessPool:
        raise EngineError(f"{order.candidate.name}: a rendering process ended by itself, perhaps for lack of memory; "
                          "lower images.sampling.batch_size or num_workers; finished batches are kept, run "
                          "`dvc repro` to go on") from None  # fmt: skip
    finally:
        pool.shutdown(cancel_futures=True)


def read_facts() -> dict[str, Any]:
    """Return what a worker has loaded, by section of a fingerprint; raise what kept it from loading."""
    for problem in _problems:
        raise problem
    return _worker[0].facts


def _load(order: Order) -> None:
    threading.Thread(target=_end_with_parent, daemon=True, name="parent-watch").start()
    try:
        _worker.append(_load_all(order))
    except QuantgateError as error:  # raised here it would only say that a process has ended
        _problems.append(error)


def _end_with_parent() -> None:
    """End when the stage is gone, killed or not: a worker that waits for its next batch would not notice."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)


def _load_all(order: Order) -> _Loaded:
    import torch

    from pipeline.environment import read_hardware
    from pipeline.images.rendering import load_pipeline
    from pipeline.images.scoring import ClipScorer

    candidate, serving = order.candidate, order.candidate.serving
    pipe = load_pipeline(order.root / candidate.checkpoint.path, serving)
    for key, part in (("unet_dtype", pipe.unet), ("vae_dtype", pipe.vae)):
        if (loaded := str(part.dtype).removeprefix("torch.")) != getattr(serving, key):
            raise EngineError(f"serving.{key}: the candidate says {getattr(serving, key)!r}, the pipeline loaded "
                              f"{loaded!r}; diffusers keeps some parts in another format: correct the step")
    plain = serving.model_copy(update={"unet_dtype": "float32", "vae_dtype": "float32", "channels_last": ()})
    exact = load_pipeline(order.source, plain).vae
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = candidate.facts | {"environment": read_environment(), "hardware": read_hardware(device)}
    return _Loaded(candidate, pipe, exact, ClipScorer(order.root / order.settings.clip), facts)


def render_batch(batch: Sequence[PromptCase], category: str | None) -> Rendered:
    """Render prompts together and judge each image.

    Args:
        batch: cases that share a guidance.
        category: the bucket that has this guidance, None for the candidate's own.
    """
    from pipeline.images.rendering import Prompt, decode_latents, list_stitches, make_latents, unscale_latents
    from pipeline.images.scoring import score_images, to_bytes
    from pipeline.numerics.activation_watch import ActivationWatch

    loaded = _worker[0]
    vae, start = loaded.pipe.vae, time.perf_counter()
    prompts = [Prompt(case.prompt, case.seed, category) for case in batch]
    latents = make_latents(loaded.pipe, prompts, loaded.candidate.serving)
    denoised = time.perf_counter()
    with ActivationWatch(vae.decoder) as watch:
        raw = decode_latents(vae, latents.values, loaded.candidate.serving.tiling)
    decoded = time.perf_counter()
    exact = decode_latents(loaded.exact_vae, latents.values)
    pixels = to_bytes(raw).cpu()
    clip = loaded.clip.score(pixels, [case.prompt for case in batch])
    stitches = list_stitches(vae, latents.values, loaded.candidate.serving.tiling)
    scores = score_images(raw.cpu(), exact.cpu(), unscale_latents(vae, latents.values).cpu(), clip,
                          latents.mean_std_ratios(), stitches)  # fmt: skip
    records = tuple(
        CaseRecord(case_id=case.id, input_digest=case.digest, cluster=case.cluster, buckets=case.buckets,
                   prompt=case.prompt, output=hashlib.sha256(pixels[i].numpy().tobytes()).hexdigest(),
                   scores=scores[i], latency_s=(decoded - start) / len(batch), fingerprint=fingerprint(loaded.facts))
        for i, case in enumerate(batch)
    )  # fmt: skip
    return Rendered(records, tuple(_write_png(p) for p in pixels), watch.read(), denoised - start, decoded - denoised,
                    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)  # fmt: skip


def _write_png(pixels: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return buffer.getvalue()
