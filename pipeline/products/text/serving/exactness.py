"""Does an embedded server give the same answer in any batch?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_exact(dtype: str, facts: Mapping[str, Any]) -> bool:
    """Return whether an answer is the same in any batch: in float32, unless a last bit turns a whole step of an input.

    It does where inputs are imitated in few bits on a GPU, which sums otherwise for each shape of a batch.

    Args:
        dtype: that the model is served in.
        facts: of the server, by section (`pipeline/records/fingerprints.py`).
    """
    is_stepped = "imitated" in facts["engine"] and not facts["hardware"]["device"].startswith("cpu")
    return dtype == "float32" and not is_stepped
