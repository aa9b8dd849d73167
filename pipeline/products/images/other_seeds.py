"""The floor of likeness: how alike the reference's own pictures of one prompt are when only the seed differs.

A likeness of 0.6 says nothing by itself: two pictures of one mug on one background share that much. So the reference
draws some prompts again, each with another seed. It alone does, as a part of its evaluation.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.evalsets.cases import PromptCase
from pipeline.records.evaluations import CaseRecord

# Drawn again. The standard error of their mean is a sixth of the spread over prompts, and the shipped eval of 192
# pictures takes a sixth longer, for the reference alone.
MAX_PROMPTS = 32
_NUM_SEEDS = 2**63

Drawn = tuple[CaseRecord, bytes]  # a picture's record, and the picture as PNG


def choose_other_seeds(cases: Sequence[PromptCase]) -> list[PromptCase]:
    """Return cases from all over an eval, each with the next seed that no case of its prompt has.

    A picture is known by its prompt and seed: drawn for another case once more, it would take that one's place.
    """
    num = min(MAX_PROMPTS, len(cases))
    taken = {(case.prompt, case.seed) for case in cases}
    again = []
    for case in (cases[i * len(cases) // num] for i in range(num)):
        seed = case.seed
        while (case.prompt, seed) in taken:
            seed = (seed + 1) % _NUM_SEEDS
        taken.add((case.prompt, seed))
        again.append(case.model_copy(update={"seed": seed}))
    return again


def measure_floor(pairs: Sequence[tuple[Drawn, Drawn]]) -> dict[str, float]:
    """Return how alike two pictures of a prompt are, by case id.

    Args:
        pairs: of each prompt its picture, and the one of the other seed.
    """
    from pipeline.products.images.scoring import compare_pictures

    return {
        first[0].case_id: compare_pictures(_open(first[1]), _open(second[1]))
        if first[0].scores["sound"] and second[0].scores["sound"]
        else 0.0
        for first, second in pairs
    }


def _open(png: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(png)) as picture:
        return np.array(picture)
