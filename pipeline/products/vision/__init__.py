"""Kind `vision`: torch modules and .onnx files behind an adapter, that find objects or restore pictures."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.product import Inputs, OpenReplica, Start
from pipeline.products.vision.detection_settings import DetectionEval
from pipeline.products.vision.settings import UpscalingEval, VisionProduct, find_network_problems
from pipeline.running.environment import Machine
from pipeline.settings.base import Eval

if TYPE_CHECKING:
    from pipeline.gate.audits import Auditor
    from pipeline.report.presenting import Presenter


class VisionKind:
    """Torch modules."""

    settings = VisionProduct
    evals: Mapping[str, type[Eval]] = {"detection": DetectionEval, "upscaling": UpscalingEval}
    start_options: Mapping[str, str] = {
        "task": "detection or upscaling",
        "adapter": "Python file of the network; else the only one in its folder",
    }
    shards_at_once = 1
    has_servers = False

    def start_product(self, name: str, checkpoint: str, root: Path, options: Mapping[str, str]) -> Start:
        """Return the smallest settings that run, and example cases."""
        from pipeline.products.vision.start import start_network

        return start_network(name, checkpoint, root, task=options.get("task"), adapter=options.get("adapter"))

    def find_problems(self, product: VisionProduct) -> list[str]:
        """Return what contradicts itself in the settings."""
        return find_network_problems(product)

    def check(self, product: VisionProduct, root: Path, machine: Machine, *, is_local: bool) -> list[str]:
        """Check the adapter, folders and pictures."""
        from pipeline.products.vision.preflight import (
            check_network,
            describe_slow_formats,
            describe_slow_int8,
            refuse_gpu,
        )

        if is_local:
            refuse_gpu(product, root, machine)
        return (
            check_network(product, root)
            + describe_slow_formats(product, machine)
            + describe_slow_int8(product, machine)
        )

    def render_costs(self, product: VisionProduct, root: Path, machine: Machine, *, build: Path) -> str:
        """Estimate nothing."""
        return ""

    def list_inputs(self, product: VisionProduct, root: Path) -> Inputs:
        """Return the adapter, the pictures, and the reference's weights, which all candidates are judged by."""
        from pipeline.products.vision.preflight import digest_calibration, digest_material, read_runtime

        material = digest_material(product, root)
        calibration = digest_calibration(product, root)
        optimize = {
            name: {"adapter": [product.adapter, material["adapter"]], **candidate.model_dump(mode="json")}
            | (calibration if candidate.quantize else {})
            | read_runtime(root / candidate.checkpoint)
            for name, candidate in product.candidates.items()
        }
        shared = material | read_runtime(root / product.candidates[product.reference].checkpoint)
        shared |= {
            "evals": {name: e.model_dump(mode="json") for name, e in product.evals.items()},
            "serving": product.serving.model_dump(mode="json"),
        }
        traced = {name: {"trace": True} for name, candidate in product.candidates.items() if candidate.trace}
        return Inputs(optimize, {name: shared | traced.get(name, {}) for name in product.candidates})

    def preload(self, stage: str, product: VisionProduct, root: Path) -> None:
        """Import what the stages import."""
        import pipeline.products.vision.candidate
        import pipeline.products.vision.evaluate  # noqa: F401

    def optimize(self, name: str, product: VisionProduct, *, root: Path, build: Path) -> str:
        """Quantise its weights where that is asked for, and record how the network is run."""
        from pipeline.products.vision.candidate import build_network_candidate
        from pipeline.products.vision.serving import describe_coverage

        candidate = build_network_candidate(name, product, root=root, build=build)
        steps = ", ".join(step["kind"] for step in candidate.steps) or "no steps"
        return f"{steps}; {candidate.serving.summary}{describe_coverage(candidate, product.candidates[name])}"

    def evaluate(self, name: str, product: VisionProduct, *, root: Path, build: Path) -> None:
        """Run every picture and judge what comes out."""
        from pipeline.products.vision.evaluate import evaluate_network
        from pipeline.products.vision.serving import read_network_candidate

        evaluate_network(read_network_candidate(build, name, product), product, root=root, build=build)

    def open_replica(
        self, name: str, product: VisionProduct, *, root: Path, build: Path
    ) -> AbstractContextManager[OpenReplica]:
        """Load or serve a candidate once, for shard after shard of its cases."""
        from pipeline.products.vision.evaluate import open_replica
        from pipeline.products.vision.serving import read_network_candidate

        return open_replica(read_network_candidate(build, name, product), product, root=root, build=build)

    def benchmark(self, product: VisionProduct, *, root: Path, build: Path) -> list[str]:
        """Time nothing: evaluating a candidate does."""
        return []

    def get_auditor(self) -> Auditor[VisionProduct]:
        """Return what the gate asks beside the scores."""
        from pipeline.products.vision.findings import VisionAuditor

        return VisionAuditor()

    def get_presenter(self) -> Presenter[VisionProduct]:
        """Return what the report and MLflow show."""
        from pipeline.products.vision.show import VisionPresenter

        return VisionPresenter()
