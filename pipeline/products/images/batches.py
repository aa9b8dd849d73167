"""Render a batch and judge each of its images, on the device that the pipeline is on.

Pixels leave a GPU once, as bytes. The decode in float32 and the scores take a batch in parts there (`split_batch`),
and the decode runs on its tensor cores (`SplitProducts`).
"""

from __future__ import annotations

import hashlib
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.evalsets.cases import PromptCase
from pipeline.numerics.activation_watch import ActivationWatch
from pipeline.numerics.split_products import SplitProducts
from pipeline.products.images.gpu_memory import read_peak_mib, split_batch
from pipeline.products.images.rendering import (
    Latents,
    Prompt,
    count_cut_tokens,
    decode_latents,
    list_stitches,
    make_latents,
)
from pipeline.products.images.results import Rendered, name_batch
from pipeline.products.images.scoring import blank, score_images, to_bytes
from pipeline.products.images.shared_latents import SharedLatents
from pipeline.records.evaluations import CaseRecord, ImageCandidate
from pipeline.records.fingerprints import fingerprint
from pipeline.running.timing import time_call

NUM_TIMED = 9  # batches of a process whose decodes are timed: the fewest where one that is slow moves no interval


@dataclass
class Loaded:
    """What the process of a worker holds."""

    candidate: ImageCandidate
    pipe: Any
    exact_vae: Any
    clip: Any
    oversaturated_above: float
    facts: dict[str, Any]
    shared: SharedLatents
    denoise_s: list[float] = field(default_factory=list)  # an image, of each batch that was drawn here
    decode_s: list[float] = field(default_factory=list)  # an image, of each batch that was timed


def render(loaded: Loaded, batch: Sequence[PromptCase], category: str | None) -> Rendered:
    """Render prompts together and judge each image; see `workers.render_batch`."""
    vae = loaded.pipe.vae
    tiling = loaded.candidate.serving.tiling
    latents, denoise_s = _denoise(loaded, batch, category)
    is_broken = ~latents.values.isfinite().flatten(1).all(1)
    values = blank(latents.values, is_broken)  # the decoder would spread it, and be blamed
    parts = split_batch(len(batch), (values.shape[2] * loaded.pipe.vae_scale_factor) ** 2, vae.device)
    raw, exact, timed, ranges = _decode_both_ways(loaded, values, parts)
    latency_s = _latest(loaded.denoise_s, denoise_s is not None) + _latest(loaded.decode_s, timed is not None)
    raw = blank(raw, is_broken, float("nan"))
    seen, std_ratios, stitches = to_bytes(raw), latents.mean_std_ratios(), list_stitches(vae, values, tiling)
    scores = [
        score
        for part in parts
        for score in score_images(
            raw[part],
            exact[part],
            latents.values[part],
            loaded.clip.score(seen[part], [case.prompt for case in batch[part]]),
            std_ratios[part],
            stitches,
            oversaturated_above=loaded.oversaturated_above,
        )
    ]
    pixels = seen.cpu()
    records = tuple(
        CaseRecord(
            case_id=case.id,
            input_digest=case.digest,
            cluster=case.cluster,
            buckets=case.buckets,
            prompt=case.prompt,
            output=hashlib.sha256(pixels[i].numpy().tobytes()).hexdigest(),
            scores=scores[i] | {"cut_tokens": float(count_cut_tokens(loaded.pipe, case.prompt))},
            latency_s=latency_s,
            fingerprint=fingerprint(loaded.facts),
        )
        for i, case in enumerate(batch)
    )
    ratios = tuple(float(step.nanmean()) for step in latents.std_ratios)
    return Rendered(
        records,
        pixels.permute(0, 2, 3, 1).contiguous().numpy(),
        ranges,
        ratios,
        denoise_s,
        loaded.shared.differ,
        timed,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        read_peak_mib(),
    )


def _latest(seconds: Sequence[float], is_timed: bool) -> float:
    """Return an image's seconds in a batch: its own where it was timed, otherwise what the others took."""
    return seconds[-1] if is_timed else statistics.median(seconds)


def _denoise(loaded: Loaded, batch: Sequence[PromptCase], category: str | None) -> tuple[Latents, float | None]:
    """Draw a batch's latents, or take the reference's where they are the same; None for the seconds of those."""
    shared, device, name = loaded.shared, loaded.pipe.vae.device, name_batch(batch, category)
    if taken := shared.take(name, device):
        return taken, None
    prompts = [Prompt(case.prompt, case.seed, category) for case in batch]
    latents, seconds = time_call(lambda: make_latents(loaded.pipe, prompts, loaded.candidate.serving), device)
    loaded.denoise_s.append(seconds / len(batch))
    shared.keep_or_compare(name, latents)
    return latents, seconds


def _decode_both_ways(
    loaded: Loaded, latents: Any, parts: Sequence[slice]
) -> tuple[Any, Any, tuple[float, float] | None, dict[str, Any]]:
    """Decode as the candidate does, watched, and in float32; time both in turn in the first batches.

    Args:
        loaded: the candidate, and the float32 decoder.
        latents: of a batch.
        parts: of it that are decoded together in float32.

    Returns:
        Both raw decodes, the seconds of both where timed, the range of each module of the candidate's decoder.
        Float32 is timed as it would serve, on the first part; on a GPU the decode that judges is another.
    """
    vae, tiling = loaded.pipe.vae, loaded.candidate.serving.tiling
    with ActivationWatch(vae.decoder) as watch:  # also warms up what is timed
        raw = decode_latents(vae, latents, tiling)

    def decode_exactly() -> torch.Tensor:
        with SplitProducts():
            return torch.cat([decode_latents(loaded.exact_vae, latents[part]) for part in parts])

    if (num_timed := len(loaded.decode_s)) == NUM_TIMED:
        return raw, decode_exactly(), None, watch.read()
    first = latents[parts[0]]
    runs = {
        "ours": lambda: decode_latents(vae, latents, tiling),
        "exact": lambda: decode_latents(loaded.exact_vae, first),
    }
    timed = {name: time_call(runs[name], vae.device) for name in sorted(runs, reverse=bool(num_timed % 2))}
    exact, exact_s = timed["exact"]
    seconds = timed["ours"][1], exact_s * len(latents) / len(first)
    loaded.decode_s.append(seconds[0] / len(latents))
    is_whole = vae.device.type == "cpu" and len(parts) == 1
    return raw, exact if is_whole else decode_exactly(), seconds, watch.read()
