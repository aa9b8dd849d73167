"""How an image candidate is run, derived from params.yaml: one place for whoever runs it and whoever judges it.

Free of torch: the gate asks here what would ship.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.products.images.settings import ImagesProduct
from pipeline.records.built_candidates import fold_steps, read_built
from pipeline.records.evaluations import BuiltCandidate, ImageCandidate
from pipeline.records.serving import PipelineServing


def sample_plainly(product: ImagesProduct) -> PipelineServing:
    """Return the serving config of a candidate without steps."""
    guidance = product.serving.guidance
    return PipelineServing(
        guidance_scale=guidance.scale,
        guidance_rescale=guidance.rescale,
        **product.serving.model_dump(exclude={"guidance"}),
    )


def serve(built: BuiltCandidate, product: ImagesProduct) -> ImageCandidate:
    """Add the serving config: what all candidates share, and what this one's steps changed of it."""
    return ImageCandidate(**built.model_dump(), serving=fold_steps(built, sample_plainly(product)))


def read_image_candidate(build: Path, name: str, product: ImagesProduct) -> ImageCandidate:
    """Read what was built of a candidate and add how it is run.

    Raises:
        EvidenceError: it was not built, or its record is another candidate's or of other steps.
    """
    asked = [step.model_dump(mode="json") for step in product.candidates[name].steps]
    return serve(read_built(build, name, asked), product)
