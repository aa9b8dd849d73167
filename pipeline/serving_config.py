"""How a candidate is served, derived from params.yaml: one place for whoever serves it and whoever judges it.

Free of torch: the gate asks here what would ship.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.image_params import ImageTrack
from pipeline.image_serving import read_image_candidate
from pipeline.params import Params
from pipeline.records import BuiltCandidate, Candidate, ImageCandidate, ServingConfig, read_record
from pipeline.settings import Track


def serve(built: BuiltCandidate, params: Params) -> Candidate:
    """Add the serving config: what all candidates share, and the engine of this one."""
    shared = params.serving.model_dump(include=set(ServingConfig.model_fields))
    engine = params.candidates[built.name].engine
    shared |= {"engine": engine.kind, **engine.model_dump(exclude={"kind"})}
    if built.speculative is not None:
        shared["speculative"] = built.speculative
        # transformers' continuous batching drops speculation without a word
        shared["continuous_batching"] &= engine.kind != "transformers"
    return Candidate(**built.model_dump(), serving=ServingConfig(**shared))


def read_track_candidate(build: Path, name: str, track: Track) -> Candidate | ImageCandidate:
    """Read a candidate of whatever track; see `read_candidate` and `read_image_candidate`."""
    if isinstance(track, ImageTrack):
        return read_image_candidate(build, name, track)
    assert isinstance(track, Params)
    return read_candidate(build, name, track)


def read_candidate(build: Path, name: str, params: Params) -> Candidate:
    """Read what was built of a candidate and add how it is served.

    Raises:
        EvidenceError: it was not built, or its record is another candidate's.
    """
    path = build / "candidates" / name / "candidate.json"
    built = read_record(path, BuiltCandidate)
    if built.name != name:
        raise EvidenceError(f"{path}: expected candidate {name!r}, found {built.name!r}; run `dvc repro`")
    _check_steps(path, built, params)
    return serve(built, params)


def _check_steps(path: Path, built: BuiltCandidate, params: Params) -> None:
    """Refuse weights that other steps than those of params.yaml made; a record of a step says more than was asked."""
    # the threshold is the gate's: another one makes no other weights
    asked = [step.model_dump(mode="json", exclude={"min_acceptance"}) for step in params.candidates[built.name].steps]
    kinds = [[step["kind"] for step in steps] for steps in (asked, built.steps)]
    if kinds[0] != kinds[1]:
        raise EvidenceError(f"{path}: expected steps {kinds[0]}, as params.yaml asks, got {kinds[1]}; run `dvc repro`")
    for i, (step, record) in enumerate(zip(asked, built.steps, strict=True)):
        for key, value in step.items():
            if record.get(key) != value:
                raise EvidenceError(f"{path}: steps.{i}.{key}: expected {value!r}, as params.yaml asks, got "
                                    f"{record.get(key)!r}; run `dvc repro`")
