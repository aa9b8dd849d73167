"""Images with boxes and two-sided detections of them, made up from a seed: no detector, no pixels.

Boxes are real ones, in pixels of a 640 x 480 image, so that matching is part of what a test sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeline.detections import AREAS, Detections, MatchTable, Objects, join_tables, match_image

NUM_CLASSES = 3
SIZE = np.array([640.0, 480.0])


@dataclass(frozen=True)
class Detector:
    """How well a made-up detector sees.

    Attributes:
        miss: chance that an object is not found.
        miss_small: the same for objects below 32^2 square pixels.
        blind: chance that it finds nothing on an image.
        shift: standard deviation of a box's place and size, as a fraction of its sides.
        false_alarms: mean number per image.
        digits: scores are rounded to these, so that there are ties; None leaves them.
    """

    miss: float = 0.1
    miss_small: float = 0.3
    blind: float = 0.0
    shift: float = 0.06
    false_alarms: float = 3.0
    digits: int | None = None


def make_objects(rng: np.random.Generator, *, mean: float = 5.0, crowds: float = 0.0) -> Objects:
    """Return an image's objects: as many as a Poisson draw says, of all sizes, some of them crowds."""
    num = int(rng.poisson(mean))
    sides = np.exp(rng.uniform(np.log(8), np.log(250), (num, 1))) * np.exp(rng.normal(0, 0.2, (num, 2)))
    boxes = np.concatenate([rng.uniform(0, 1, (num, 2)) * (SIZE - 20), sides], axis=1)
    classes = rng.choice(NUM_CLASSES, num, p=(0.6, 0.3, 0.1))
    return Objects(boxes, classes, sides.prod(axis=1) * rng.uniform(0.6, 1, num), rng.random(num) < crowds)


def detect(objects: Objects, detector: Detector, rng: np.random.Generator) -> Detections:
    """Return what a detector says of an image."""
    is_small = objects.areas < AREAS["small"][1]
    is_found = rng.random(len(is_small)) >= np.where(is_small, detector.miss_small, detector.miss)
    is_found &= rng.random() >= detector.blind
    found = objects.boxes[is_found] * 1.0
    sides = found[:, 2:].copy()
    found[:, :2] += rng.normal(0, detector.shift, sides.shape) * sides
    found[:, 2:] *= np.exp(rng.normal(0, detector.shift, sides.shape))
    num = int(rng.poisson(detector.false_alarms))
    wrong = np.concatenate([rng.uniform(0, 1, (num, 2)) * (SIZE - 20), np.exp(rng.uniform(2, 5.5, (num, 2)))], axis=1)
    scores = np.concatenate([rng.beta(5, 2, len(found)), rng.beta(2, 5, num)])
    scores = scores if detector.digits is None else scores.round(detector.digits)
    classes = np.concatenate([objects.classes[is_found], rng.choice(NUM_CLASSES, num)])
    return Detections(np.concatenate([found, wrong]), classes.astype(np.int64), scores)


def match_all(objects: list[Objects], detections: list[Detections], areas=AREAS) -> MatchTable:
    """Match every image."""
    return join_tables([match_image(o, d, num_classes=NUM_CLASSES, areas=areas)
                        for o, d in zip(objects, detections, strict=True)])


def jitter(detections: Detections, rng: np.random.Generator, *, score: float = 0.02, box: float = 0.02) -> Detections:
    """Return what a slightly different detector says: rounding has moved scores and boxes."""
    sides = np.concatenate([detections.boxes[:, 2:]] * 2, axis=1)
    boxes = detections.boxes + rng.normal(0, box, sides.shape) * sides
    boxes[:, 2:] = np.abs(boxes[:, 2:])
    return replace(detections, boxes=boxes, scores=detections.scores + rng.normal(0, score, len(detections.scores)))
