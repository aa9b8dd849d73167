"""Build a candidate of a network product: check its folder, resolve its steps, write the record.

The record points at the original folder, or where weights are quantised at what was written. `coverage` names each
convolution's number format then, and its algorithm and arithmetic where a policy was asked for, `fallbacks` what was
asked for and can't be.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import NumericsError, SettingsError
from pipeline.evalsets.cards import load_evalset
from pipeline.evalsets.cases import spread
from pipeline.evalsets.pictures import measure_picture, read_picture
from pipeline.products.vision.adapters import list_functions, load_adapter
from pipeline.products.vision.conv_policy import list_convolutions, resolve_policy
from pipeline.products.vision.files import read_network_checkpoint
from pipeline.products.vision.int8_conv import find_int8
from pipeline.products.vision.loading import Network, load_network
from pipeline.products.vision.onnx_files import ENGINE, read_version, refuse_steps
from pipeline.products.vision.onnx_files import FORMAT as ONNX
from pipeline.products.vision.quantize import observe, plan_layers, write_quantized
from pipeline.products.vision.quantize_proof import check_quantized, read_coverage
from pipeline.products.vision.serving import run_plainly, serve
from pipeline.products.vision.settings import (
    CompileStep,
    ConvPolicyStep,
    PrecisionStep,
    QuantizeStep,
    VisionProduct,
)
from pipeline.records.evaluations import BuiltCandidate, Checkpoint, Fallback, LayerCoverage, NetworkCandidate
from pipeline.records.files import replace_folder, share_files
from pipeline.records.record_files import write_record
from pipeline.running.weight_files import check_finite, iterate_weights

LIBRARIES = ("torch", "safetensors", "pillow")  # what can change an output
_WEIGHTS = "checkpoint"  # folder of quantised weights


def build_network_candidate(name: str, product: VisionProduct, *, root: Path, build: Path) -> NetworkCandidate:
    """Build one candidate and write `candidates/<name>/` under `build`.

    Args:
        name: of the candidate.
        product: a section of params.yaml.
        root: project root, which paths are relative to.
        build: folder of the product's results, inside `root`.

    Raises:
        SettingsError: a step asks for what the network does not have.
        CheckpointError: its folder or the adapter is missing, damaged or unsafe, or quantised weights are wrong.
    """
    target = build / "candidates" / name
    working = target.with_name(f".{name}.new")
    shutil.rmtree(working, ignore_errors=True)
    try:
        built = _build(name, product, root, working, target)
        write_record(working / "candidate.json", built)
        share_files(working)
        replace_folder(working, target)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return serve(built, product)


def _build(name: str, product: VisionProduct, root: Path, working: Path, target: Path) -> BuiltCandidate:
    settings = product.candidates[name]
    folder = root / settings.checkpoint
    adapter = load_adapter(root / product.adapter, list_functions(folder))
    checkpoint = read_network_checkpoint(folder, root=root, kind=product.kind)
    is_onnx = checkpoint.format == ONNX
    if is_onnx:
        refuse_steps(name, settings.steps)
    else:
        check_finite(iterate_weights(folder), where=folder)
    network = load_network(folder, adapter, run_plainly(product))
    if is_onnx:
        _try_sides(network, product, root)
    coverage: tuple[LayerCoverage, ...] = ()
    fallbacks: list[Fallback] = []
    records = []
    for i, step in enumerate(settings.steps):
        record: dict[str, Any] = {"serving": step.build_serving()}
        where = f"candidates.{name}.steps.{i}"
        if isinstance(step, PrecisionStep) and (layer := find_int8(network.module)):
            raise SettingsError(
                f"{where}: expected no precision beside weights in INT8, as of {layer!r}, which say for each layer in "
                "which format it runs; remove the step, or name the float checkpoint"
            )
        if isinstance(step, QuantizeStep):
            made, coverage, missed = _quantize(step, network, product, checkpoint, working / _WEIGHTS, where, root)
            checkpoint = made.model_copy(update={"path": (target / _WEIGHTS).relative_to(root).as_posix()})
            fallbacks += missed
        if isinstance(step, ConvPolicyStep):
            coverage, missed = _resolve(step, network, where)
            fallbacks += missed
            record["serving"] = {
                "conv_policy": {
                    layer.layer: dict(zip(("algorithm", "dtype"), layer.format.split(), strict=True))
                    for layer in coverage
                }
            }
        if isinstance(step, CompileStep) and shutil.which("g++") is None and network.device.type == "cpu":
            fallbacks.append(
                Fallback(
                    layer="(all)",
                    reason="torch.compile needs a C++ compiler on a CPU, and there is "
                    "no g++: it runs without; install one",
                )
            )
            record["serving"] = {}
        records.append(step.model_dump(mode="json") | record)
    libraries = LIBRARIES + ("torchao",) * (settings.quantize is not None)
    versions = {library: importlib.metadata.version(library) for library in libraries}
    if is_onnx:
        versions[ENGINE] = read_version()
    return BuiltCandidate(
        name=name,
        checkpoint=checkpoint,
        steps=tuple(records),
        coverage=coverage,
        fallbacks=tuple(fallbacks),
        libraries=versions | {"adapter": adapter.digest},
    )


def _try_sides(network: Network, product: VisionProduct, root: Path) -> None:
    """Refuse pictures of which the adapter makes other sides than an .onnx file takes, by a blank one of each size."""
    for settings in product.evals.values():
        folder = root / settings.evalset
        for size in sorted({measure_picture(folder / case.image) for case in load_evalset(folder).cases}):
            network.prepare(torch.zeros(1, *size, 3, dtype=torch.uint8))


def _quantize(
    step: QuantizeStep,
    network: Network,
    product: VisionProduct,
    source: Checkpoint,
    folder: Path,
    where: str,
    root: Path,
) -> tuple[Checkpoint, tuple[LayerCoverage, ...], list[Fallback]]:
    """Write quantised weights; return their record, what each convolution is stored in, and what stayed float."""
    try:
        plan = plan_layers(network.module, step.exclude)
        with _run_in_threads(product.serving.num_threads):
            inputs = read_calibration(product, network, step.num_pictures, root)
            ranges = observe(network, plan.layers, inputs, observer=step.observer)
            write_quantized(folder, root / source.path, ranges)
    except (SettingsError, NumericsError) as error:
        raise SettingsError(f"{where}.{error}" if str(error).startswith("exclude") else f"{where}: {error}") from None
    layers = list(list_convolutions(network.module))
    check_quantized(folder, root / source.path, ranges, layers)
    made = read_network_checkpoint(folder, root=root, kind=product.kind)
    return (
        made.model_copy(update={"format": step.dtype, "parent_digest": source.digest}),
        read_coverage(folder, ranges, layers),
        [Fallback(layer=layer, reason=reason) for layer, reason in plan.fallbacks],
    )


@contextmanager
def _run_in_threads(num: int) -> Iterator[None]:
    """Sums are split by thread: another number writes other scales."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_calibration(
    product: VisionProduct, network: Network, num_pictures: int, root: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each calibration picture, and the module's input of it.

    Raises:
        SettingsError: there are fewer.
        EvalsetError: the folder is missing or damaged.
    """
    assert product.calibration_images is not None  # `find_network_problems` asks for it
    folder = root / product.calibration_images
    cases = load_evalset(folder).cases
    if len(cases) < num_pictures:
        raise SettingsError(
            f"num_pictures: expected at most the {len(cases)} of {product.calibration_images!r}, got "
            f"{num_pictures}; add pictures, or ask for fewer"
        )
    for case in spread(cases, num_pictures):
        yield case.id, network.prepare(torch.from_numpy(read_picture(folder / case.image, case.sha256))[None])


def _resolve(step: ConvPolicyStep, network: Network, where: str) -> tuple[tuple[LayerCoverage, ...], list[Fallback]]:
    """Return what each convolution ends in, and where another algorithm was asked for than it can have."""
    try:
        policy = resolve_policy(
            network.module,
            algorithm=step.algorithm,
            dtype=step.dtype,
            rules=[(rule.layers, rule.algorithm, rule.dtype) for rule in step.rules],
        )
    except SettingsError as error:
        raise SettingsError(f"{where}.{error}") from None
    if not policy.layers:
        raise SettingsError(
            f"{where}: expected convolutions that a policy covers, found none in this network; remove the step"
        )
    sizes = {
        name: sum(p.numel() * p.element_size() for p in module.parameters())
        for name, module in network.module.named_modules()
    }
    layers = tuple(
        LayerCoverage(
            layer=name,
            format=f"{c.algorithm} {c.dtype}",
            num_bytes=sizes[name],
            asked=name not in dict(policy.fallbacks),
        )
        for name, c in policy.layers.items()
    )
    return layers, [Fallback(layer=layer, reason=reason) for layer, reason in policy.fallbacks]
