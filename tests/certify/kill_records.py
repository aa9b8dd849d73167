"""Defects of records and of verdicts, as a broken writer or a hand would leave them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

from pipeline.products.text.metrics import TRAJECTORIES
from pipeline.records.evaluations import CaseRecord
from tests.certify.kill_trial import Trial
from tests.certify.kill_weights import change_weight, edit_tensors

Records = list[CaseRecord]


def rewrite(change: Callable[[Records], Records], *kinds: str) -> Callable[[Trial], None]:
    """Return what changes the records of an eval of each kind, sealed again."""

    def plant(trial: Trial) -> None:
        for kind in kinds or ("tool_calls",):
            trial.change_records(trial.find_eval(kind), change)

    return plant


def double(records: Records) -> Records:
    """Write every case twice."""
    return [record for record in records for _ in range(2)]


def double_renamed(records: Records) -> Records:
    """Write every case twice, under two names."""
    return records + [record.model_copy(update={"case_id": f"{record.case_id}-b"}) for record in records]


def drop_last(records: Records) -> Records:
    """Lose a tenth of the cases."""
    return records[: -len(records) // 10]


def rotate_digests(records: Records) -> Records:
    """Write each answer beside the question of the next case."""
    digests = [record.input_digest for record in records]
    return [
        record.model_copy(update={"input_digest": digest})
        for record, digest in zip(records, digests[1:] + digests[:1], strict=True)
    ]


def reverse(records: Records) -> Records:
    """Write the cases in the reverse order."""
    return records[::-1]


def lose_all(records: Records) -> Records:
    """Write no workflow as completed."""
    score = TRAJECTORIES[0].score
    return [record.model_copy(update={"scores": record.scores | {score: 0.0}}) for record in records]


def cut(trial: Trial) -> None:
    """Cut a file of records in the middle of a line."""
    path = trial.evaluation / f"{trial.find_eval('tool_calls')}.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def raise_scores(trial: Trial) -> None:
    """Turn every 0 among the scores of a file of records into a 1."""
    path = trial.evaluation / f"{trial.find_eval('tool_calls')}.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace(":0.0", ":1.0"), encoding="utf-8")


def leave_records(trial: Trial) -> None:
    """Build other weights, and judge them by the records of the old ones."""
    trial.change_weights(edit_tensors(change_weight))


def swap_after_verdict(trial: Trial) -> None:
    """Judge the candidate, and put other weights into its place."""
    trial.compare()
    trial.change_weights(edit_tensors(change_weight))


def edit_verdict(change: Callable[[dict[str, Any]], None]) -> Callable[[Trial], None]:
    """Return what lets a candidate fail, and edits verdict.json."""

    def plant(trial: Trial) -> None:
        _fail(trial)
        judgement = json.loads(trial.verdict_path.read_text(encoding="utf-8"))
        judgement |= {"outcome": "pass", "blocked_by": []}
        judgement["verdicts"][0] |= {"outcome": "pass", "reasons": []}
        change(judgement["verdicts"][0])
        trial.verdict_path.write_text(json.dumps(judgement), encoding="utf-8")

    return plant


def pass_comparisons(verdict: dict[str, Any]) -> None:
    """Make every failed comparison a passed one, its numbers aside."""
    for comparison in verdict["comparisons"]:
        if comparison["outcome"] != "reported":
            comparison["outcome"] = "pass"


def drop_failed(verdict: dict[str, Any]) -> None:
    """Leave out what failed."""
    verdict["comparisons"] = [c for c in verdict["comparisons"] if c["outcome"] in ("pass", "reported")]


def edit_metrics(trial: Trial) -> None:
    """Let a candidate fail, and give it the metrics of before."""
    trial.compare()
    metrics = trial.metrics_path / f"{trial.name}.json"
    kept = shutil.copyfile(metrics, trial.root / "kept.json")
    _fail(trial)
    shutil.copyfile(kept, metrics)


def _fail(trial: Trial) -> None:
    trial.change_records(trial.find_eval("trajectories"), lose_all)
    trial.compare()
