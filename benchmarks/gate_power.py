"""How often the gate passes, fails and abstains, by simulation: `python -m benchmarks.gate_power [--tables ...]`.

Paired cases are drawn with a chosen share of flips and a chosen true drop, measured with the gate's own statistics and
judged by `judge_all`, the rule with everything in it: Tango's bound, the sign-flip test, Holm, and the clusters that a
pass needs. Beside it stands what is used elsewhere, on the same draws: "the drop seen is beyond the tolerance", a
tolerance relative to the reference's accuracy, a recovery of 0.95, and the unpaired z test of two proportions.

Four tables: power by cases, flips and drop; the two errors, a fail of equal models and a pass exactly on the tolerance,
with and without clusters; and a release of 20 gated metrics. Not covered: metrics that are no rates (for AP see
`detection_bounds`), and flips that depend on a case's difficulty: the rule sees flips only, not which cases flip.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom
from statsmodels.stats.proportion import proportions_ztest

from pipeline.gate.clusters import hiding_clusters, sum_by_cluster
from pipeline.gate.decision import Measurement, judge_all
from pipeline.gate.statistics import proportion_bounds, sign_flip_tail, tail_at
from pipeline.gate.wording import use_metrics
from pipeline.products import list_known_metrics

ALPHA, ACCURACY, NUM_METRICS = 0.05, 0.81, 20
CASES, BUCKETS = (340, 1_319, 2_000), (60, 133, 298)
FLIPS, DROPS, TOLERANCES = (0.03, 0.06, 0.10), (0.0, 0.02, 0.03, 0.05, 0.07), (0.03, 0.02)
CLUSTERS = ((3, 0.5), (3, 1.0), (10, 0.5), (10, 1.0))  # cases in a cluster, intraclass correlation of the flips
RELATIVE_TOLERANCE, RECOVERY = 0.08, 0.95
NEGLIGIBLE = 1e-10  # probability of counts that no sum misses


@dataclass(frozen=True)
class World:
    """What is true: `flips` is the share of cases that change, `drop` the accuracy lost, both as fractions."""

    n: int
    flips: float
    drop: float

    @property
    def rates(self) -> list[float]:
        """The shares of losses, gains, cases that both sides have right, and cases that both have wrong."""
        loss, gain = (self.flips + self.drop) / 2, (self.flips - self.drop) / 2
        return [loss, gain, ACCURACY - loss, 1 - ACCURACY - gain]

    @property
    def is_possible(self) -> bool:
        """No more can be lost than flips."""
        return self.drop <= self.flips


def measure_cases(d: NDArray[np.float64], clusters: NDArray[np.int64], tolerance: float) -> Measurement:
    """Measure a rate as `pipeline.gate.measure` does, from the harm of each case in {-1, 0, 1}."""
    bounds, sums = proportion_bounds(d, clusters, confidence=1 - ALPHA), sum_by_cluster(d, clusters)
    tail = sign_flip_tail(sums)
    return Measurement(
        metric="w/task_completion_rate",
        bucket=None,
        reference=ACCURACY,
        candidate=ACCURACY - bounds.harm,
        unit="",
        n=len(d),
        num_clusters=int(clusters.max()) + 1,
        effective_clusters=hiding_clusters(clusters, confidence=1 - ALPHA),
        b=int((d > 0).sum()),
        c=int((d < 0).sum()),
        harm=bounds.harm,
        low=bounds.low,
        high=bounds.high,
        p=tail_at(tail, sums.sum()),
        p_gain=tail_at(tail, -sums.sum()),
        tolerance=tolerance,
        more_cases=None,
        tier="critical",
        sums=sums,
        weights=sum_by_cluster(np.ones(len(d)), clusters),
        tail=tail,
        deff=bounds.design_effect,
    )


@lru_cache(maxsize=4_096)  # each keeps its cases
def measure_counts(b: int, c: int, n: int, tolerance: float) -> Measurement:
    """Measure b losses and c gains in n cases without clusters, where nothing else counts."""
    return measure_cases(np.repeat([1.0, -1.0, 0.0], [b, c, n - b - c]), np.arange(n), tolerance)


@cache
def judge_counts(b: int, c: int, n: int, tolerance: float) -> str:
    """Return the outcome of a release whose one gated metric has these counts."""
    return judge_one(measure_counts(b, c, n, tolerance))


def judge_one(measurement: Measurement) -> str:
    """Return the outcome of a release of one gated metric."""
    return judge_all({"a": [measurement]}, ["a"], alpha=ALPHA)["a"][0].outcome


@cache
def is_z_significant(right: int, other: int, n: int) -> bool:
    """Say whether the unpaired one-sided z test finds the candidate's accuracy lower."""
    return bool(proportions_ztest([right, other], [n, n], alternative="larger")[1] <= ALPHA)


