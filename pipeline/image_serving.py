"""How an image candidate is run, derived from params.yaml: one place for whoever runs it and whoever judges it.

Free of torch: the gate asks here what would ship.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import EvidenceError
from pipeline.image_params import ImageTrack
from pipeline.records import BuiltCandidate, ImageCandidate, PipelineServing, read_record


def sample_plainly(track: ImageTrack) -> PipelineServing:
    """Return the serving config of a candidate without steps."""
    sampling = track.sampling.model_dump(exclude={"guidance", "num_workers"})
    return PipelineServing(guidance_scale=track.sampling.guidance.scale,
                           guidance_rescale=track.sampling.guidance.rescale, **sampling)  # fmt: skip


def serve(built: BuiltCandidate, track: ImageTrack) -> ImageCandidate:
    """Add the serving config: what all candidates share, and what this one's steps changed of it."""
    changes = {key: value for step in built.steps for key, value in step.get("serving", {}).items()}
    serving = PipelineServing.model_validate(sample_plainly(track).model_dump() | changes)
    return ImageCandidate(**built.model_dump(), serving=serving)


def read_image_candidate(build: Path, name: str, track: ImageTrack) -> ImageCandidate:
    """Read what was built of a candidate and add how it is run.

    Raises:
        EvidenceError: it was not built, or its record is another candidate's or of other steps.
    """
    path = build / "candidates" / name / "candidate.json"
    built = read_record(path, BuiltCandidate)
    if built.name != name:
        raise EvidenceError(f"{path}: expected candidate {name!r}, found {built.name!r}; run `dvc repro`")
    asked = [step.model_dump(mode="json") for step in track.candidates[name].steps]
    made = [{key: step.get(key) for key in wanted} for step, wanted in zip(built.steps, asked, strict=False)]
    if len(built.steps) != len(asked) or made != asked:
        raise EvidenceError(f"{path}: expected the steps of params.yaml, {[step['kind'] for step in asked]}, found "
                            f"others, {[step.get('kind') for step in built.steps]}, or other settings of them; run "
                            "`dvc repro`")  # fmt: skip
    return serve(built, track)
