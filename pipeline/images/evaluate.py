"""Render every prompt with one candidate, judge each image, and write the evaluation folder.

All candidates get the same prompts and seeds, so every comparison is paired. Finished images are journaled with
their pixels: a killed run renders none of them twice. The folder holds records as of any other eval, the images as
PNG, and a file of notes: the range of every decoder module, seconds, peak memory.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.cases import PromptCase
from pipeline.digests import digest_file, digest_json
from pipeline.environment import read_hardware
from pipeline.errors import EngineError
from pipeline.evals.journal import Journal
from pipeline.evalsets import Evalset, load_evalset
from pipeline.fingerprints import fingerprint, read_environment
from pipeline.image_params import ImagesEval, ImageTrack
from pipeline.images.rendering import Prompt, decode_latents, load_pipeline, make_latents, unscale_latents
from pipeline.images.scoring import ClipScorer, describe_activations, score_images, to_bytes
from pipeline.numerics.activation_watch import ActivationWatch
from pipeline.records import CaseRecord, EvalFile, Evaluation, ImageCandidate, write_cases, write_record, write_text

# what renders and scores
_CODE = ("images/*.py", "numerics/*.py", "cases.py", "evalsets.py", "records.py")
_PROGRESS_EVERY_S = 10.0


@dataclass
class _Loaded:
    """What one candidate renders and is judged with."""

    pipe: Any
    exact_vae: Any  # the reference's VAE in float32
    clip: ClipScorer
    facts: dict[str, Any]
    watch: ActivationWatch
    decode_s: float = 0.0
    denoise_s: float = 0.0


def evaluate_images(candidate: ImageCandidate, track: ImageTrack, *, root: Path, build: Path) -> Evaluation:
    """Evaluate one candidate and write `evaluations/<name>/` under `build`.

    Args:
        candidate: what stage optimize_images wrote, with its serving config.
        track: the section `images` of params.yaml.
        root: project root, which paths of checkpoints and evalsets are relative to.
        build: folder of the track's results.

    Raises:
        CheckpointError: a pipeline or the CLIP can't be loaded.
        EngineError: the pipeline refused a prompt, or is not what the candidate says.
    """
    start = time.monotonic()
    target = build / "evaluations" / candidate.name
    working = target.with_name(f".{candidate.name}.new")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    code, files, loaded = _digest_code(), {}, None
    for name, settings in track.evals.items():
        evalset = load_evalset(root / settings.evalset)
        loaded = _load(candidate, track, settings, root)
        key = digest_json([settings.model_dump(), evalset.digest, code])
        files[name] = _run_eval(name, settings, evalset, loaded, candidate, working, build, key)
    assert loaded is not None
    evaluation = Evaluation(
        candidate=candidate.name, fingerprint=fingerprint(loaded.facts),
        checkpoint_digest=candidate.checkpoint.digest, serving=candidate.serving, evals=files,
        served_by=loaded.facts, proof="rendered in this process", seconds=round(time.monotonic() - start, 3),
    )  # fmt: skip
    write_record(working / "evaluation.json", evaluation)
    shutil.rmtree(target, ignore_errors=True)
    working.rename(target)
    shutil.rmtree(build / "journal" / candidate.name, ignore_errors=True)
    return evaluation


def _load(candidate: ImageCandidate, track: ImageTrack, settings: ImagesEval, root: Path) -> _Loaded:
    pipe = load_pipeline(root / candidate.checkpoint.path, candidate.serving)
    found = {"unet_dtype": pipe.unet.dtype, "vae_dtype": pipe.vae.dtype}
    for key, dtype in found.items():
        if (name := str(dtype).removeprefix("torch.")) != getattr(candidate.serving, key):
            raise EngineError(f"serving.{key}: the candidate says {getattr(candidate.serving, key)!r}, the pipeline "
                              f"loaded {name!r}; diffusers keeps some parts in another format: correct the step")
    source = track.candidates[track.reference].checkpoint
    plain = candidate.serving.model_copy(update={"unet_dtype": "float32", "vae_dtype": "float32", "channels_last": ()})
    exact = load_pipeline(root / source, plain).vae
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = candidate.facts | {"environment": read_environment(), "hardware": read_hardware(device)}
    return _Loaded(pipe, exact, ClipScorer(root / settings.clip), facts, ActivationWatch(pipe.vae.decoder))


def _run_eval(
    name: str, settings: ImagesEval, evalset: Evalset, loaded: _Loaded, candidate: ImageCandidate, working: Path,
    build: Path, key: str,
) -> EvalFile:  # fmt: skip
    answered_by = fingerprint(loaded.facts)
    start = last = time.monotonic()
    with Journal(build / "journal" / candidate.name / f"{name}.jsonl", fingerprint=answered_by, key=key) as journal:
        # rounding depends on who shares a batch: the same ones do after a kill
        left = [batch for batch in _batch(evalset.cases, candidate)
                if any(journal.find(case.digest) is None for case in batch)]  # fmt: skip
        for i, batch in enumerate(left):
            for case, record, png in _render(batch, candidate, loaded, answered_by):
                journal.add(case.digest, record, base64.b64encode(png).decode())
            if time.monotonic() - last > _PROGRESS_EVERY_S:
                last = time.monotonic()
                print(f"  {name}: {i + 1}/{len(left)} batches", file=sys.stderr, flush=True)
        found = [journal.find(case.digest) for case in evalset.cases]
        records = []
        (working / name).mkdir()
        for entry in found:
            assert entry is not None and entry[1] is not None
            records.append(entry[0])
            (working / name / f"{entry[0].case_id}.png").write_bytes(base64.b64decode(entry[1]))
    write_cases(working / f"{name}.jsonl", records)
    write_text(working / f"{name}.json", json.dumps(_describe(loaded, candidate, sum(map(len, left))), indent=1) + "\n")
    sound = sum(r.scores["sound"] for r in records)
    print(f"  {name}: n={len(records)}, {sound:.0f} sound, {time.monotonic() - start:.1f} s", file=sys.stderr)
    return EvalFile(kind=settings.kind, settings=settings.model_dump(mode="json"), key=key,
                    evalset_digest=evalset.digest, num_cases=len(records), records=f"{name}.jsonl",
                    sha256=digest_file(working / f"{name}.jsonl"),
                    notes_sha256=digest_file(working / f"{name}.json"))  # fmt: skip


def _batch(cases: Sequence[PromptCase], candidate: ImageCandidate) -> Iterator[list[PromptCase]]:
    """Yield batches of cases of one guidance category, in evalset order within each."""
    by_category: dict[str | None, list[PromptCase]] = {}
    for case in cases:
        by_category.setdefault(_find_category(case, candidate), []).append(case)
    size = candidate.serving.batch_size
    for group in by_category.values():
        for i in range(0, len(group), size):
            yield group[i : i + size]


def _find_category(case: PromptCase, candidate: ImageCandidate) -> str | None:
    return next((bucket for bucket in case.buckets if bucket in candidate.serving.guidance_by_category), None)


def _render(
    batch: list[PromptCase], candidate: ImageCandidate, loaded: _Loaded, answered_by: str
) -> Iterator[tuple[PromptCase, CaseRecord, bytes]]:
    prompts = [Prompt(case.prompt, case.seed, _find_category(case, candidate)) for case in batch]
    start = time.perf_counter()
    latents = make_latents(loaded.pipe, prompts, candidate.serving)
    denoised = time.perf_counter()
    with loaded.watch:
        raw = decode_latents(loaded.pipe.vae, latents.values)
    decoded = time.perf_counter()
    loaded.denoise_s += denoised - start
    loaded.decode_s += decoded - denoised
    exact = decode_latents(loaded.exact_vae, latents.values)
    pixels = to_bytes(raw).cpu()
    clip = loaded.clip.score(pixels, [case.prompt for case in batch])
    scores = score_images(raw.cpu(), exact.cpu(), unscale_latents(loaded.pipe.vae, latents.values).cpu(), clip)
    ratios = torch.stack(latents.std_ratios).mean(0) if latents.std_ratios else None
    for i, case in enumerate(batch):
        more = {} if ratios is None else {"guided_std_ratio": float(ratios[i])}
        png = _write_png(pixels[i])
        yield case, CaseRecord(
            case_id=case.id, input_digest=case.digest, cluster=case.cluster, buckets=case.buckets, prompt=case.prompt,
            output=hashlib.sha256(pixels[i].numpy().tobytes()).hexdigest(), scores=scores[i] | more,
            latency_s=(decoded - start) / len(batch), fingerprint=answered_by,
        ), png  # fmt: skip


def _write_png(pixels: torch.Tensor) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def _describe(loaded: _Loaded, candidate: ImageCandidate, num_rendered: int) -> dict[str, Any]:
    per_image = 1000 / num_rendered if num_rendered else 0.0
    return {
        "num_rendered": num_rendered,  # the others were taken from the journal
        "decode_ms_per_image": round(loaded.decode_s * per_image, 3),
        "denoise_ms_per_image": round(loaded.denoise_s * per_image, 3),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "decoder": describe_activations(loaded.watch.read(), candidate.serving.vae_dtype),
    }


def _digest_code() -> str:
    package = Path(__file__).parents[1]
    files = sorted(path for pattern in _CODE for path in package.glob(pattern))
    return digest_json({path.relative_to(package).as_posix(): digest_file(path) for path in files})
