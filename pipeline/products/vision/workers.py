"""Run and judge pictures in worker processes, one per core: each loads the candidate once."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from pipeline.errors import EngineError, NumericsError
from pipeline.evalsets.cases import DetectionCase, UpscalingCase
from pipeline.evalsets.pictures import measure_picture, read_picture
from pipeline.products.vision.adapters import Adapter, list_functions, load_adapter
from pipeline.products.vision.costs import measure_costs
from pipeline.products.vision.detecting import Categories, judge_results
from pipeline.products.vision.detection_settings import DetectionEval
from pipeline.products.vision.layer_numerics import build_layer_notes, compare_layers
from pipeline.products.vision.loading import Network, load_network
from pipeline.products.vision.onnx_module import OnnxModule
from pipeline.products.vision.raw_outputs import find_finite, split_pictures
from pipeline.products.vision.settings import UpscalingEval
from pipeline.products.vision.upscaling import judge_picture
from pipeline.products.vision.wholes import digest_wholes, find_wholes, read_whole
from pipeline.records.digests import digest_files, digest_json, digest_pixels, name_changed_file
from pipeline.records.evaluations import CaseRecord, NetworkCandidate
from pipeline.records.fingerprints import fingerprint
from pipeline.records.serving import NetworkServing
from pipeline.running.environment import read_machine_facts
from pipeline.running.tracing import record_trace
from pipeline.running.worker_pool import choose_gpu, get_loaded, keep_freed_memory, start_workers

PictureCase = DetectionCase | UpscalingCase
_UNTAKEN = object()  # the results of a picture that the adapter could not take
Judged = tuple[CaseRecord, bytes | None]  # and the picture as PNG, of an upscaler


@dataclass(frozen=True)
class InferenceSetup:
    """What a worker loads, and how it judges."""

    candidate: NetworkCandidate
    product: str
    root: Path
    adapter: str  # relative to the root, as are the others
    source: str  # folder of the reference, which layers are compared with in float32
    settings: DetectionEval | UpscalingEval
    key: str  # of the eval's records
    is_reference: bool  # whether the candidate is the one that all others are compared with
    reference: Path | None  # the reference's own records of the eval, once it was evaluated; None: not to be used
    categories: Categories | None = None  # of a detection evalset


@dataclass
class _Loaded:
    setup: InferenceSetup
    adapter: Adapter
    network: Network
    facts: dict[str, Any]

    @cached_property
    def wholes(self) -> Mapping[str, CaseRecord]:
        """What the reference's own evaluation made of the pictures, by input; nothing where it is to be run here."""
        setup, candidate = self.setup, self.setup.candidate
        plain = candidate.model_copy(update={"serving": candidate.serving.plain})
        if not candidate.serving.tiling or setup.reference is None or Path(plain.checkpoint.path) != Path(setup.source):
            return {}
        return find_wholes(setup.reference, fingerprint(plain.facts | read_machine_facts()), setup.key)

    @cached_property
    def reference(self) -> Network:
        """The reference, which has no steps; loaded when it is first asked for."""
        return self.load(self.setup.candidate.serving.plain, self.setup.source)

    def load(self, serving: NetworkServing, folder: str | None = None) -> Network:
        """Set the candidate's weights, or those of another folder, up in another way."""
        return load_network(self.setup.root / (folder or self.setup.candidate.checkpoint.path), self.adapter, serving)


@contextlib.contextmanager
def start_runners(setup: InferenceSetup, num_workers: int, *, cache: Path) -> Iterator[Executor]:
    """Start processes that run pictures; see `worker_pool.start_workers`.

    Args:
        setup: what they load, and how they judge.
        num_workers: processes.
        cache: folder for what they compile, gone when they are.
    """
    workers = start_workers(
        _load,
        setup,
        num_workers,
        owner=setup.candidate.name,
        died=f"a process that ran pictures ended by itself, perhaps for lack of memory, or as {setup.adapter} ends it",
        remedy=f"lower products.{setup.product}.serving.batch_size or resources.num_workers; finished pictures are "
        "kept, run `dvc repro` to go on",
        needs_own_process=setup.candidate.serving.compile_mode is not None,  # what is compiled is timed from nothing
    )
    with _compile_into(cache), workers as pool:
        yield pool


