"""What the gate knows of one candidate, and what it asks a kind of product to add to that."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from pipeline.records.reasons import Reason, ReasonKind
from pipeline.settings.base import Product

if TYPE_CHECKING:  # else an edit of how cases are judged would make stale what every stage made
    from pipeline.gate.decision import Measurement
    from pipeline.gate.pairing import Evidence, PairedCases
    from pipeline.records.benchmarks import Benchmark
    from pipeline.records.medians import MedianInterval
    from pipeline.records.verdicts import CanaryComparison, Comparison, Gain, Metric, Speed

P = TypeVar("P", bound=Product)
A = TypeVar("A", bound=Product, contravariant=True)


@dataclass
class CandidateFindings:
    """What could be measured of one candidate, and what had to be refused."""

    evidence: Evidence | None = None
    pairs: dict[str, PairedCases] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    tripwires: list[Comparison] = field(default_factory=list)
    canary: CanaryComparison | None = None
    metrics: list[Metric] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # beside those of the comparisons
    unproven: list[str] = field(default_factory=list)  # what keeps a pass from being one
    notes: list[Reason] = field(default_factory=list)
    benchmark: Benchmark | None = None
    speed: Speed | None = None
    gain: Gain | None = None
    total: MedianInterval | None = None  # time to the reference's
    seconds: dict[str, float] = field(default_factory=dict)  # that each eval took

    def add_note(self, text: str, kind: ReasonKind = ReasonKind.NOTE) -> None:
        """Add what decides nothing."""
        self.notes.append(Reason(kind=kind, text=text))

    def judge_emulation(self, problem: str, name: str, product: Product, *, remedy: str) -> None:
        """Mark a candidate whose number formats were not run as asked; a released one needs a reason.

        Args:
            problem: what was emulated or left out.
            name: of the candidate.
            product: says what is released, and why an emulation may be.
            remedy: what would run them.
        """
        if name not in product.release:
            self.add_note(problem, ReasonKind.LIMIT)
        elif product.allow_emulated is not None:
            self.add_note(f"{problem}; allowed, as {product.allow_emulated}", ReasonKind.LIMIT)
        else:
            self.refusals.append(f"{problem}; {remedy}, or say why that will do by {product.show_allowance()}")


class Auditor(Protocol[A]):
    """What a kind of product knows of its candidates beside their scores; a kind derives from it.

    Attributes:
        pair_scores: scores that a candidate has beside the reference only, and that older releases lack.
    """

    pair_scores: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def read_candidate(self, build: Path, name: str, product: A) -> Any:
        """Read what was built of a candidate, and how it is run.

        Raises:
            EvidenceError: it was not built, or its record is another candidate's or of other steps.
        """

    @abstractmethod  # a kind that forgot it would ship weights that nobody looked at
    def check_material(self, candidate: Any, product: A, root: Path) -> None:
        """Check the files that a candidate runs: its checkpoint, where it is here, and what it runs beside.

        Raises:
            EvidenceError: they are others than those that were judged.
        """

    def add_scores(self, findings: CandidateFindings, reference: Evidence, product: A, build: Path) -> None:
        """Add `pair_scores` to the records of one side, before any metric is computed from them."""
        return

    def audit_side(self, findings: CandidateFindings, evidence: Evidence, product: A) -> None:
        """Add what one candidate's records say beside its scores: refusals, failures, notes."""
        return

    def audit_eval(
        self, findings: CandidateFindings, evidence: Evidence, reference: Evidence, eval_name: str, product: A
    ) -> None:
        """Add what an eval says of a candidate beside the reference; its metrics are measured already."""
        return

    def audit_pair(
        self, findings: CandidateFindings, evidence: Evidence, reference: Evidence, product: A, build: Path
    ) -> None:
        """Add what a candidate's path and speed are beside the reference's."""
        return

    def list_headlines(self, name: str, comparisons: Sequence[Comparison], product: A) -> list[str]:
        """Say what an average of a candidate hides."""
        return []
