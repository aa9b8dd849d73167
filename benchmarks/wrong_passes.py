"""How often a candidate that sits exactly on its tolerance passes, where losses come in clusters or in few documents.

    python -m benchmarks.wrong_passes [--runs 4000] [--tables clusters grid perplexity release]

Cases are drawn and bounded by the gate's own code. `clusters`: a part of the tolerance is lost by whole clusters (any
of them, or large ones alone), the rest case by case, and other cases flip both ways beside it (churn). `grid`: the same
over 60 combinations. `perplexity`: the harm of documents is lognormal, or sits in few of them, any or the long ones
alone. `release`: how often
many metrics without a loss pass together, each alone and as one pool. Beside each stands how often a candidate without
a loss passes, which is what a bound costs. Not covered: losses that depend on a case's difficulty.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.gate.clusters import hiding_clusters
from pipeline.gate.scales import find_document_room
from pipeline.gate.statistics import proportion_bounds, ratio_bounds
from pipeline.gate.verdicts import is_proven

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
UNEVEN = tuple(max(1, int(40 / i**0.5)) for i in range(1, 251))
REVIEWED = (  # sizes of the clusters, churn, tolerance
    ((100,) * 45, 0.2, 0.03),
    ((100,) * 20 + (5,) * 180, 0.2, 0.03),
    ((50,) * 30 + (2,) * 600, 0.2, 0.03),
    ((100,) * 60, 0.3, 0.06),
)
GRID_SIZES = ((20,) * 60, (10,) * 150, (3,) * 400, (30,) * 40 + (3,) * 300, UNEVEN)
GRID_CHURN, GRID_TOLERANCES = (0.02, 0.1, 0.3), (0.03, 0.06)
NUM_DOCUMENTS, PPL_TOLERANCE = (62, 200, 350, 500, 1_000, 2_000), math.log(1.02)
NATS_PER_TOKEN = (2.0, 0.9)  # what an 8B model needs for a token of plain English, about; the shipped agent for its own
LENGTHS = {"equal": 0.0, "log-sd 0.6": 0.6}


@dataclass(frozen=True)
class Cell:
    """A candidate on its tolerance: `whole` of it is lost by whole clusters, of any size or of the large ones alone."""

    sizes: Sequence[int]
    churn: float
    tolerance: float
    whole: float = 1.0
    only_large: bool = False

    def draw(self, rng: np.random.Generator, *, loss: float) -> tuple[Floats, NDArray[np.int64]]:
        """Return harms and clusters of a candidate that loses `loss`."""
        sizes = np.asarray(self.sizes)
        clusters = np.repeat(np.arange(len(sizes)), sizes)
        may_lose = sizes >= sizes.max() / 2 if self.only_large else sizes > 0
        rate = loss * self.whole * sizes.sum() / sizes[may_lose].sum()
        # the cases of the clusters that are not lost
        drawn, by_case = rng.random(len(clusters)), loss * (1 - self.whole) / (1 - loss * self.whole)
        own = np.where(drawn < self.churn / 2 + by_case, 1.0, np.where(drawn < self.churn + by_case, -1.0, 0.0))
        return np.where((may_lose & (rng.random(len(sizes)) < rate))[clusters], 1.0, own), clusters

    def passes(self, rng: np.random.Generator, *, loss: float) -> bool:
        """Say whether one draw is proven."""
        d, clusters = self.draw(rng, loss=loss)
        high = proportion_bounds(d, clusters, confidence=CONFIDENCE).high
        return is_proven(high, self.tolerance, hiding_clusters(clusters, confidence=CONFIDENCE))


def list_reviewed() -> Iterator[Cell]:
    """Yield the cells in which the bounds of earlier versions failed."""
    for (sizes, churn, tolerance), whole, large in itertools.product(REVIEWED, (1.0, 0.5), (False, True)):
        if not large or len(set(sizes)) > 1:
            yield Cell(sizes, churn, tolerance, whole, large)


def list_grid() -> Iterator[Cell]:
    """Yield 60 others."""
    for sizes, churn, tolerance, large in itertools.product(GRID_SIZES, GRID_CHURN, GRID_TOLERANCES, (False, True)):
        yield Cell(sizes, churn, tolerance, 0.5 if large and len(set(sizes)) == 1 else 1.0, large)


def run_cells(cells: Sequence[Cell], runs: int) -> None:
    """Print each cell and, last, the worst."""
    worst = 0.0
    print(
        "| clusters | churn | tolerance | lost by whole clusters | wrong pass | lossless pass |\n"
        "|---|---:|---:|---:|---:|---:|"
    )
    for number, cell in enumerate(cells):
        rng = np.random.default_rng(number)
        wrong, right = (np.mean([cell.passes(rng, loss=loss) for _ in range(runs)]) for loss in (cell.tolerance, 0.0))
        worst = max(worst, float(wrong))
        of_large = ", of the large ones" if cell.only_large and len(set(cell.sizes)) > 1 else ""
        lost = f"{100 * cell.whole:.0f} %{of_large}"
        print(
            f"| {name_sizes(cell.sizes)} | {100 * cell.churn:g} % | {100 * cell.tolerance:g} points | {lost} | "
            f"{100 * wrong:.1f} % | {100 * right:.1f} % |",
            flush=True,
        )
    error = math.sqrt(worst * (1 - worst) / runs)
    print(f"\nlargest wrong pass {100 * worst:.2f} %, standard error {100 * error:.2f}\n")


def name_sizes(sizes: Sequence[int]) -> str:
    """Return sizes as "20 x 100 + 180 x 5"."""
    if sizes is UNEVEN:
        return f"{len(UNEVEN)} of 40 to 2"
    return " + ".join(f"{len(list(group))} x {size}" for size, group in itertools.groupby(sizes))


Harms = Callable[[np.random.Generator, Floats], Floats]  # a token, of mean 1, of documents of so many tokens


def few_documents(one_in: int, *, only_long: bool = False) -> Harms:
    """Return a drawer of harms that all sit in one document in so many, or in one long one: of the longest tenth."""

    def draw(rng: np.random.Generator, tokens: Floats) -> Floats:
        may_lose = tokens >= np.quantile(tokens, 0.9) if only_long else tokens > 0
        rate = 1 / one_in * len(tokens) / may_lose.sum()
        each = tokens.sum() / (rate * tokens[may_lose].sum())
        return (may_lose & (rng.random(len(tokens)) < rate)) * float(each)

    return draw


DOCUMENT_HARMS: dict[str, Harms] = {
    "lognormal, log-sd 1": lambda rng, tokens: rng.lognormal(-0.5, 1, len(tokens)),
    "lognormal, log-sd 2": lambda rng, tokens: rng.lognormal(-2, 2, len(tokens)),
    **{f"one in {one_in} has all": few_documents(one_in) for one_in in (50, 100, 200, 400)},
    **{f"one in {one_in}, a long one, has all": few_documents(one_in, only_long=True) for one_in in (50, 100, 200)},
}


def run_perplexity(runs: int) -> None:
    """Print how often a candidate passes whose perplexity is 2 % worse, by documents and how the harm is spread."""
    columns = " | ".join(f"{num} documents" for num in NUM_DOCUMENTS)
    print(f"| nats a token | lengths | harm | {columns} |\n|---:|---|---|{'---:|' * len(NUM_DOCUMENTS)}")
    harms_by_name = [*DOCUMENT_HARMS.items(), ("none", lambda rng, tokens: rng.normal(0, 1, len(tokens)))]
    for nats, (lengths, log_sd), (name, harms) in itertools.product(NATS_PER_TOKEN, LENGTHS.items(), harms_by_name):
        if log_sd == 0 and "long" in name:
            continue  # none is longer
        cells = []
        for num in NUM_DOCUMENTS:
            rng = np.random.default_rng(num)
            cells.append(np.mean([passes_documents(rng, num, harms, nats, log_sd) for _ in range(runs)]))
        print(f"| {nats} | {lengths} | {name} | {' | '.join(f'{100 * cell:.1f} %' for cell in cells)} |", flush=True)
    print()


def passes_documents(rng: np.random.Generator, num: int, harms: Harms, nats: float, log_sd: float) -> bool:
    """Say whether one draw of documents, of lognormal length and `nats` a token, is proven."""
    tokens = np.rint(rng.lognormal(5.5, log_sd, num)) + 1
    nll = rng.normal(nats, 0.15 * nats, num) * tokens
    d = PPL_TOLERANCE * harms(rng, tokens) * tokens
    room = find_document_room(nll + d / 2, d, tokens)
    count = hiding_clusters(np.arange(num), confidence=CONFIDENCE, weights=tokens)
    high = ratio_bounds(d, tokens, np.arange(num), confidence=CONFIDENCE, lost=room, count=count).high
    return is_proven(high, PPL_TOLERANCE, count)


def run_release(
    runs: int, *, num_metrics: int = 12, n: int = 1_319, flips: float = 0.08, tolerance: float = 0.02
) -> None:
    """Print how often metrics without a loss pass alone, together, and as one pool."""
    print("| what is judged | passes without a loss | passes with a loss of the tolerance |\n|---|---:|---:|")
    rows: dict[str, list[float]] = {}
    for loss in (0.0, tolerance):
        rng = np.random.default_rng(3)
        outcomes = np.array([release_passes(rng, num_metrics, n, flips, loss, tolerance) for _ in range(runs)])
        names = (
            f"one metric of {n:,} cases, {100 * flips:g} % of which flip",
            f"all {num_metrics}, each for itself",
            f"the {num_metrics} as one pool, of questions of their own",
            f"the {num_metrics} as one pool, of the same questions, all flipping together in half",
        )
        for name, rate in zip(names, outcomes.mean(axis=0), strict=True):
            rows.setdefault(name, []).append(float(rate))
    for name, rates in rows.items():
        print(f"| {name} | {' | '.join(f'{100 * rate:.1f} %' for rate in rates)} |")
    print(f"\ntolerance {100 * tolerance:g} points, {runs} runs\n")


def release_passes(
    rng: np.random.Generator, num_metrics: int, n: int, flips: float, loss: float, tolerance: float
) -> tuple[bool, bool, bool, bool]:
    """Judge one draw: the first metric, all of them, and them as a pool without and with questions in common."""

    def draw(*shape: int) -> Floats:
        drawn = rng.random(shape)
        return np.where(drawn < (flips + loss) / 2, 1.0, np.where(drawn < flips, -1.0, 0.0))

    def is_within(d: Floats, clusters: NDArray[np.int64]) -> bool:
        return proportion_bounds(d, clusters, confidence=CONFIDENCE).high <= tolerance

    own = draw(num_metrics, n)
    alone = [is_within(d, np.arange(n)) for d in own]
    shared = np.where(rng.random((num_metrics, n)) < 0.5, draw(1, n), own)
    return (
        alone[0],
        all(alone),
        is_within(own.ravel(), np.arange(own.size)),
        is_within(shared.ravel(), np.tile(np.arange(n), num_metrics)),
    )


def main() -> None:
    """Print the tables asked for."""
    tables = {
        "clusters": lambda runs: run_cells(list(list_reviewed()), runs),
        "grid": lambda runs: run_cells(list(list_grid()), runs),
        "perplexity": run_perplexity,
        "release": lambda runs: run_release(max(runs // 10, 100)),
    }
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wrong_passes", description=about)
    parser.add_argument("--runs", type=int, default=4_000)
    parser.add_argument("--tables", nargs="+", choices=tables, default=list(tables))
    given = parser.parse_args()
    for name in given.tables:
        print(f"### {name}, {given.runs:,} runs\n")
        tables[name](given.runs)


if __name__ == "__main__":
    main()
