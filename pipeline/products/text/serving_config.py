"""How a candidate is served, derived from params.yaml: one place for whoever serves it and whoever judges it.

Free of torch: the gate asks here how a candidate would ship.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.products.text.settings import TextProduct
from pipeline.records.built_candidates import read_built
from pipeline.records.evaluations import BuiltCandidate, Candidate
from pipeline.records.serving import ServingConfig


def serve(built: BuiltCandidate, product: TextProduct) -> Candidate:
    """Add the serving config: what all candidates share, and the engine of this one."""
    shared = product.serving.model_dump(include=set(ServingConfig.model_fields))
    engine = product.candidates[built.name].engine
    shared |= {"engine": engine.kind, **engine.build_serving()}
    if engine.is_embedded:
        shared["options"] = product.serving.options
    if built.speculative is not None:
        shared["speculative"] = built.speculative
        # transformers' continuous batching drops speculation without a word
        shared["continuous_batching"] &= not engine.is_embedded
    return Candidate(**built.model_dump(), serving=ServingConfig(**shared))


def read_candidate(build: Path, name: str, product: TextProduct) -> Candidate:
    """Read what was built of a text candidate and add how it is served.

    Raises:
        EvidenceError: it was not built, or its record is another candidate's or of other steps.
    """
    asked = [step.build_record() for step in product.candidates[name].steps]
    return serve(read_built(build, name, asked), product)
