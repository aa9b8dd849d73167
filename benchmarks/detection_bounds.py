"""How often the gate of detectors is wrong: `python -m benchmarks.detection_bounds [--images 100 300] [--runs 300]`.

Made-up detectors on a population of 3,000 images, whose AP differences are the truth; suites of a few hundred are
drawn from it and judged. Per kind of loss and metric it prints how often the 95 % upper bound of the harm is at or
below the true harm: a tolerance of exactly that would let a candidate pass that sits on it, and 5 % are allowed; in
brackets, how far the bound is from the harm seen. Beside the gate's bound stand those that it could have been: the
bootstrap's percentile, BCa, and Student's t of its standard error. For two detectors that differ by chance alone it
prints how often the test of a loss gives p <= 0.05. `--time` measures one comparison of 500 images instead, `--losses`
runs the kinds that a pattern finds. Not covered: clusters, and losses of one class.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from functools import partial

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from pipeline.gate.clusters import effective_clusters
from pipeline.gate.influence import harm_by_image, share_of_objects
from pipeline.gate.resampling import bootstrap_bounds, draw_weights
from pipeline.gate.statistics import sign_flip_p
from pipeline.numerics.average_precision import average_precision
from pipeline.records.detections import MatchTable, join_tables
from tests.fakes.synthetic_detections import Change, Detector, make_pair

POPULATION = 3_000
LOSSES = {
    "blind on 5 % of images": Change(blind=0.05),
    "blind on 2 % of images": Change(blind=0.02),
    "15 % of small boxes gone": Change(score=0.01, box=0.01, drop_small=0.15),
    "3 % of boxes gone, all moved": Change(score=0.02, box=0.02, drop=0.03),
}
CROWDED = {  # of the images with most objects: which share, and how many of them
    "blind on a fifth of the most crowded tenth": (0.1, 0.2),
    "blind on half of the most crowded 3 %": (0.03, 0.5),
}
# column of the area, thresholds
METRICS = {
    "ap": (0, slice(None)),
    "ap_50": (0, slice(0, 1)),
    "ap_small": (1, slice(None)),
    "ap_large": (3, slice(None)),
}
CHANCE = Change(score=0.05, box=0.04)


def make_blind_where_crowded(share: float, rate: float) -> tuple[MatchTable, MatchTable]:
    """Return a detector, and one that finds nothing on some of its most crowded images."""
    ours, same = make_pair(POPULATION, Change())
    _, blind = make_pair(POPULATION, Change(blind=1.0))
    objects = share_of_objects(ours)[:, 0]
    is_blind = (objects >= np.quantile(objects, 1 - share)) & (np.random.default_rng(0).random(POPULATION) < rate)
    return ours, join_tables((same, blind)).at(np.arange(POPULATION) + POPULATION * is_blind)


def bound_all_ways(draws: np.ndarray, parts: np.ndarray, count: float, ours: float, theirs: float) -> dict[str, float]:
    """Return the 95 % upper bound of the harm by name of the method."""
    resampled, t = draws[1:][np.isfinite(draws[1:])], stdtrit(count - 1, 0.95)
    below = np.clip(((resampled < draws[0]).mean() + (resampled <= draws[0]).mean()) / 2, 0.001, 0.999)
    z, bias = ndtri(0.95), ndtri(below)
    squares = float(parts @ parts)
    bend = float((parts**3).sum()) / (6 * squares**1.5) if squares > 0 else 0.0
    return {
        "percentile": float(np.quantile(resampled, 0.95)),
        "BCa": float(np.quantile(resampled, ndtr(bias + (bias + z) / (1 - bend * (bias + z))))),
        "t": float(draws[0] + t * resampled.std(ddof=1)),
        "gate": bootstrap_bounds(draws, count, lost=ours, gained=theirs, confidence=0.95).high,
    }


def judge_suites(ours: MatchTable, theirs: MatchTable, *, num_images: int, runs: int, resamples: int) -> None:
    """Draw suites, and print per metric how often each bound would let a candidate on the tolerance pass."""
    true = (average_precision(ours) - average_precision(theirs))[0]
    rng, bounds = np.random.default_rng(1), defaultdict(lambda: defaultdict(list))
    counts = defaultdict(list)
    for _ in range(runs):
        picked = rng.integers(0, POPULATION, num_images)
        a, b = ours.at(picked), theirs.at(picked)
        weights = draw_weights(np.arange(num_images), num_resamples=resamples)
        x, y = average_precision(a, weights), average_precision(b, weights)
        parts, shares = harm_by_image(a, b), share_of_objects(a)
        for metric, (area, at) in METRICS.items():
            p, q = (side[:, area, at].mean(axis=-1) for side in (x, y))
            counts[metric].append(effective_clusters(shares[:, area], np.arange(num_images)))
            part = parts[:, area, at].mean(axis=-1) - (p[0] - q[0]) * shares[:, area]
            for way, bound in bound_all_ways(p - q, part, counts[metric][-1], p[0], q[0]).items():
                bounds[metric][way].append((bound, p[0] - q[0]))
    for metric, (area, at) in METRICS.items():
        harm = float(true[area, at].mean())
        print(
            f"  {num_images} images, {metric:<8} true harm {harm:.4f}, {np.mean(counts[metric]):.0f} effective: "
            + ", ".join(
                f"{way} {np.mean([high <= harm for high, _ in found]):.1%} "
                f"(+{np.mean([high - seen for high, seen in found]):.4f})"
                for way, found in bounds[metric].items()
            ),
            flush=True,
        )


def try_equals(*, num_images: int, runs: int) -> None:
    """Print how often two detectors that differ by chance alone have a p-value of at most 0.05."""
    ours, theirs = make_pair(POPULATION, CHANCE, detector=Detector())
    rng, small = np.random.default_rng(2), defaultdict(list)
    for _ in range(runs):
        picked = rng.integers(0, POPULATION, num_images)
        parts = harm_by_image(ours.at(picked), theirs.at(picked))
        signs = rng.choice([-1, 1], num_images)  # which side is which is a coin toss for every image
        for metric, (area, at) in METRICS.items():
            small[metric].append(sign_flip_p(parts[:, area, at].mean(axis=-1) * signs, np.arange(num_images)) <= 0.05)
    shares = ", ".join(f"{metric} {np.mean(found):.1%}" for metric, found in small.items())
    print(f"  {num_images} images, p <= 0.05: {shares}", flush=True)


def measure_time(num_images: int = 500) -> None:
    """Print CPU seconds of both sides' resamples and of the parts of the loss."""
    ours, theirs = make_pair(num_images, Change(drop=0.05), detector=Detector(false_alarms=20))
    start = time.process_time()
    weights = draw_weights(np.arange(num_images))
    for side in (ours, theirs):
        average_precision(side, weights)
    middle = time.process_time()
    harm_by_image(ours, theirs)
    print(
        f"{num_images} images, {len(ours.scores):,} detections, {len(weights) - 1:,} resamples, {len(ours.areas)} "
        f"buckets, 10 thresholds, both sides: {middle - start:.2f} CPU s; parts of the loss "
        f"{time.process_time() - middle:.2f} CPU s"
    )


def main() -> None:
    """Run every kind of loss at every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--resamples", type=int, default=300)
    parser.add_argument("--losses", default="", help="part of a kind's name; with it equal detectors are not tried")
    parser.add_argument("--time", action="store_true")
    asked = parser.parse_args()
    if asked.time:
        return measure_time()
    kinds = {name: partial(make_pair, POPULATION, loss) for name, loss in LOSSES.items()}
    kinds |= {name: partial(make_blind_where_crowded, *which) for name, which in CROWDED.items()}
    for name in (name for name in kinds if asked.losses in name):
        print(name, flush=True)
        ours, theirs = kinds[name]()
        for num_images in asked.images:
            judge_suites(ours, theirs, num_images=num_images, runs=asked.runs, resamples=asked.resamples)
    if asked.losses:
        return None
    print("equal detectors", flush=True)
    for num_images in asked.images:
        try_equals(num_images=num_images, runs=4 * asked.runs)
    return None


if __name__ == "__main__":
    main()
