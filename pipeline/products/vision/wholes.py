"""What the reference made of pictures that a candidate runs in tiles: taken from its own evaluation where that is here.

Running it once more takes more than half of a tiled candidate's time. Its pictures are taken where its evaluation ran
as it would run here, and is as it was written. What was taken is noted, and the gate refuses it beside another
evaluation of the reference (`findings/wholes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EvidenceError
from pipeline.records.digests import digest_file, digest_json, digest_pixels
from pipeline.records.evaluations import CaseRecord, Evaluation, read_cases
from pipeline.records.kept_outputs import name_picture
from pipeline.records.record_files import read_record


def find_wholes(records: Path, mark: str, key: str) -> Mapping[str, CaseRecord]:
    """Return the reference's records by the digest of their input; none where its evaluation is another or not here.

    Args:
        records: of the eval, `evaluations/<reference>/<eval>.jsonl`.
        mark: the fingerprint that the reference would have here.
        key: of the eval's records.
    """
    try:
        evaluation = read_record(records.parent / "evaluation.json", Evaluation)
        file = evaluation.evals.get(records.stem)
        if file is None or evaluation.fingerprint != mark or file.key != key or digest_file(records) != file.sha256:
            return {}
        return {record.input_digest: record for record in read_cases(records)}
    except (EvidenceError, OSError):
        return {}


def read_whole(records: Path, record: CaseRecord) -> NDArray[np.uint8] | None:
    """Return the picture of one of them, (rows, columns, 3); None where it is not as it was written."""
    from PIL import Image

    try:
        with Image.open(records.with_suffix("") / f"{record.case_id}.png") as picture:
            pixels = np.array(picture)
    except (OSError, ValueError):
        return None
    is_picture = pixels.ndim == 3 and pixels.dtype == np.uint8
    return pixels if is_picture and digest_pixels(pixels) == record.output else None


def digest_wholes(records: Iterable[CaseRecord]) -> str:
    """Return the digest of all pictures that are named in records, whole ones or those that a release keeps."""
    return digest_json(sorted((record.case_id, name_picture(record.output)) for record in records))
