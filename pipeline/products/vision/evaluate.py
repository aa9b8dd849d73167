"""Run every picture of an eval through one candidate, judge what comes out, and write the evaluation folder.

All candidates get the same pictures in the same batches, so every comparison is paired. Finished pictures are
journaled: a killed run goes on at the next batch. The folder holds records as of any other eval, the matched
detections of a detector or the pictures of an upscaler as PNG, and a file of notes: how far each layer is from
float32, time, memory, compilation.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from pathlib import Path

from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.evalsets.cases import spread
from pipeline.evalsets.pictures import measure_picture
from pipeline.product import OpenReplica
from pipeline.products.vision.detecting import Categories, build_categories, save_tables
from pipeline.products.vision.detection_settings import DetectionEval
from pipeline.products.vision.settings import UpscalingEval, VisionProduct
from pipeline.products.vision.workers import (
    InferenceSetup,
    PictureCase,
    ShapeBatch,
    measure_run,
    read_beside,
    read_facts,
    run_batch,
    start_runners,
    trace_batch,
    try_batch,
)
from pipeline.records.digests import digest_checkpoint, digest_file, digest_json
from pipeline.records.evaluations import EvalFile, Evaluation, NetworkCandidate
from pipeline.records.files import write_bytes, write_text
from pipeline.records.record_files import write_cases
from pipeline.running.evaluation_folder import make_evaluation
from pipeline.running.journal import Journal
from pipeline.running.progress import Progress
from pipeline.running.shards import AttemptFolder, Shard, choose_batches
from pipeline.running.stage_code import digest_code
from pipeline.running.tracing import SUFFIX, TRACES, tolerate_failure
from pipeline.running.worker_pool import run_tasks

Shape = tuple[int, int]  # rows and columns
Groups = Mapping[Shape, list[PictureCase]]
_NUM_COMPARED = 4  # pictures of the most common size, on which layers are compared


def evaluate_network(candidate: NetworkCandidate, product: VisionProduct, *, root: Path, build: Path) -> Evaluation:
    """Evaluate one candidate and write `evaluations/<name>/` under `build`.

    Args:
        candidate: what stage optimize wrote, with its serving config.
        product: a section of params.yaml.
        root: project root, which paths are relative to.
        build: folder of the product's results.

    Raises:
        CheckpointError: the network can't be loaded.
        EngineError: it failed on a picture, is not what the candidate says, or a worker died.
        EvalsetError: a picture is missing or was changed.
        JournalError: another process evaluates the candidate.
    """
    files: dict[str, EvalFile] = {}
    facts = candidate.facts
    with make_evaluation(candidate, build) as working:
        for name, settings in product.evals.items():
            evalset = load_evalset(root / settings.evalset)
            key = digest_work(product, settings, evalset, root)
            cache = working.path / ".compiled"
            # what shards have judged was beside pictures of their own
            made = None if working.has_shards else build / "evaluations" / product.reference
            with _start(candidate, product, name, evalset, root=root, key=key, made=made, cache=cache) as pool:
                facts, beside = pool.submit(read_facts).result(), pool.submit(read_beside).result()
                work = digest_json([key, beside]) if beside else key
                with working.open_journal(name, facts, key=work) as journal:
                    _run_eval(
                        name,
                        settings,
                        evalset,
                        pool,
                        journal,
                        working.path,
                        candidate.serving.batch_size,
                        root / settings.evalset,
                        beside,
                    )
                if product.candidates[candidate.name].trace and not files:  # one trace, whatever the evals
                    batches = _batch(_group(evalset.cases, root / settings.evalset), candidate.serving.batch_size)
                    with tolerate_failure(candidate.name):
                        pool.submit(trace_batch, batches[0], working.path / TRACES / f"worker-0{SUFFIX}").result()
            files[name] = working.build_eval_file(name, settings, evalset, key=key)
        return working.finish(files, facts, proof="loaded and run by the processes that judged")


@contextlib.contextmanager
def open_replica(
    candidate: NetworkCandidate, product: VisionProduct, *, root: Path, build: Path
) -> Iterator[OpenReplica]:
    """Yield what runs shards of the pictures; the processes that run them start with the first.

    Args:
        candidate: what stage optimize wrote, with its serving config.
        product: a section of params.yaml.
        root: project root.
        build: folder of the product's results.
    """
    size = candidate.serving.batch_size
    pools: dict[str, Executor] = {}
    with contextlib.ExitStack() as stack:

        def run(shard: Shard) -> int:
            attempt = AttemptFolder(build, candidate.name, shard)
            for name, settings in product.evals.items():
                evalset = load_evalset(root / settings.evalset)
                key = digest_work(product, settings, evalset, root)
                groups = _group(evalset.cases, root / settings.evalset)
                if name not in pools:
                    cache = attempt.path / f".compiled-{name}"
                    starting = _start(candidate, product, name, evalset, root=root, key=key, made=None, cache=cache)
                    pools[name] = stack.enter_context(starting)
                    if candidate.serving.compile_mode:  # for all shapes in turn, whichever of them the shard has
                        pools[name].submit(try_batch, _batch(groups, size)[0]).result()
                        pools[name].submit(measure_run, _choose_compared(groups), _pick_shapes(groups, size)).result()
                facts = pools[name].submit(read_facts).result()
                with attempt.open_journal(name, facts, key=key) as journal:
                    batches = _batch(groups, size)
                    own = choose_batches(batches, shard, lambda batch: [case.cluster for case in batch])
                    _run_batches(name, own, pools[name], journal)
            return attempt.finish()

        def finish(_: Sequence[bytes]) -> None:
            stack.close()  # an evaluation starts processes of its own
            evaluate_network(candidate, product, root=root, build=build)

        yield OpenReplica(run, finish)


def _start(
    candidate: NetworkCandidate,
    product: VisionProduct,
    name: str,
    evalset: Evalset,
    *,
    root: Path,
    key: str,
    made: Path | None,
    cache: Path,
) -> AbstractContextManager[Executor]:
    """Start the processes that run the pictures of an eval.

    Args:
        candidate: what runs.
        product: settings.
        name: of the eval.
        evalset: its cases.
        root: project root.
        key: of its records.
        made: the reference's evaluation; None: not to be used.
        cache: folder for what they compile.
    """
    settings = product.evals[name]
    setup = InferenceSetup(
        candidate=candidate,
        product=product.name,
        root=root,
        adapter=product.adapter,
        source=product.candidates[product.reference].checkpoint,
        settings=settings,
        key=key,
        is_reference=candidate.name == product.reference,
        reference=made / f"{name}.jsonl" if made else None,
        categories=_find_categories(settings, evalset),
    )
    # what one process compiles, another would compile again
    num_workers = 1 if candidate.serving.compile_mode else product.resources.num_workers
    return start_runners(setup, num_workers, cache=cache)


def _find_categories(settings: DetectionEval | UpscalingEval, evalset: Evalset) -> Categories | None:
    if isinstance(settings, DetectionEval):
        return build_categories(evalset.cases, evalset.card.categories, settings)
    return None


def _choose_compared(groups: Groups) -> list[PictureCase]:
    """Return the pictures on which layers are compared: of the most common size."""
    return spread(max(groups.values(), key=len), _NUM_COMPARED)


def _run_eval(
    name: str,
    settings: DetectionEval | UpscalingEval,
    evalset: Evalset,
    pool: Executor,
    journal: Journal,
    working: Path,
    batch_size: int,
    pictures: Path,
    beside: str | None,
) -> None:
    """Run what the journal does not hold, and write the eval's records, tables or pictures, and notes to a folder."""
    start = time.monotonic()
    groups = _group(evalset.cases, pictures)
    batches = _batch(groups, batch_size)
    if not any(journal.holds(case.digest) for case in evalset.cases):  # else the adapter has shown that it can
        pool.submit(try_batch, batches[0]).result()
    # before the pictures: it compiles for all shapes in turn, killed runs before or not, and is timed before freed
    # memory is kept
    notes = pool.submit(measure_run, _choose_compared(groups), _pick_shapes(groups, batch_size)).result()
    _run_batches(name, batches, pool, journal)
    path, records = working / f"{name}.jsonl", []
    for record, picture in filter(None, (journal.find(case.digest) for case in evalset.cases)):
        records.append(record)
        if picture is not None:
            write_bytes(working / name / f"{record.case_id}.png", base64.b64decode(picture))
    write_cases(path, records)
    if isinstance(settings, DetectionEval) and (categories := _find_categories(settings, evalset)) is not None:
        save_tables(path.with_suffix(".npz"), evalset.cases, records, settings, categories)
    write_text(path.with_suffix(".json"), json.dumps(notes | {"beside": beside}, indent=1) + "\n")
    finite = sum(r.scores["finite"] for r in records)
    print(f"  {name}: n={len(records)}, {finite:.0f} finite, {time.monotonic() - start:.1f} s", file=sys.stderr)


