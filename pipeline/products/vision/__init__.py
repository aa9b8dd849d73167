"""Kind `vision`: torch modules behind an adapter, that find objects or restore pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.product import Inputs, Plot
from pipeline.products.vision.detection_settings import DetectionEval
from pipeline.products.vision.settings import UpscalingEval, VisionProduct, find_network_problems
from pipeline.running.environment import Machine
from pipeline.settings.base import Eval

if TYPE_CHECKING:
    from pipeline.gate.audits import Measured
    from pipeline.gate.pairing import Evidence
    from pipeline.records.evaluations import NetworkCandidate


class VisionKind:
    """Torch modules."""

    settings = VisionProduct
    evals: Mapping[str, type[Eval]] = {"detection": DetectionEval, "upscaling": UpscalingEval}

    def find_problems(self, product: VisionProduct) -> list[str]:
        """Return what contradicts itself in the settings."""
        return find_network_problems(product)

    def check(self, product: VisionProduct, root: Path, machine: Machine) -> list[str]:
        """Check the adapter, folders and pictures."""
        from pipeline.products.vision.preflight import check_network, describe_slow_formats

        return check_network(product, root) + describe_slow_formats(product, machine)

    def list_inputs(self, product: VisionProduct, root: Path) -> Inputs:
        """Return the adapter, the pictures, and the reference's weights, which all candidates are judged by."""
        from pipeline.products.vision.preflight import digest_material

        material = digest_material(product, root)
        optimize = {
            name: {"adapter": [product.adapter, material["adapter"]], **candidate.model_dump(mode="json")}
            for name, candidate in product.candidates.items()
        }
        shared = material | {
            "evals": {name: e.model_dump(mode="json") for name, e in product.evals.items()},
            "serving": product.serving.model_dump(mode="json"),
        }
        return Inputs(optimize, dict.fromkeys(product.candidates, shared))

    def optimize(self, name: str, product: VisionProduct, *, root: Path, build: Path) -> str:
        """Record how the network is run: no step rewrites weights."""
        from pipeline.products.vision.candidate import build_network_candidate

        candidate = build_network_candidate(name, product, root=root, build=build)
        steps = ", ".join(step["kind"] for step in candidate.steps) or "no steps"
        return f"{steps}; {candidate.serving.summary}"

    def evaluate(self, name: str, product: VisionProduct, *, root: Path, build: Path) -> None:
        """Run every picture and judge what comes out."""
        from pipeline.products.vision.evaluate import evaluate_network
        from pipeline.products.vision.serving import read_network_candidate

        evaluate_network(read_network_candidate(build, name, product), product, root=root, build=build)

    def benchmark(self, product: VisionProduct, *, root: Path, build: Path) -> list[str]:
        """Time nothing: evaluating a candidate does."""
        return []

    def read_candidate(self, build: Path, name: str, product: VisionProduct) -> NetworkCandidate:
        """Read what was built of a candidate, and how it is run."""
        from pipeline.products.vision.serving import read_network_candidate

        return read_network_candidate(build, name, product)

    def check_material(self, candidate: NetworkCandidate, product: VisionProduct, root: Path) -> None:
        """Check the adapter."""
        from pipeline.products.vision.findings import check_adapter

        check_adapter(root / product.adapter, candidate.libraries.get("adapter", "none"))

    def audit_side(self, measured: Measured, evidence: Evidence, product: VisionProduct) -> None:
        """Add nothing."""

    def audit_eval(
        self, measured: Measured, evidence: Evidence, reference: Evidence, eval_name: str, product: VisionProduct
    ) -> None:
        """Add nothing."""

    def audit_pair(
        self, measured: Measured, evidence: Evidence, reference: Evidence, product: VisionProduct, build: Path
    ) -> None:
        """Add gain and time."""
        from pipeline.products.vision.findings import audit_pair

        audit_pair(measured, evidence, reference, product)

    def list_plots(self, product: VisionProduct) -> Mapping[str, Plot]:
        """Return the worst pictures, the error of each layer, and what the task adds."""
        from pipeline.gate.image_plots import plot_worst_images
        from pipeline.gate.network_pictures import plot_found, plot_seams
        from pipeline.gate.network_plots import plot_buckets, plot_layers

        if product.task == "detection":
            return {
                "buckets.png": lambda compared, path: plot_buckets(compared.judgement, path),
                "worst.png": plot_found,
                "layers.png": plot_layers,
            }
        return {"worst.png": plot_worst_images, "seams.png": plot_seams, "layers.png": plot_layers}
