"""Kind `images`: diffusers pipelines that draw prompts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.product import Inputs, OpenReplica, Start
from pipeline.products.images.settings import ImagesEval, ImagesProduct, find_image_problems
from pipeline.running.environment import Machine
from pipeline.settings.base import Eval

if TYPE_CHECKING:
    from pipeline.gate.audits import Auditor
    from pipeline.report.presenting import Presenter


class ImagesKind:
    """Diffusion pipelines."""

    settings = ImagesProduct
    evals: Mapping[str, type[Eval]] = {"images": ImagesEval}
    start_options: Mapping[str, str] = {"clip": "folder of the CLIP that judges the pictures"}
    shards_at_once = 1
    has_servers = False

    def start_product(self, name: str, checkpoint: str, root: Path, options: Mapping[str, str]) -> Start:
        """Return the smallest settings that run, and example cases."""
        from pipeline.products.images.start import start_images

        return start_images(name, checkpoint, root, clip=options.get("clip"))

    def find_problems(self, product: ImagesProduct) -> list[str]:
        """Return what contradicts itself in the settings."""
        return find_image_problems(product)

    def check(self, product: ImagesProduct, root: Path, machine: Machine, *, is_local: bool) -> list[str]:
        """Check pipeline folders, CLIP and prompts."""
        from pipeline.products.images.preflight import check_images

        check_images(product, root)
        return []

    def render_costs(self, product: ImagesProduct, root: Path, machine: Machine, *, build: Path) -> str:
        """Estimate nothing."""
        return ""

    def list_inputs(self, product: ImagesProduct, root: Path) -> Inputs:
        """Return the prompts, CLIP and the reference's weights, which all candidates are built and judged by."""
        from pipeline.products.images.preflight import digest_material, read_torchao

        shared = digest_material(product, root) | {
            "evals": {name: e.model_dump(mode="json") for name, e in product.evals.items()},
            "serving": product.serving.model_dump(mode="json"),
        }
        # which quantises, and reads what is quantised whenever it is loaded
        torchao = {name: read_torchao() for name, candidate in product.candidates.items() if candidate.quantize}
        optimize = {
            name: shared | candidate.model_dump(mode="json") | torchao.get(name, {})
            for name, candidate in product.candidates.items()
        }
        shared = shared | {"reference": product.reference}
        traced = {name: {"trace": True} for name, candidate in product.candidates.items() if candidate.trace}
        evaluate = {name: shared | traced.get(name, {}) | torchao.get(name, {}) for name in product.candidates}
        return Inputs(optimize, evaluate, {"reference": product.reference})

    def preload(self, stage: str, product: ImagesProduct, root: Path) -> None:
        """Import what the stages import."""
        from pipeline.products.images.preloading import import_libraries

        import_libraries(product, root)

    def optimize(self, name: str, product: ImagesProduct, *, root: Path, build: Path) -> str:
        """Rewrite weights, and record how the pipeline is run."""
        from pipeline.products.images.candidate import build_image_candidate

        candidate = build_image_candidate(name, product, root=root, build=build)
        steps = ", ".join(step["kind"] for step in candidate.steps) or "no steps"
        return f"{steps}; {candidate.serving.summary}, {candidate.checkpoint.num_bytes / 1e6:.2f} MB"

    def evaluate(self, name: str, product: ImagesProduct, *, root: Path, build: Path) -> None:
        """Render and judge every prompt."""
        from pipeline.products.images.evaluate import evaluate_images
        from pipeline.products.images.serving import read_image_candidate

        evaluate_images(read_image_candidate(build, name, product), product, root=root, build=build)

    def open_replica(
        self, name: str, product: ImagesProduct, *, root: Path, build: Path
    ) -> AbstractContextManager[OpenReplica]:
        """Load or serve a candidate once, for shard after shard of its cases."""
        from pipeline.products.images.evaluate import open_replica
        from pipeline.products.images.serving import read_image_candidate

        return open_replica(read_image_candidate(build, name, product), product, root=root, build=build)

    def benchmark(self, product: ImagesProduct, *, root: Path, build: Path) -> list[str]:
        """Compare each candidate's pictures with the reference's; evaluating a candidate times it."""
        from pipeline.products.images.likeness import measure_likeness

        return measure_likeness(product, build)

    def get_auditor(self) -> Auditor[ImagesProduct]:
        """Return what the gate asks beside the scores."""
        from pipeline.products.images.findings import ImagesAuditor

        return ImagesAuditor()

    def get_presenter(self) -> Presenter[ImagesProduct]:
        """Return what the report and MLflow show."""
        from pipeline.products.images.show import ImagesPresenter

        return ImagesPresenter()
