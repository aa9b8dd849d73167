"""How a network candidate is run, derived from params.yaml: one place for whoever runs it and whoever judges it.

Free of torch: the gate asks here what would ship.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pipeline.products.vision.onnx_files import ENGINE, FORMAT
from pipeline.products.vision.settings import NetworkCandidateSettings, VisionProduct
from pipeline.records.built_candidates import fold_steps, read_built
from pipeline.records.evaluations import BuiltCandidate, NetworkCandidate
from pipeline.records.serving import NetworkServing


def run_plainly(product: VisionProduct) -> NetworkServing:
    """Return the serving config of a candidate without steps."""
    return NetworkServing(**product.serving.model_dump())


def serve(built: BuiltCandidate, product: VisionProduct) -> NetworkCandidate:
    """Add the serving config: what all candidates share, and what this one's steps changed of it."""
    plain = run_plainly(product)
    if built.checkpoint.format == FORMAT:
        plain = plain.model_copy(update={"engine": ENGINE})
    return NetworkCandidate(**built.model_dump(), serving=fold_steps(built, plain))


def read_network_candidate(build: Path, name: str, product: VisionProduct) -> NetworkCandidate:
    """Read what was built of a candidate and add how it is run.

    Raises:
        EvidenceError: it was not built, or its record is another candidate's or of other steps.
    """
    asked = [step.model_dump(mode="json") for step in product.candidates[name].steps]
    return serve(read_built(build, name, asked), product)


def describe_coverage(candidate: NetworkCandidate, settings: NetworkCandidateSettings) -> str:
    """Say how many convolutions a step quantised, by what was written; nothing where no step did."""
    if settings.quantize is None:
        return ""
    counts = Counter(layer.format for layer in candidate.coverage)
    return f"; {', '.join(f'{num} layers {name}' for name, num in counts.most_common())}"
