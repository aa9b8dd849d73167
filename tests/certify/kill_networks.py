"""Defects of detectors that no shipped candidate has: synthetic results of pictures, judged as stage `compare` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.gate.audits import Auditor
from pipeline.gate.verdicts import blocking_verdicts
from pipeline.products.vision.detection_settings import DetectionEval
from pipeline.records.evaluations import CaseRecord
from tests.certify.kill_table import Observed, describe_loss
from tests.certify.kill_trial import Trial
from tests.fakes.judging import compare_release, list_said
from tests.fakes.synthetic_categories import PERSON, lose, write_categories_tree
from tests.fakes.synthetic_detections import Change, DetectorAuditor, DetectorParams, make_detector_params
from tests.fakes.synthetic_networks import Way, make_network_product, write_detector
from tests.fakes.synthetic_records import rewrite_records

NUM_NAN = 4  # pictures, all that there are


def judge(product: Any, build: Path, auditor: Auditor[Any] | None = None) -> Observed:
    """Judge what lies under a folder."""
    judgement = compare_release(product, build, auditor).judgement
    verdict = judgement.verdicts[0]
    stage = "compare" if blocking_verdicts(judgement) else ""
    return Observed(verdict.outcome, stage, tuple(list_said(verdict)), 0.0, describe_loss(verdict))


def lose_people(trial: Trial) -> Observed:
    """Judge a detector of 80 categories that finds no person: 201 of 734 objects, and 1/80 of AP."""
    settings = DetectionEval(kind="detection", evalset="evalsets/shelves")
    build = trial.root / "synthetic"
    write_categories_tree(build, {"blind": lose(PERSON)}, settings)
    asked = make_detector_params(["blind"], {"shelves/ap": {"overall": 0.02}}).model_dump()
    product = DetectorParams.model_validate(asked | {"evals": {"shelves": settings.model_dump()}})
    return judge(product, build, DetectorAuditor())


def overflow_in_all(trial: Trial) -> Observed:
    """Judge a detector whose output is NaN in each of so few pictures that no test rules out chance."""
    ways = {"nan": Way(by=Change(score=0, box=0))}
    product = make_network_product(
        "detector", ways, {"scenes/ap": {"overall": 0.05}, "scenes/finite_output_rate": {"overall": 0.05}}
    )
    build = write_detector(trial.root / "synthetic", product, ways, num_images=NUM_NAN)
    rewrite_records(build, "nan", "scenes", _lose_finite)
    return judge(product, build)


def _lose_finite(records: list[CaseRecord]) -> list[CaseRecord]:
    return [record.model_copy(update={"scores": record.scores | {"finite": 0.0}}) for record in records]
