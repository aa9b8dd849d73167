"""Stop an evaluation early when harm beyond a tolerance is proven, and for nothing else.

Cases are asked in a random order of their clusters and each is paired with the reference's record. A bet is kept
against "the loss is within the tolerance": its capital can't grow in expectation while that is true, so that it ever
reaches 1 / alpha has a probability of at most alpha, however often one looks. Stopped early is therefore a stronger
word than the gate's own fail, which asks for a loss seen beyond the tolerance and no chance. A pass is never given
early: that needs all cases.

Only rates are watched, each metric overall: a bucket alone stops nothing here. Results that come in out of order wait
for their turn, since what ends early is what is short.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.errors import EvidenceError, HarmFound
from pipeline.records.evaluations import CaseRecord
from pipeline.settings.metrics import MetricDefinition

_NUM_BETS = 24  # sizes of bets, of which the mean is kept: nobody knows the best one before


@dataclass
class _Bet:
    """The capital of one metric's bets."""

    metric: str  # "<eval>/<metric>"
    definition: MetricDefinition
    tolerance: float
    sizes: np.ndarray = field(init=False)
    log_capital: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = np.geomspace(0.01, 0.95, _NUM_BETS) / (1 + self.tolerance)
        self.log_capital = np.zeros(_NUM_BETS)

    def play(self, harms: Sequence[float], largest: int) -> float:
        """Bet on one cluster; return the log of the mean capital.

        Args:
            harms: reference minus candidate of its cases, in [-1, 1].
            largest: cases in the largest cluster, so that no cluster can lose more than everything.
        """
        excess = sum(harm - self.tolerance for harm in harms) / largest
        self.log_capital += np.log1p(self.sizes * excess)
        return float(np.logaddexp.reduce(self.log_capital) - np.log(_NUM_BETS))


class HarmWatch:
    """Watches one eval of one candidate.

    Reference: I. Waudby-Smith and A. Ramdas, Journal of the Royal Statistical Society B 86:1-27 (2024), section 4:
    betting on bounded means; here on clusters, and with a mixture over the size of the bet.
    """

    def __init__(
        self,
        reference: Sequence[CaseRecord],
        metrics: Iterable[tuple[str, MetricDefinition, float]],
        *,
        alpha: float,
        num_metrics: int,
        seed: int = 0,
    ) -> None:
        """Begin with nothing seen.

        Args:
            reference: its records of this eval.
            metrics: name, definition and tolerance of each rate that is watched.
            alpha: probability of ever stopping a candidate within all tolerances.
            num_metrics: that are watched in all evals: alpha is shared evenly.
            seed: of the order.
        """
        self._reference = {record.input_digest: record for record in reference}
        self._bets = [_Bet(*metric) for metric in metrics]
        self._level = float(np.log(num_metrics / alpha))
        sizes = Counter(record.cluster for record in reference)
        self._largest, self._sizes = max(sizes.values(), default=1), sizes
        self._order = sorted(sizes)
        random.Random(seed).shuffle(self._order)
        self._rank = {cluster: rank for rank, cluster in enumerate(self._order)}
        self._found: dict[str, list[CaseRecord]] = {}
        self._next = self.num_seen = 0

    def rank(self, cluster: str) -> int:
        """Return the place of a cluster in the order in which cases are to be asked."""
        return self._rank.get(cluster, len(self._rank))

    def add(self, record: CaseRecord) -> None:
        """Take one judged case; play every cluster whose turn has come and which is complete.

        Raises:
            HarmFound: harm beyond a tolerance is proven.
            EvidenceError: the reference was not asked this case.
        """
        self._found.setdefault(record.cluster, []).append(record)
        while self._next < len(self._order):
            cluster = self._order[self._next]
            if len(self._found.get(cluster, ())) < self._sizes[cluster]:
                return
            self._next += 1
            self._play(self._found.pop(cluster))

    def _play(self, records: Sequence[CaseRecord]) -> None:
        if edited := [r.case_id for r in records if r.input_digest not in self._reference]:
            raise EvidenceError(
                f"case {edited[0]!r} asks something else than when the reference was evaluated; "
                "evaluate the reference anew"
            )
        pairs = [(self._reference[r.input_digest], r) for r in records if r.failure is None]
        self.num_seen += len(pairs)
        for bet in self._bets:
            key, sign = bet.definition.score, bet.definition.sign
            log_capital = bet.play([sign * (ours.scores[key] - own.scores[key]) for ours, own in pairs], self._largest)
            if log_capital >= self._level:
                total = len(self._reference)
                raise HarmFound(
                    f"{bet.metric}: a loss of more than {100 * bet.tolerance:g} points is proven after "
                    f"{self.num_seen:,} of {total:,} cases (e-value {np.exp(log_capital):.0f}, "
                    f"{np.exp(self._level):.0f} is enough); {total - self.num_seen:,} cases, "
                    f"{100 * (total - self.num_seen) / total:.0f} %, need not be asked"
                )