@contextlib.contextmanager
def _compile_into(cache: Path) -> Iterator[None]:
    """Let processes that start now take over nothing that was compiled before them."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(cache.resolve()), "TRITON_CACHE_DIR": str(cache.resolve() / "triton")}
    before = {name: os.environ[name] for name in folders if name in os.environ}
    os.environ.update(folders)
    try:
        yield
    finally:
        for name in folders:
            del os.environ[name]
        os.environ.update(before)
        shutil.rmtree(cache, ignore_errors=True)


def _load(setup: InferenceSetup) -> _Loaded:
    candidate = setup.candidate
    torch.set_num_threads(candidate.serving.num_threads)
    gpu = choose_gpu(range(torch.cuda.device_count() if torch.cuda.is_available() else 0))
    if gpu is not None:
        torch.cuda.set_device(gpu)
    functions = list_functions(setup.root / candidate.checkpoint.path, setup.root / setup.source)
    adapter = load_adapter(setup.root / setup.adapter, functions)
    if adapter.digest != candidate.libraries.get("adapter"):
        raise EngineError(
            f"{adapter.path}: expected the adapter that candidate {candidate.name!r} was built with, "
            "found another; run `dvc repro` to build it again"
        )
    network = load_network(setup.root / candidate.checkpoint.path, adapter, candidate.serving)
    digests = digest_files(setup.root / candidate.checkpoint.path)  # after it was read: what is digested is what runs
    if digest_json(digests) != candidate.checkpoint.digest:
        changed = name_changed_file(candidate.checkpoint.files, digests)
        raise EngineError(
            f"{candidate.checkpoint.path}: expected the files that candidate {candidate.name!r} was "
            f"built of, {changed}; run `dvc repro` to build it again"
        )
    facts = candidate.facts | read_machine_facts()
    if isinstance(network.module, OnnxModule):
        facts["engine"] = network.module.facts
    return _Loaded(setup, adapter, network, facts)


def read_facts() -> dict[str, Any]:
    """Return what a worker has loaded, by section of a fingerprint; raise what kept it from loading."""
    facts: dict[str, Any] = get_loaded().facts
    return facts


def read_beside() -> str | None:
    """Return the digest of the reference's pictures that tiles are judged beside; None where it runs here."""
    loaded: _Loaded = get_loaded()
    return digest_wholes(loaded.wholes.values()) if loaded.wholes else None


def trace_batch(cases: Sequence[PictureCase], path: Path) -> None:
    """Trace one batch of pictures of one size on their way through the network."""
    loaded: _Loaded = get_loaded()
    x = loaded.network.prepare(torch.from_numpy(np.stack([_read(loaded, case) for case in cases])))
    with record_trace(path):
        loaded.network.run(x)


def run_batch(cases: Sequence[PictureCase]) -> list[Judged]:
    """Run pictures of one size together and judge what comes out."""
    keep_freed_memory()
    loaded: _Loaded = get_loaded()
    return _judge_batch(loaded, loaded.network, cases)


def try_batch(cases: Sequence[PictureCase]) -> None:
    """Run and judge pictures of one size and keep nothing: a mistake in the adapter is told before minutes of timing.

    What is compiled runs as it was written: that which serves has not run before it is timed.
    """
    loaded: _Loaded = get_loaded()
    serving = loaded.setup.candidate.serving
    eager = serving.model_copy(update={"compile_mode": None, "compile_dynamic": None})
    _judge_batch(loaded, loaded.network if eager == serving else loaded.load(eager), cases)


def _judge_batch(loaded: _Loaded, network: Network, cases: Sequence[PictureCase]) -> list[Judged]:
    pixels = np.stack([_read(loaded, case) for case in cases])
    try:
        outputs = network.run(network.prepare(torch.from_numpy(pixels)))
        finite = find_finite(loaded.adapter, outputs, len(cases))
        results = _finish(network, outputs, finite, pixels)
    except EngineError as error:  # of code that sees a batch, and no cases
        raise EngineError(f"{error}; the batch began with case {cases[0].id!r}") from None
    if (num := _count(results)) != len(cases):
        came = f"{type(results).__name__!r}" + ("" if num is None else f" of {num}")
        raise EngineError(
            f"{loaded.adapter.path}: postprocess() returned {came}, expected results of each of "
            f"{len(cases)} pictures; correct the adapter; the batch began with case {cases[0].id!r}"
        )
    mark, wholes = fingerprint(loaded.facts), _enlarge_whole(loaded, cases, pixels)
    judged = []
    for case, result, whole, given, is_finite in zip(cases, results, wholes, pixels, finite, strict=True):
        output, scores, picture = _judge(loaded, case, result, given, is_finite, whole)
        record = CaseRecord(
            case_id=case.id,
            input_digest=case.digest,
            cluster=case.cluster,
            buckets=case.buckets,
            prompt=f"{loaded.setup.settings.evalset}/{case.image}",
            output=output,
            scores=scores,
            fingerprint=mark,
        )
        judged.append((record, picture))
    return judged


def _enlarge_whole(
    loaded: _Loaded, cases: Sequence[PictureCase], pixels: NDArray[np.uint8]
) -> Sequence[torch.Tensor | None]:
    """Return what the reference makes of pictures that the candidate runs in tiles; None for each of others.

    It is run again here where its own evaluation has not made them (`wholes.py`).
    """
    if not loaded.setup.candidate.serving.tiling:
        return [None] * len(pixels)
    kept = [_read_whole(loaded, case) for case in cases]
    if all(picture is not None for picture in kept):
        return kept
    network = loaded.reference
    outputs = network.run(network.prepare(torch.from_numpy(pixels)))
    pictures = _finish(network, outputs, find_finite(loaded.adapter, outputs, len(pixels)), pixels)
    return [None if picture is _UNTAKEN else picture for picture in pictures]


