"""Render and judge batches in worker processes, one per core: each loads the candidate once."""

from __future__ import annotations

import hashlib
import io
import resource
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.errors import EngineError
from pipeline.evalsets.cases import PromptCase
from pipeline.products.images.settings import ImagesEval
from pipeline.records.digests import digest_checkpoint, digest_files, digest_json, name_changed_file
from pipeline.records.evaluations import CaseRecord, ImageCandidate
from pipeline.records.fingerprints import fingerprint
from pipeline.running.environment import read_machine_facts
from pipeline.running.tracing import record_trace
from pipeline.running.worker_pool import get_loaded, start_workers


@dataclass(frozen=True)
class RenderSetup:
    """What a worker loads, and the digests of the files that it must have."""

    candidate: ImageCandidate
    source: Path  # pipeline folder of the reference, whose VAE in float32 is compared with
    settings: ImagesEval
    root: Path
    judges: dict[Path, str]  # folder of the reference and of the CLIP -> digest


@dataclass(frozen=True)
class Rendered:
    """What came of one batch."""

    records: tuple[CaseRecord, ...]
    pictures: tuple[bytes, ...]  # PNG
    ranges: dict[str, Any]  # of the decoder's modules, see pipeline/numerics/activation_watch.py
    std_ratios: tuple[float, ...]  # of the guided prediction to the conditional one, per step, mean over the batch
    denoise_s: float  # see pipeline/running/timing.py for what a second is
    decode_s: float
    exact_decode_s: float  # of the same latents by the reference's VAE in float32, in turn
    peak_memory_mib: float  # of the process

    def as_json(self) -> dict[str, Any]:
        """Return all but records and pictures as JSON, for a journal."""
        kept = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("records", "pictures")
        }
        return kept | {"ranges": {name: astuple(module_range) for name, module_range in self.ranges.items()}}


@dataclass
class _Loaded:
    """What the process of a worker holds."""

    candidate: ImageCandidate
    pipe: Any
    exact_vae: Any
    clip: Any
    oversaturated_above: float
    facts: dict[str, Any]
    num_batches: int = 0


def start_renderers(setup: RenderSetup, num_workers: int) -> AbstractContextManager[ProcessPoolExecutor]:
    """Start processes that render; see `worker_pool.start_workers`."""
    died = (
        f"{setup.candidate.name}: a rendering process ended by itself, perhaps for lack of memory; lower "
        "serving.batch_size or resources.num_workers of its product; finished batches are kept, run "
        "`dvc repro` to go on"
    )
    return start_workers(_load, setup, num_workers, died=died)


def measure_decode_mib(num_images: int) -> float:
    """Return the MiB that a decode of so many images takes at most: the VAE's weights, and what the decode makes."""
    import torch

    from pipeline.products.images.rendering import decode_latents
    from pipeline.running.timing import measure_peak_bytes

    loaded: _Loaded = get_loaded()
    vae, size = loaded.pipe.vae, loaded.pipe.unet.config.sample_size
    latents = torch.zeros(num_images, vae.config.latent_channels, size, size, device=vae.device)
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

    loaded: _Loaded = get_loaded()
    one_step = loaded.candidate.serving.model_copy(update={"num_inference_steps": 1})
    with record_trace(path):
        latents = make_latents(loaded.pipe, [Prompt(case.prompt, case.seed, category) for case in batch], one_step)
        decode_latents(loaded.pipe.vae, latents.values, one_step.tiling)


def read_facts() -> dict[str, Any]:
    """Return what a worker has loaded, by section of a fingerprint; raise what kept it from loading."""
    facts: dict[str, Any] = get_loaded().facts
    return facts