def sum_share(world: World, outcome: str, tolerance: float) -> float:
    """Return the probability of an outcome without clusters: the sum over all counts of losses and gains."""
    (loss, gain, *_), total = world.rates, 0.0
    for b, share in enumerate(binom.pmf(np.arange(world.n + 1), world.n, loss).tolist()):
        if share > NEGLIGIBLE:
            shares = share * binom.pmf(np.arange(world.n - b + 1), world.n - b, gain / (1 - loss))
            total += sum(
                float(shares[c])
                for c in np.flatnonzero(shares > NEGLIGIBLE).tolist()
                if judge_counts(b, c, world.n, tolerance) == outcome
            )
    return total


def draw_counts(world: World, draws: int, rng: np.random.Generator) -> Iterator[tuple[list[int], int]]:
    """Yield distinct counts of losses, gains, both right and both wrong, and how often each was drawn."""
    rows, times = np.unique(rng.multinomial(world.n, world.rates, size=draws), axis=0, return_counts=True)
    yield from zip(rows.tolist(), times.tolist(), strict=True)


def draw_clustered(
    world: World, size: int, intraclass: float, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Draw the harm of each case, and its cluster: a case flips as its cluster does, or else by itself."""
    clusters = np.arange(world.n) // size
    loss, gain = world.rates[:2]
    shared, own = (
        rng.choice([1.0, -1.0, 0.0], num, p=[loss, gain, 1 - loss - gain]) for num in (int(clusters.max()) + 1, world.n)
    )
    return np.where(rng.random(world.n) < intraclass, shared[clusters], own), clusters


def simulate(world: World, draws: int, rng: np.random.Generator) -> Counter[str]:
    """Count outcomes of one world without clusters: "<outcome> <tolerance>" of the gate, and the fails of the rest."""
    counts: Counter[str] = Counter()
    for (b, c, both, _), times in draw_counts(world, draws, rng):
        right, other = both + b, both + c
        for tolerance in TOLERANCES:
            counts[f"{judge_counts(b, c, world.n, tolerance)} {tolerance}"] += times
            counts[f"drop {tolerance}"] += times * ((b - c) / world.n > tolerance)
        counts["relative"] += times * (other < (1 - RELATIVE_TOLERANCE) * right)
        counts["recovery"] += times * (other < RECOVERY * right)
        counts["z"] += times * is_z_significant(right, other, world.n)
    return counts


def print_row(*cells: object) -> None:
    """Print one line of a Markdown table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def percent(count: float, draws: int) -> str:
    """Write a share in percent; one decimal where it is small or near 100, and never 0 or 100 for what is not."""
    share = 100 * count / draws
    if 0.0005 < share < 0.05 or 99.95 <= share < 100:
        return "< 0.1" if share < 50 else "> 99.9"
    return f"{share:.1f}" if 0.0005 < share < 10 or 99 < share < 100 else f"{share:.0f}"


def print_power(draws: int, rng: np.random.Generator) -> None:
    """Print the power table: pass / fail / inconclusive of the gate, and how often other rules fail."""
    print_row(
        "cases",
        "flips",
        "true drop",
        *(f"gate, {t:.0%}" for t in TOLERANCES),
        *(f"drop > {100 * t:g} points" for t in TOLERANCES),
        f"relative {RELATIVE_TOLERANCE:.0%}",
        f"recovery {RECOVERY}",
        "unpaired z",
    )
    print_row("---:", "---:", "---:", *["---:"] * 7)
    for world in (World(n, flips, drop) for n in CASES for flips in FLIPS for drop in DROPS):
        start = f"{world.n:,}", f"{world.flips:.0%}", f"{100 * world.drop:g}"
        if not world.is_possible:
            print_row(*start, *["-"] * 7)
            continue
        found = simulate(world, draws, rng)
        gate = [
            " / ".join(percent(found[f"{outcome} {t}"], draws) for outcome in ("pass", "fail", "inconclusive"))
            for t in TOLERANCES
        ]
        keys = [*(f"drop {t}" for t in TOLERANCES), "relative", "recovery", "z"]
        print_row(*start, *gate, *(percent(found[key], draws) for key in keys))


def print_errors(clustered_draws: int, rng: np.random.Generator) -> None:
    """Print how often equal models fail, and how often one exactly on the tolerance passes; 5 % of each may.

    Without clusters both are sums over all outcomes, with clusters they are drawn.
    """
    tolerance = TOLERANCES[0]
    columns = ["no clusters", *(f"{size}, {intraclass:g}" for size, intraclass in CLUSTERS)]
    print_row("cases", "flips", *(f"false fail: {c}" for c in columns), *(f"wrong pass: {c}" for c in columns))
    print_row("---:", "---:", *["---:"] * 2 * len(columns))
    for n, flips in ((n, flips) for n in (*BUCKETS, *CASES) for flips in FLIPS):
        cells = []
        for outcome, drop in (("fail", 0.0), ("pass", tolerance)):
            world = World(n, flips, drop)
            cells.append(percent(sum_share(world, outcome, tolerance), 1))
            for size, intraclass in CLUSTERS:
                drawn = (draw_clustered(world, size, intraclass, rng) for _ in range(clustered_draws))
                found = sum(judge_one(measure_cases(*cases, tolerance)) == outcome for cases in drawn)
                cells.append(percent(found, clustered_draws))
        print_row(f"{n:,}", f"{flips:.0%}", *cells)


def simulate_release(n: int, flips: float, drop: float, rng: np.random.Generator) -> tuple[bool, bool, bool]:
    """Draw a release of 20 gated metrics, of which the first loses `drop`, and the others nothing.

    Returns:
        Whether the gate fails it, whether the first metric is among what fails, and whether any drop is seen to be
        beyond the tolerance.
    """
    tolerance = TOLERANCES[1]
    worlds = [World(n, flips, drop if i == 0 else 0.0) for i in range(NUM_METRICS)]
    counts = [rng.multinomial(n, world.rates)[:2].tolist() for world in worlds]
    judged = judge_all({"a": [measure_counts(b, c, n, tolerance) for b, c in counts]}, ["a"], alpha=ALPHA)["a"]
    fails = [comparison.outcome == "fail" for comparison in judged]
    return any(fails), fails[0], any((b - c) / n > tolerance for b, c in counts)


def print_releases(draws: int, rng: np.random.Generator) -> None:
    """Print how often a release of 20 gated metrics is stopped: of equal models, and where one metric lost 7 points."""
    print_row(
        "cases",
        "flips",
        f"equal models: any of {NUM_METRICS} drops > 2 points",
        "equal models: the gate fails",
        "one metric lost 7 points: the gate fails it",
    )
    print_row("---:", "---:", "---:", "---:", "---:")
    for n, flips in ((n, flips) for n in CASES for flips in FLIPS):
        equal = np.array([simulate_release(n, flips, 0.0, rng) for _ in range(draws)]).sum(axis=0).tolist()
        lost = "-"
        if World(n, flips, DROPS[-1]).is_possible:
            lost = percent(sum(simulate_release(n, flips, DROPS[-1], rng)[1] for _ in range(draws)), draws)
        print_row(f"{n:,}", f"{flips:.0%}", percent(equal[2], draws), percent(equal[0], draws), lost)


def main(tables: Sequence[str], draws: int, clustered_draws: int, seed: int) -> None:
    """Print the tables and their Monte-Carlo errors; each has random numbers of its own."""
    errors = [
        f"{100 * (share * (1 - share) / num) ** 0.5:.2f} points at {share:.0%}"
        for num in (draws, clustered_draws)
        for share in (0.05, 0.5)
    ]
    print(
        f"{draws:,} draws a cell (standard error {errors[0]}, {errors[1]}), {clustered_draws:,} with clusters and "
        f"for releases ({errors[2]}, {errors[3]})."
    )
    for name in tables:
        print()
        TABLES[name](draws if name == "power" else clustered_draws, np.random.default_rng(seed))


TABLES = {"power": print_power, "errors": print_errors, "releases": print_releases}

if __name__ == "__main__":
    with use_metrics(list_known_metrics()):  # what a stage does
        parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
        parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
        parser.add_argument("--draws", type=int, default=100_000)
        parser.add_argument("--clustered-draws", type=int, default=2_000)
        parser.add_argument("--seed", type=int, default=0)
        arguments = parser.parse_args()
        main(arguments.tables, arguments.draws, arguments.clustered_draws, arguments.seed)