def _run_batches(name: str, batches: Sequence[Sequence[PictureCase]], pool: Executor, journal: Journal) -> None:
    """Run what the journal lacks as workers come free, and journal each picture; after a failure what still ends."""
    left = [batch for batch in batches if not all(journal.holds(case.digest) for case in batch)]
    total = sum(map(len, batches))
    progress = Progress(name, total=total, kept=total - sum(map(len, left)), unit="pictures")
    for place, judged in run_tasks(pool, run_batch, [(batch,) for batch in left]):
        for case, (record, picture) in zip(left[place], judged, strict=True):
            journal.add(case.digest, record, None if picture is None else base64.b64encode(picture).decode())
        progress.advance(len(judged))


def _group(cases: Sequence[PictureCase], folder: Path) -> dict[Shape, list[PictureCase]]:
    """Return cases by the rows and columns of their pictures, the largest first.

    Too large for the memory, they fail at once; what memory is kept of them is enough for all that come; and no worker
    ends alone with them while the others have nothing left.
    """
    groups: dict[Shape, list[PictureCase]] = {}
    for case in cases:
        groups.setdefault(measure_picture(folder / case.image), []).append(case)
    return {shape: groups[shape] for shape in sorted(groups, key=lambda shape: -shape[0] * shape[1])}


def _batch(groups: Groups, size: int) -> list[list[PictureCase]]:
    """Cut cases into batches whose pictures have one size."""
    return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]


def _pick_shapes(groups: Groups, size: int) -> list[ShapeBatch]:
    """Return one batch of each shape, full or not, and the number of pictures that are run so."""
    shapes = []
    for group in groups.values():
        rest = len(group) % size
        if full := len(group) - rest:
            shapes.append(ShapeBatch(group[:size], full))
        if rest:
            shapes.append(ShapeBatch(group[full:], rest))
    return shapes


def digest_work(product: VisionProduct, settings: DetectionEval | UpscalingEval, evalset: Evalset, root: Path) -> str:
    """Return the key of an eval's records: the digest of its settings, cases, adapter, reference, and the code."""
    reference = digest_checkpoint(root / product.candidates[product.reference].checkpoint)
    return digest_json(
        [
            settings.model_dump(),
            evalset.digest,
            digest_file(root / product.adapter),
            reference,
            digest_code("evaluate", "vision"),
        ]
    )
