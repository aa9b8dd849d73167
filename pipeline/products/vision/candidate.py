"""Build a candidate of a network product: check its folder, resolve its steps, write the record.

No step rewrites weights, so the record points at the original folder. `coverage` names each convolution's algorithm
and arithmetic where a policy was asked for, `fallbacks` what was asked for and can't be.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

from pipeline.errors import SettingsError
from pipeline.products.vision.adapters import load_adapter
from pipeline.products.vision.conv_policy import resolve_policy
from pipeline.products.vision.files import read_network_checkpoint
from pipeline.products.vision.loading import Network, load_network
from pipeline.products.vision.serving import run_plainly, serve
from pipeline.products.vision.settings import (
    CompileStep,
    ConvPolicyStep,
    VisionProduct,
)
from pipeline.records.evaluations import BuiltCandidate, Fallback, LayerCoverage, NetworkCandidate
from pipeline.records.files import replace_folder
from pipeline.records.record_files import write_record
from pipeline.running.weight_files import check_finite, iterate_weights

LIBRARIES = ("torch", "safetensors", "pillow")  # what can change an output


def build_network_candidate(name: str, product: VisionProduct, *, root: Path, build: Path) -> NetworkCandidate:
    """Build one candidate and write `candidates/<name>/` under `build`.

    Args:
        name: of the candidate.
        product: a section of params.yaml.
        root: project root, which paths are relative to.
        build: folder of the product's results, inside `root`.

    Raises:
        SettingsError: a step asks for what the network does not have.
        CheckpointError: its folder or the adapter is missing, damaged or unsafe.
    """
    target = build / "candidates" / name
    working = target.with_name(f".{name}.new")
    shutil.rmtree(working, ignore_errors=True)
    try:
        built = _build(name, product, root)
        write_record(working / "candidate.json", built)
        replace_folder(working, target)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return serve(built, product)


def _build(name: str, product: VisionProduct, root: Path) -> BuiltCandidate:
    settings, adapter = product.candidates[name], load_adapter(root / product.adapter)
    folder = root / settings.checkpoint
    checkpoint = read_network_checkpoint(folder, root=root, kind=product.kind)
    check_finite(iterate_weights(folder), where=folder)
    network = load_network(folder, adapter, run_plainly(product))
    coverage: tuple[LayerCoverage, ...] = ()
    fallbacks: list[Fallback] = []
    records = []
    for i, step in enumerate(settings.steps):
        record: dict[str, Any] = {"serving": step.build_serving()}
        if isinstance(step, ConvPolicyStep):
            coverage, missed = _resolve(step, network, f"candidates.{name}.steps.{i}")
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
    versions = {library: importlib.metadata.version(library) for library in LIBRARIES}
    return BuiltCandidate(
        name=name,
        checkpoint=checkpoint,
        steps=tuple(records),
        coverage=coverage,
        fallbacks=tuple(fallbacks),
        libraries=versions | {"adapter": adapter.digest},
    )


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
