"""How an image candidate is run, derived from params.yaml: one place for whoever runs it and whoever judges it.

Free of torch: the gate asks here what would ship.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.built_candidates import fold_steps, read_built
from pipeline.image_params import ImageTrack
from pipeline.records import BuiltCandidate, ImageCandidate
from pipeline.serving_records import PipelineServing


def sample_plainly(track: ImageTrack) -> PipelineServing:
    """Return the serving config of a candidate without steps."""
    sampling = track.sampling.model_dump(exclude={"guidance", "num_workers"})
    return PipelineServing(guidance_scale=track.sampling.guidance.scale,
                           guidance_rescale=track.sampling.guidance.rescale, **sampling)  # fmt: skip


def serve(built: BuiltCandidate, track: ImageTrack) -> ImageCandidate:
    """Add the serving config: what all candidates share, and what this one's steps changed of it."""
    return ImageCandidate(**built.model_dump(), serving=fold_steps(built, sample_plainly(track)))


def read_image_candidate(build: Path, name: str, track: ImageTrack) -> ImageCandidate:
    """Read what was built of a candidate and add how it is run.

    Raises:
        EvidenceError: it was not built, or its record is another candidate's or of other steps.
    """
    asked = [step.model_dump(mode="json") for step in track.candidates[name].steps]
    return serve(read_built(build, name, asked), track)
