"""Plant one defect in a copy of a finished project, run the real stages on it, and see what the gate says.

A `Kill` says what is planted and how; `observe` plants it in a `Trial` and reports the stage that stopped it, the
verdict and the reasons that were given. What is wrong with records of other tools, or with what git keeps, is planted
beside the project, and its plant observes the gate that it is about. A defect is killed when the release does not pass,
at whatever stage, for the reason that it has; an equivalent change has to pass.

Not covered: what DVC itself would notice, such as an output that was edited.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.gate.wording import format_harm, format_tolerance, name_comparison, use_metrics
from pipeline.products import list_known_metrics
from pipeline.records.verdicts import Verdict
from tests.certify.kill_trial import StoppedError, Trial
from tests.fakes.judging import list_said
from tests.fakes.synthetic_records import PRODUCT

_OTHER_CODE = "were asked or scored by different settings or code"  # then any change would look stopped


class ProjectError(Exception):
    """The project is not one whose stages have all run, as the code is now: nothing could be told."""


@dataclass(frozen=True)
class Kill:
    """One change to a candidate that has passed.

    Attributes:
        name: what is wrong, or other.
        how: how it is planted.
        plant: makes the change in a trial, and runs the stages up to `compare` that have to run again; or runs another
            gate on it, and returns what that said.
        product: whose candidate.
        candidate: that passes without the change; None: the first of the product's release.
        must_pass: it is an equivalent change, no defect.
        because: pattern of a reason that it must be stopped for: a defect that is stopped by chance is not killed.
        settings: of a candidate that the project does not have, to be built by `plant`.
    """

    name: str
    how: str
    plant: Plant
    product: str = PRODUCT
    candidate: str | None = None
    must_pass: bool = False
    because: str = ""
    settings: dict[str, Any] | None = None


@dataclass(frozen=True)
class Observed:
    """What became of it."""

    verdict: str  # of the candidate; "error" where a stage ended before there was one
    stage: str  # that stopped it, "" where nothing did
    reasons: tuple[str, ...]  # that it gave, one line each
    seconds: float
    loss: str  # the largest against its tolerance, as far as it was measured

    @property
    def passes(self) -> bool:
        """The release went out."""
        return not self.stage

    def is_right(self, kill: Kill) -> bool:
        """Say whether an equivalent change passed, or a defect was stopped for what is wrong."""
        if kill.must_pass:
            return self.passes
        return not self.passes and any(re.search(kill.because, reason) for reason in self.reasons)


Plant = Callable[[Trial], Observed | None]


def observe(kill: Kill, project: Path, folder: Path) -> Observed:
    """Plant one defect in a copy of a project, and judge it.

    Args:
        kill: what to plant.
        project: a finished one.
        folder: where the copy is made; it is removed in the end.

    Raises:
        ProjectError: the project was evaluated by other code.
    """
    start = time.monotonic()
    try:
        with use_metrics(list_known_metrics()):  # what a stage does, and `make certify` is none
            trial = Trial(project, folder, product=kill.product, candidate=kill.candidate, settings=kill.settings)
            seen = kill.plant(trial) or judge(trial)
    except StoppedError as stopped:
        seen = Observed("error", stopped.stage, (stopped.line,), 0.0, "")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if any(_OTHER_CODE in reason for reason in seen.reasons):
        raise ProjectError(
            f"{project}: expected evaluations by the present code and settings, got others; run `make repro` first"
        )
    said = tuple(reason.replace(f"{folder}/", "") for reason in seen.reasons)
    return replace(seen, reasons=said, seconds=round(time.monotonic() - start, 1))


def judge(trial: Trial) -> Observed:
    """Judge the candidate of a trial, unless that was done, and gate the verdict.

    Raises:
        StoppedError: there was none.
    """
    if not trial.verdict_path.exists():
        trial.compare()
    judged = trial.read_verdict()
    seen = Observed(judged.outcome, "", tuple(list_said(judged)), 0.0, describe_loss(judged))
    try:
        trial.run("gate", trial.product)
    except StoppedError as stopped:
        if stopped.line.startswith("exit code"):  # then the verdict's own reasons say it
            return replace(seen, stage="gate")
        return replace(seen, verdict="refused", stage="gate", reasons=(stopped.line,))
    return seen


def describe_loss(verdict: Verdict) -> str:
    """Say which gated metric lost most of its tolerance, and how much; nothing where none was measured."""
    gated = [c for c in verdict.comparisons if c.tolerance]
    if not gated:
        return ""
    worst = max(gated, key=lambda c: c.harm / (c.tolerance or 1.0))
    assert worst.tolerance is not None
    return (
        f"{name_comparison(worst)} {format_harm(worst.metric, worst.harm)}, tolerated "
        f"{format_tolerance(worst.metric, worst.tolerance)}"
    )
