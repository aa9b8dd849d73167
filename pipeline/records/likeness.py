"""How alike a candidate's pictures are to the reference's of the same prompt and seed, as JSON on disk.

Measured where the pictures are, by the stage `benchmark`, and kept by a release, which has no pictures: so it is judged
again from these numbers. Each row names both pictures, so that numbers of other pictures are refused.
"""

from __future__ import annotations

from pydantic import Field

from pipeline.records.record_files import Record


class PictureLikeness(Record):
    """One case: the pictures of both sides by their short digests (`kept_outputs.py`), and how alike they are."""

    case_id: str
    reference: str
    candidate: str
    ssim: float = Field(ge=0, le=1)  # 1 for equal pixels alone; 0 where a side has no sound picture


class Likeness(Record):
    """One candidate beside the reference (`build/<product>/benchmarks/<candidate>.json`).

    `refusal` says why nothing could be measured; otherwise it is None.
    """

    name: str
    key: str  # digest of what was compared, and of the code
    refusal: str | None = None
    evals: dict[str, tuple[PictureLikeness, ...]] = {}