def _read_whole(loaded: _Loaded, case: PictureCase) -> torch.Tensor | None:
    """Return the picture of the reference's own evaluation, None where it has none that is as it was written."""
    record = loaded.wholes.get(case.digest)
    if record is None or loaded.setup.reference is None or not record.scores["finite"]:
        return None
    pixels = read_whole(loaded.setup.reference, record)
    return None if pixels is None else torch.from_numpy(pixels)


def _finish(network: Network, outputs: Any, finite: Sequence[bool], pixels: NDArray[np.uint8]) -> Any:
    """Return the adapter's results; `_UNTAKEN` where outputs are not finite and the adapter can't take them."""
    try:
        return network.finish(outputs, pixels.shape[1:3])
    except EngineError:
        if all(finite):
            raise
    results = []
    for part, is_finite in zip(split_pictures(outputs, len(finite)), finite, strict=True):
        try:
            results.append(network.finish(part, pixels.shape[1:3])[0])
        except EngineError:
            if is_finite:
                raise
            results.append(_UNTAKEN)
    return results


def _read(loaded: _Loaded, case: PictureCase) -> NDArray[np.uint8]:
    return read_picture(loaded.setup.root / loaded.setup.settings.evalset / case.image, case.sha256)


def _judge(
    loaded: _Loaded, case: PictureCase, result: Any, given: NDArray[np.uint8], is_finite: bool, whole: Any
) -> tuple[str, dict[str, float], bytes | None]:
    setup = loaded.setup
    if isinstance(case, DetectionCase):
        assert isinstance(setup.settings, DetectionEval) and setup.categories is not None
        boxes = [] if result is _UNTAKEN else result
        output, scores = judge_results(
            case,
            boxes,
            is_finite=is_finite,
            settings=setup.settings,
            categories=setup.categories,
            is_reference=setup.is_reference,
        )
        return output, scores, None
    target = read_picture(setup.root / setup.settings.evalset / case.target, case.target_sha256)
    result = torch.zeros(target.shape, dtype=torch.uint8) if result is _UNTAKEN else result
    scores = judge_picture(
        case.id, result, target, given, is_finite=is_finite, tiling=setup.candidate.serving.tiling, whole=whole
    )
    pixels = result.numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=3)
    return digest_pixels(pixels), scores, buffer.getvalue()


def _count(results: Any) -> int | None:
    try:
        return len(results)
    except TypeError:  # not a container
        return None


@dataclass(frozen=True)
class ShapeBatch:
    """One batch of a shape, and how many pictures of the eval come in batches of that shape."""

    cases: Sequence[PictureCase]
    num_pictures: int


def measure_run(cases: Sequence[PictureCase], shapes: Sequence[ShapeBatch]) -> dict[str, Any]:
    """Return what is noted of a candidate beside its records: how far each layer is from float32, and what it costs.

    Args:
        cases: whose pictures layers are compared on, one at a time.
        shapes: all that the eval meets, in its order; time is measured on the most common one.
    """
    loaded: _Loaded = get_loaded()
    folder = loaded.setup.root / loaded.setup.settings.evalset

    def read(batch: Sequence[PictureCase]) -> torch.Tensor:
        return torch.from_numpy(np.stack([_read(loaded, case) for case in batch]))

    batches = [shape.cases for shape in shapes]
    largest = max(batches, key=lambda batch: np.prod(measure_picture(folder / batch[0].image)))[:1]
    common = max(shapes, key=lambda shape: shape.num_pictures)  # of equals the first
    timed, setup = read(common.cases), loaded.setup
    is_other = Path(setup.candidate.checkpoint.path) != Path(setup.source)
    load_reference = partial(loaded.load, folder=setup.source) if is_other else None
    return {
        "layers": _compare_layers(loaded, cases),
        "shapes": {
            "num_shapes": len(shapes),
            "timed": list(timed.shape[:3]),
            "num_timed": common.num_pictures,
            "num_pictures": sum(shape.num_pictures for shape in shapes),
        },
        **measure_costs(
            loaded.load, loaded.network, timed, read(largest), map(read, batches), load_reference=load_reference
        ),
    }


def _compare_layers(loaded: _Loaded, cases: Sequence[PictureCase]) -> dict[str, Any]:
    """Return how far each layer is from the reference's in float32; nothing where it runs the very same, or others."""
    setup, serving = loaded.setup, loaded.setup.candidate.serving
    inner = serving.model_copy(update={"compile_mode": None, "compile_dynamic": None, "tiling": None})
    if inner == serving.plain and setup.candidate.checkpoint.path == setup.source:
        return {}
    eager, exact = loaded.load(inner), loaded.reference
    pixels = [torch.from_numpy(_read(loaded, case))[None] for case in cases]
    runs = [(partial(exact.run, exact.prepare(p)), partial(eager.run, eager.prepare(p))) for p in pixels]
    dtypes = {name: getattr(torch, c.dtype) for name, c in serving.conv_policy.items()}
    default = getattr(torch, serving.dtype)
    dtypes = {name: dtypes.get(name, default) for name, _ in eager.module.named_modules()}
    try:
        return build_layer_notes(compare_layers(exact.module, eager.module, runs, dtypes=dtypes))
    except NumericsError:  # another architecture, whose layers have no counterparts
        return {}
