"""Render every prompt with one candidate, judge each image, and write the evaluation folder.

All candidates get the same prompts and seeds, so every comparison is paired. Finished batches are journaled with
their pixels and notes: a killed run renders none of them twice, and the next one knows as much. The folder holds
records as of any other eval, the images as PNG, and a file of notes: the range of every decoder module, time, memory,
what guidance did at each step, and of the reference the floor of likeness (`other_seeds.py`).
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.evalsets.cases import PromptCase
from pipeline.product import OpenReplica
from pipeline.products.images.other_seeds import Drawn, choose_other_seeds, measure_floor
from pipeline.products.images.results import name_batch
from pipeline.products.images.settings import ImagesEval, ImagesProduct
from pipeline.products.images.workers import (
    RenderSetup,
    count_products,
    measure_decode_mib,
    read_facts,
    render_batch,
    start_renderers,
    trace_batch,
)
from pipeline.records.digests import digest_checkpoint, digest_json
from pipeline.records.evaluations import EvalFile, Evaluation, ImageCandidate
from pipeline.records.files import write_bytes, write_text
from pipeline.records.medians import MIN_ROUNDS, bound_median
from pipeline.records.record_files import write_cases
from pipeline.running.evaluation_folder import make_evaluation
from pipeline.running.journal import Journal
from pipeline.running.progress import Progress
from pipeline.running.shards import AttemptFolder, Shard, choose_batches
from pipeline.running.stage_code import digest_code
from pipeline.running.tracing import SUFFIX, TRACES, tolerate_failure
from pipeline.running.worker_pool import run_tasks


def evaluate_images(
    candidate: ImageCandidate,
    product: ImagesProduct,
    *,
    root: Path,
    build: Path,
    renderers: Mapping[str, Executor] | None = None,
) -> Evaluation:
    """Evaluate one candidate and write `evaluations/<name>/` under `build`.

    Args:
        candidate: what stage optimize wrote, with its serving config.
        product: settings.
        root: project root, which paths of checkpoints and evalsets are relative to.
        build: folder of the product's results.
        renderers: by eval, processes that have drawn prompts of it and go on running; others are started.

    Raises:
        CheckpointError: a pipeline or the CLIP can't be loaded.
        EngineError: the pipeline refused a prompt, is not what the candidate says, or a worker died.
        JournalError: another process evaluates the candidate.
    """
    files: dict[str, EvalFile] = {}
    facts = candidate.facts
    with make_evaluation(candidate, build) as working:
        for name, settings in product.evals.items():
            evalset = load_evalset(root / settings.evalset)
            setup = _prepare(name, evalset, candidate, product, root=root, build=build)
            key = setup.key
            running = (renderers or {}).get(name)
            starting = contextlib.nullcontext(running) if running else None
            with starting or start_renderers(setup, product.resources.num_workers) as pool:
                facts = pool.submit(read_facts).result()
                with working.open_journal(name, facts, key=key) as journal:
                    again = choose_other_seeds(evalset.cases) if candidate.name == product.reference else []
                    _run_eval(name, evalset, again, candidate, pool, journal, working.path)
                if product.candidates[candidate.name].trace and not files:  # one trace, whatever the evals
                    batch, category = next(_batch(evalset.cases, candidate))
                    with tolerate_failure(candidate.name):
                        path = working.path / TRACES / f"worker-0{SUFFIX}"
                        pool.submit(trace_batch, batch, category, path).result()
            files[name] = working.build_eval_file(name, settings, evalset, key=key)
        return working.finish(files, facts, proof="loaded and run by the processes that rendered")


@contextlib.contextmanager
def open_replica(
    candidate: ImageCandidate, product: ImagesProduct, *, root: Path, build: Path
) -> Iterator[OpenReplica]:
    """Yield what draws shards of the prompts; the processes that draw start with the first.

    Args:
        candidate: what stage optimize wrote, with its serving config.
        product: settings.
        root: project root.
        build: folder of the product's results.
    """
    pools: dict[str, Executor] = {}
    with contextlib.ExitStack() as stack:

        def draw(shard: Shard) -> int:
            attempt = AttemptFolder(build, candidate.name, shard)
            for name, settings in product.evals.items():
                evalset = load_evalset(root / settings.evalset)
                setup = _prepare(name, evalset, candidate, product, root=root, build=build)
                if name not in pools:
                    pools[name] = stack.enter_context(start_renderers(setup, product.resources.num_workers))
                facts = pools[name].submit(read_facts).result()
                with attempt.open_journal(name, facts, key=setup.key) as journal:
                    again = choose_other_seeds(evalset.cases) if candidate.name == product.reference else []
                    batches = [
                        batch
                        for cases in (evalset.cases, again)
                        for batch in choose_batches(
                            list(_batch(cases, candidate)), shard, lambda batch: [case.cluster for case in batch[0]]
                        )
                    ]
                    _render(name, batches, pools[name], journal)
            return attempt.finish()

        def finish(_: Sequence[bytes]) -> None:
            evaluate_images(candidate, product, root=root, build=build, renderers=pools)

        yield OpenReplica(draw, finish)


def _prepare(
    name: str, evalset: Evalset, candidate: ImageCandidate, product: ImagesProduct, *, root: Path, build: Path
) -> RenderSetup:
    """Return what a worker needs for one eval."""
    settings = product.evals[name]
    judges = digest_judges(product, settings, root)
    return RenderSetup(
        candidate,
        source=root / product.candidates[product.reference].checkpoint,
        settings=settings,
        root=root,
        judges=judges,
        key=digest_work(settings, evalset, judges),
        latents=build / "latents" / name,
        is_reference=candidate.name == product.reference,
    )


def _run_eval(
    name: str,
    evalset: Evalset,
    again: Sequence[PromptCase],
    candidate: ImageCandidate,
    pool: Executor,
    journal: Journal,
    folder: Path,
) -> None:
    """Render what the journal does not hold, and write the eval's records, images and notes to a folder.

    Args:
        name: of the eval.
        evalset: its prompts.
        again: cases of it with other seeds, which are drawn for the floor of likeness and get no record.
        candidate: what renders.
        pool: its processes.
        journal: of what is done.
        folder: where to write.
    """
    start = time.monotonic()
    # rounding depends on who shares a batch: the same ones do after a kill
    batches = list(_batch(evalset.cases, candidate))
    _render(name, [*batches, *_batch(again, candidate)], pool, journal)
    records = []
    for case in evalset.cases:
        record, picture = _find_drawn(journal, case)
        records.append(record)
        write_bytes(folder / name / f"{record.case_id}.png", picture)
    write_cases(folder / f"{name}.jsonl", records)
    noted = [journal.find_text(name_batch(*batch)) for batch in batches]
    notes = _build_notes([json.loads(text) for text in noted if text is not None], candidate) | {
        "decode_peak_mib": round(pool.submit(measure_decode_mib, candidate.serving.batch_size).result(), 2)
    }
    # also of a pipeline that came quantised
    if (products := pool.submit(count_products, *batches[0]).result()) is not None:
        notes["quantized"] = products
    if again:
        by_id = {case.id: case for case in evalset.cases}
        pairs = [(_find_drawn(journal, by_id[case.id]), _find_drawn(journal, case)) for case in again]
        notes["other_seed_ssim"] = measure_floor(pairs)
    write_text(folder / f"{name}.json", json.dumps(notes, indent=1) + "\n")
    sound = sum(r.scores["sound"] for r in records)
    print(f"  {name}: n={len(records)}, {sound:.0f} sound, {time.monotonic() - start:.1f} s", file=sys.stderr)


def _find_drawn(journal: Journal, case: PromptCase) -> Drawn:
    """Return the record and the PNG of a case that was drawn."""
    record, picture = journal.find(case.digest) or (None, None)
    assert record is not None and picture is not None
    return record, base64.b64decode(picture)


def _batch(cases: Sequence[PromptCase], candidate: ImageCandidate) -> Iterator[tuple[list[PromptCase], str | None]]:
    """Yield batches of cases of one guidance category, in evalset order within each."""
    guided = candidate.serving.guidance_by_category
    by_category: dict[str | None, list[PromptCase]] = {}
    for case in cases:
        by_category.setdefault(next((b for b in case.buckets if b in guided), None), []).append(case)
    size = candidate.serving.batch_size
    for category, group in by_category.items():
        for i in range(0, len(group), size):
            yield group[i : i + size], category


def _render(
    name: str, batches: Sequence[tuple[list[PromptCase], str | None]], pool: Executor, journal: Journal
) -> None:
    """Render what the journal lacks as workers come free; journal each image, with what is noted of its batch."""
    left = [(batch, category) for batch, category in batches if not all(journal.holds(c.digest) for c in batch)]
    total, num_left = (sum(len(batch) for batch, _ in some) for some in (batches, left))
    progress = Progress(name, total=total, kept=total - num_left, unit="pictures")
    with ThreadPoolExecutor() as threads:
        for place, rendered in run_tasks(pool, render_batch, left):
            cases, category = left[place]
            noted = json.dumps(rendered.as_json() | {"num": len(cases)})
            # first: a batch counts as finished when all its images do
            journal.add_text(name_batch(cases, category), noted, is_measured=True)
            pictures = threads.map(_write_png, rendered.pixels)  # while workers render
            for case, record, picture in zip(cases, rendered.records, pictures, strict=True):
                journal.add(case.digest, record, base64.b64encode(picture).decode())
            progress.advance(len(cases))


def _write_png(pixels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _build_notes(batches: Sequence[Mapping[str, Any]], candidate: ImageCandidate) -> dict[str, Any]:
    """Return the notes of the eval from the notes of all batches, whichever run made them.

    Time is measured as in pipeline/running/timing.py, that of decodes in the first batches of each process alone. Fewer
    than six batches give no interval of the ratio. Where latents were taken, few were drawn here, and by processes that
    had just begun: they give no time of a step.
    """
    from pipeline.numerics.activation_watch import ModuleRange
    from pipeline.products.images.scoring import build_range_notes

    timed = [(batch["num"], *batch["decode_s"]) for batch in batches if batch["decode_s"]]
    num_pictures = sum(batch["num"] for batch in batches)
    num_taken = sum(batch["num"] for batch in batches if batch["denoise_s"] is None)
    denoise_ms = None if num_taken else 1000 * sum(batch["denoise_s"] for batch in batches) / num_pictures
    decode_ms = 1000 * sum(ours for _, ours, _ in timed) / sum(num for num, *_ in timed)
    ratios = [ours / exact for _, ours, exact in timed if exact]
    steps = zip(*(batch["std_ratios"] for batch in batches), strict=False)
    ranges = [{name: ModuleRange(*numbers) for name, numbers in batch["ranges"].items()} for batch in batches]
    return {
        "denoise_ms_per_image": None if denoise_ms is None else round(denoise_ms, 3),
        "step_ms_per_image": (
            None if denoise_ms is None else round(denoise_ms / candidate.serving.num_inference_steps, 4)
        ),
        "decode_ms_per_image": round(decode_ms, 3),
        "decode_to_float32": bound_median(ratios).model_dump() if len(ratios) >= MIN_ROUNDS else None,
        "num_taken": num_taken,
        "latents_differ": any(batch["latents_differ"] for batch in batches),
        "std_ratio_by_step": [round(statistics.fmean(values), 5) for values in map(_drop_nan, steps) if values],
        "peak_memory_mib": round(max(batch["peak_memory_mib"] for batch in batches), 1),
        "peak_gpu_memory_mib": max(round(batch["peak_gpu_memory_mib"] or 0, 1) for batch in batches) or None,
        "decoder": build_range_notes(ranges, candidate.serving.vae_dtype),
    }


def _drop_nan(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def digest_judges(product: ImagesProduct, settings: ImagesEval, root: Path) -> dict[Path, str]:
    """Return the digests of what images are judged by: the reference's pipeline, whose VAE is exact, and the CLIP."""
    folders = (root / product.candidates[product.reference].checkpoint, root / settings.clip)
    return {folder: digest_checkpoint(folder) for folder in folders}


def digest_work(settings: ImagesEval, evalset: Evalset, judges: Mapping[Path, str]) -> str:
    """Return the key of an eval's records: the digest of its settings, prompts, judges, and the code that judges."""
    return digest_json(
        [settings.model_dump(), evalset.digest, list(judges.values()), digest_code("evaluate", "images")]
    )