def _load(setup: RenderSetup) -> _Loaded:
    from pipeline.products.images.rendering import load_exact_vae, load_pipeline
    from pipeline.products.images.scoring import ClipScorer

    candidate, serving = setup.candidate, setup.candidate.serving
    pipe = load_pipeline(setup.root / candidate.checkpoint.path, serving)
    for key, part in (("unet_dtype", pipe.unet), ("vae_dtype", pipe.vae)):
        if (dtype := str(part.dtype).removeprefix("torch.")) != getattr(serving, key):
            raise EngineError(
                f"serving.{key}: the candidate says {getattr(serving, key)!r}, the pipeline loaded "
                f"{dtype!r}; diffusers keeps some parts in another format: correct the step"
            )
    loaded = _Loaded(
        candidate,
        pipe,
        load_exact_vae(setup.source),
        ClipScorer(setup.root / setup.settings.clip),
        setup.settings.oversaturated_above,
        candidate.facts | read_machine_facts(),
    )
    _check_files(setup)  # after they were read: what is digested is what runs
    return loaded


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
        if digest_checkpoint(folder) != digest:
            raise EngineError(f"{folder}: its files changed while this ran; run `dvc repro` again")


def render_batch(batch: Sequence[PromptCase], category: str | None) -> Rendered:
    """Render prompts together and judge each image.

    Args:
        batch: cases that share a guidance.
        category: the bucket that has this guidance, None for the candidate's own.
    """
    from pipeline.products.images.rendering import Prompt, count_cut_tokens, list_stitches, make_latents
    from pipeline.products.images.scoring import blank, score_images, to_bytes
    from pipeline.running.timing import time_call

    loaded: _Loaded = get_loaded()
    vae = loaded.pipe.vae
    tiling = loaded.candidate.serving.tiling
    prompts = [Prompt(case.prompt, case.seed, category) for case in batch]
    latents, denoise_s = time_call(lambda: make_latents(loaded.pipe, prompts, loaded.candidate.serving), vae.device)
    is_broken = ~latents.values.isfinite().flatten(1).all(1)
    values = blank(latents.values, is_broken)  # the decoder would spread it, and be blamed
    raw, exact, decode_s, exact_decode_s, ranges = _decode_both_ways(loaded, values)
    raw = blank(raw, is_broken, float("nan"))
    pixels = to_bytes(raw).cpu()
    clip = loaded.clip.score(pixels, [case.prompt for case in batch])
    scores = score_images(
        raw.cpu(),
        exact.cpu(),
        latents.values.cpu(),
        clip,
        latents.mean_std_ratios(),
        list_stitches(vae, values, tiling),
        oversaturated_above=loaded.oversaturated_above,
    )
    records = tuple(
        CaseRecord(
            case_id=case.id,
            input_digest=case.digest,
            cluster=case.cluster,
            buckets=case.buckets,
            prompt=case.prompt,
            output=hashlib.sha256(pixels[i].numpy().tobytes()).hexdigest(),
            scores=scores[i] | {"cut_tokens": float(count_cut_tokens(loaded.pipe, case.prompt))},
            latency_s=(denoise_s + decode_s) / len(batch),
            fingerprint=fingerprint(loaded.facts),
        )
        for i, case in enumerate(batch)
    )
    ratios = tuple(float(step.nanmean()) for step in latents.std_ratios)
    return Rendered(
        records,
        tuple(_write_png(p) for p in pixels),
        ranges,
        ratios,
        denoise_s,
        decode_s,
        exact_decode_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def _decode_both_ways(loaded: _Loaded, latents: Any) -> tuple[Any, Any, float, float, dict[str, Any]]:
    """Decode as the candidate does and in float32; time both in turn, and watch the former once more.

    Returns:
        Both raw decodes, the seconds of both, the range of each module of the candidate's decoder.
    """
    from pipeline.numerics.activation_watch import ActivationWatch
    from pipeline.products.images.rendering import decode_latents
    from pipeline.running.timing import time_call

    vae, tiling = loaded.pipe.vae, loaded.candidate.serving.tiling
    with ActivationWatch(vae.decoder) as watch:  # also warms up what is timed
        decode_latents(vae, latents, tiling)
    runs = {
        "ours": lambda: decode_latents(vae, latents, tiling),
        "exact": lambda: decode_latents(loaded.exact_vae, latents),
    }
    loaded.num_batches += 1
    timed = {name: time_call(runs[name], vae.device) for name in sorted(runs, reverse=bool(loaded.num_batches % 2))}
    (raw, decode_s), (exact, exact_decode_s) = timed["ours"], timed["exact"]
    return raw, exact, decode_s, exact_decode_s, watch.read()


def _write_png(pixels: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return buffer.getvalue()
