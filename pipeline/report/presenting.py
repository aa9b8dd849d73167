"""What report and MLflow ask of a kind of product: what it shows beside what every kind does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.compare import ReleaseComparison
from pipeline.gate.pairing import Evidence
from pipeline.gate.verdicts import Policy
from pipeline.records.benchmarks import Machine
from pipeline.records.evaluations import CaseRecord, Evaluation
from pipeline.records.verdicts import Verdict
from pipeline.report.sections import Block, Figure, Section
from pipeline.settings.base import Eval, Product

if TYPE_CHECKING:  # else the report would import what draws the pictures of runs
    from pipeline.report.mlflow_runs.picture_contents import PictureRules
    from pipeline.report.mlflow_runs.predictions import Scored

A = TypeVar("A", bound=Product, contravariant=True)


@dataclass(frozen=True)
class Words:
    """The words of a kind where all kinds say the same.

    Attributes:
        units: of harms that are no points.
        clusters: what the cases of one cluster share.
        marks: lines of the legend on further outcomes.
        given: the input of a case whose output is no text; "" where outputs are texts, which are quoted.
        judged: how MLflow's table says that a case is wrong, and that it is right.
    """

    units: str
    clusters: str
    marks: str
    given: str = ""
    judged: tuple[str, str] = ("WRONG", "right")


@dataclass(frozen=True)
class JudgedRun:
    """One run of MLflow, the reference's too: its verdict and evaluation, as far as there are any.

    Attributes:
        verdict: None of the reference.
        evaluation: None where it can't be read.
        folder: of the evaluation.
        scored: its records.
    """

    verdict: Verdict | None
    evaluation: Evaluation | None
    folder: Path
    scored: Scored


class Presenter(Protocol[A]):
    """What a kind of product shows beside what every kind does; a kind derives from it and says what differs."""

    words: Words

    def list_figures(self, product: A) -> tuple[Figure, ...]:
        """Return the pictures beside harm.png, in the order of the page; the report may leave some of them out."""
        return ()

    def list_columns(self, evals: Mapping[str, Eval]) -> list[str]:
        """Return the metrics without a tolerance that the table of candidates shows."""
        return []

    def build_overview(self, compared: ReleaseComparison) -> list[Block]:
        """Return what stands above the candidates, figures among it."""
        return []

    @abstractmethod
    def build_candidate(
        self, verdict: Verdict, findings: CandidateFindings, evidence: Evidence, reference: Evidence | None
    ) -> list[Block]:
        """Return what was done to a candidate and what came of it, above its comparisons."""

    def build_speed(self, findings: CandidateFindings, here: Machine | None) -> Section | None:
        """Return the section on how fast a candidate is, below its comparisons; None where it stands elsewhere."""
        return None

    def format_step(self, step: Mapping[str, Any]) -> str:
        """Return a step in a few words for MLflow: its kind, words as they are, numbers and what is on by name."""
        words = [str(step["kind"])]
        for key, value in step.items():
            if isinstance(value, bool):
                words += [key] if value else []
            elif isinstance(value, (int, float)):
                words.append(f"{key} {value:g}")
            elif isinstance(value, str) and key != "kind":
                words.append(value)
        return " ".join(words)

    def format_output(self, record: CaseRecord) -> str:
        """Return what MLflow's table shows of an output."""
        return record.output

    def measure_run(self, run: JudgedRun) -> dict[str, float]:
        """Return the metrics of a run beside scores and gate, in their order."""
        return {}

    def choose_rules(self, policy: Policy) -> PictureRules | None:
        """Say how the worst cases are found and shown beside the runs; None where there are no pictures."""
        return None
