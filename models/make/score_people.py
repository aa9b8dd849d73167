"""Average precision of a people detector on held-out street scenes, by COCO's rules and sizes.

    python -m models.make.score_people models/people --scenes 300

AP is the mean over intersections over union of 0.50 to 0.95; small is up to 32 x 32 pixels, medium up to 96 x 96.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster

from evalsets.make.scenes import SIZE, Scene, render
from models.make.train_people import HELD_OUT
from models.people.detector import Found, detect, open_detector

_NAMES = ("ap", "ap_50", "ap_75", "ap_small", "ap_medium", "ap_large")  # the first of COCO's twelve numbers
_BATCH = 8


def held_out(num: int, seed: int = 0) -> list[Scene]:
    """Return scenes that no training drew."""
    return [render(np.random.default_rng([seed, HELD_OUT, index])) for index in range(num)]


def find_all(run: Callable[[np.ndarray], list[Found]], scenes: Sequence[Scene]) -> list[Found]:
    """Return what a detector finds in each scene."""
    batches = (np.stack([s.pixels for s in scenes[i : i + _BATCH]]) for i in range(0, len(scenes), _BATCH))
    return [found for batch in batches for found in run(batch)]


def score(scenes: Sequence[Scene], found: Sequence[Found]) -> dict[str, float]:
    """Return COCO's average precisions in [0, 1]; -1 where no person is of that size."""
    truth = [
        {"image_id": i, "bbox": box.tolist(), "area": int(area), "iscrowd": 0, "category_id": 1}
        for i, scene in enumerate(scenes)
        for box, area in zip(scene.boxes, scene.areas, strict=True)
    ]
    guesses = [
        {"image_id": i, "bbox": box.tolist(), "score": float(score), "category_id": 1}
        for i, one in enumerate(found)
        for box, score in zip(one.boxes, one.scores, strict=True)
    ]
    if not guesses:
        return dict.fromkeys(_NAMES, 0.0)
    data = {
        "images": [{"id": i, "width": SIZE, "height": SIZE} for i in range(len(scenes))],
        "annotations": [{"id": i + 1, **box} for i, box in enumerate(truth)],
        "categories": [{"id": 1, "name": "person"}],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(data)
        judged = COCOeval_faster(coco, coco.loadRes(guesses), iouType="bbox")
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    return {name: float(value) for name, value in zip(_NAMES, judged.stats, strict=False)}


def main() -> None:
    """Parse the command line, print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenes", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, scenes = open_detector(args.folder), held_out(args.scenes)
    found = score(scenes, find_all(lambda pixels: detect(model, pixels), scenes))
    print(f"{args.scenes} scenes, {sum(len(s.boxes) for s in scenes)} people")
    print(" ".join(f"{name} {value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
